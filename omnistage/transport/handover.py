"""The bounded queue between a thread that must never wait and one that may.

The reader waits on a file descriptor, together with its sockets, instead of polling.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class HandOver(Generic[T]):
    """A FIFO queue for one writing and one reading thread; the writer never blocks.

    Args:
        limit: Items that may wait; more are refused, not dropped silently.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._items)

    def fileno(self) -> int:
        """Readable while there is something to drain."""
        return self._fd

    def put(self, item: T) -> bool:
        """Append ``item`` and wake the reader; False if the queue is full and it was not taken."""
        if len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self.wake()
        return True

    def put_beyond_limit(self, item: T) -> None:
        """Append ``item`` even if the queue is full; for what is bounded by other means."""
        self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Make the descriptor readable without appending anything."""
        # EAGAIN: the counter is at its maximum, so the reader is awake anyway.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def drain(self) -> list[T]:
        """Take everything that is there, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        # One at a time: the writer may append while we drain, and nothing else removes.
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Give the descriptor back; both threads must be done with the queue."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

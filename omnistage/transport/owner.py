"""An engine process ends with the process that started it, from its first moment on.

vLLM's own start would wait minutes for a front-end that is gone, and once it serves it would not
notice at all.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import threading
from typing import Final

log = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 5.0
_watching: set[int] = set()  # this process, once it watches: a fork of it begins anew


def end_with(owner: int, directory: str) -> None:
    """Have this process end soon after ``owner`` has, and remove what that can remove no more.

    Once a process. Nothing happens in the owner itself, nor in a worker, which its engine core
    ends.

    Args:
        owner: Process id.
        directory: The owner's private directory.
    """
    here = os.getpid()
    if here in _watching or here == owner:
        return
    fd = _open(owner)
    if fd is not None and os.getppid() != owner and not _has_ended(fd, 0):
        os.close(fd)
        return
    _watching.add(here)
    threading.Thread(
        target=_wait, args=(fd, directory), name="omnistage-owner", daemon=True
    ).start()


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _has_ended(fd: int, timeout_ms: int | None) -> bool:
    """Whether the process has ended, reaped or not; waits for that without a time limit."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def _wait(fd: int | None, directory: str) -> None:
    if fd is not None:
        _has_ended(fd, None)
    log.warning("the process that started this engine is gone; stopping")
    shutil.rmtree(directory, ignore_errors=True)
    # Politely first, so that workers and files go too.
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

"""The subscriber's side of delivery: one publisher's messages of a topic, in order and each once.

It says when to acknowledge, what to ask for again, and what is lost for good. No sockets and no
clock: messages and times (seconds of any monotonic clock) are arguments.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

ACK_MESSAGES: Final = 16
ACK_SECONDS: Final = 0.02
GRACE_SECONDS: Final = 0.1
"""How long a message that a heartbeat knows of may still be on its way on the other socket."""
RETRY_SECONDS: Final = 0.05
"""Until a message is asked for again; doubles each time."""
SLOWEST_RETRY_SECONDS: Final = 0.5
ATTEMPTS: Final = 10
"""Times a message is asked for. Counted, not timed: an event loop that stood still asked once."""
BUFFER_MESSAGES: Final = 1024
"""Messages that wait for an earlier one; a publisher has fewer than that unacknowledged."""
BUFFER_BYTES: Final = 128 << 20
_EPOCHS: Final = 16

T = TypeVar("T")


class Gap(NamedTuple):
    """Messages that will never come."""

    why: str


class Reassembly(Generic[T]):
    """Puts the messages of one topic and publisher in order.

    Every method that takes something in returns what to hand on, in order: messages, and a
    :class:`Gap` wherever some are lost.

    Args:
        limit: Messages that may wait for an earlier one.
        limit_bytes: Bytes that may; one message may be larger.
    """

    def __init__(self, *, limit: int = BUFFER_MESSAGES, limit_bytes: int = BUFFER_BYTES) -> None:
        self.epoch: int | None = None
        self.expected = 0
        self.ack_at = math.inf
        self.ask_at = math.inf
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._buffer: dict[int, tuple[T, int]] = {}
        self._bytes = 0
        self._known = 0  # everything below it was sent
        self._gone = 0  # and what is below this will not be sent again
        self._asked = 0  # what is below was asked for
        self._attempts = 0
        self._unacked = 0
        self._held = False
        self._past: deque[int] = deque(maxlen=_EPOCHS)

    @property
    def due(self) -> float:
        """When :meth:`ack` or :meth:`ask` has something to say; infinite if nothing is due."""
        return min(self.ack_at, self.ask_at)

    @property
    def waiting(self) -> int:
        """Messages that wait for an earlier one."""
        return len(self._buffer)

    @property
    def unacknowledged(self) -> int:
        """Messages that are known to be sent, and that are not acknowledged."""
        return self._known - self.expected + self._unacked

    def is_past(self, epoch: int) -> bool:
        """Whether this is the epoch of a publisher that another one came after."""
        return epoch in self._past

    def subscribed(self, epoch: int, next_sequence: int, now: float) -> list[T | Gap]:
        """Take a confirmation: the first one, of a connection that came back, or of a new epoch."""
        if self.is_past(epoch):
            return []
        self.ack_at = now  # the publisher learns by it who we are
        if epoch == self.epoch:
            return self.heard(epoch, 0, next_sequence, now)
        restarted = self.epoch is not None
        if self.epoch is not None:
            self._past.append(self.epoch)
        self._buffer.clear()
        self.epoch, self.expected = epoch, next_sequence
        self._known, self._gone, self._asked, self._bytes = next_sequence, 0, 0, 0
        self._settle(now)
        return [Gap("it restarted")] if restarted else []

    def passes(self, epoch: int, sequence: int, now: float) -> bool:
        """Whether a message is the expected one, and nothing is missing: as nearly always.

        Then it counts as taken, and is to be handed on.
        """
        if epoch != self.epoch or sequence != self.expected or self._buffer:
            return False
        if self.ask_at != math.inf:
            return False
        self._count(now)
        return True

    def take(self, epoch: int, sequence: int, message: T, size: int, now: float) -> list[T | Gap]:
        """Take a message of ``size`` bytes, from whichever socket it came."""
        if epoch != self.epoch or sequence < self.expected or sequence in self._buffer:
            return []
        if sequence == self.expected:
            self._count(now)
            return [message, *self._advance(now)]
        self._buffer[sequence] = (message, size)
        self._bytes += size
        self._known = max(self._known, sequence + 1)
        if len(self._buffer) == 1:
            self.ask_at = now  # sockets keep their order: what is before it was lost
        out: list[T | Gap] = []
        while len(self._buffer) > self._limit or (
            self._bytes > self._limit_bytes and len(self._buffer) > 1
        ):
            out += self._skip(min(self._buffer), now)
        return out

    def heard(self, epoch: int, first: int, next_sequence: int, now: float) -> list[T | Gap]:
        """Take a heartbeat's word: what can be sent again, and the topic's next sequence."""
        if epoch != self.epoch:
            return []
        self._known = max(self._known, next_sequence)
        self._gone = max(self._gone, min(first, self._known))
        if self._buffer and self.expected < self._gone and not self._held:
            return self._skip(self._gone, now)
        if self.expected < self._known and self.ask_at == math.inf and not self._held:
            self._attempts = 0
            self.ask_at = now + GRACE_SECONDS
        return []

    def ack(self, now: float) -> bool:
        """Whether :attr:`expected` is to be acknowledged now; asked once, it counts as done."""
        if self._unacked < ACK_MESSAGES and now < self.ack_at:
            return False
        self._unacked, self.ack_at = 0, math.inf
        return True

    def ask(self, now: float) -> tuple[list[T | Gap], tuple[int, int] | None]:
        """What to hand on because it was waited for long enough, and what to ask for again.

        Returns:
            What to hand on; and the first sequence to ask for and the one behind the last, or None.
        """
        out: list[T | Gap] = []
        while now >= self.ask_at:
            end = min(self._buffer) if self._buffer else self._known
            if self.expected < self._gone:
                out += self._skip(self._gone, now)
            elif self._attempts >= ATTEMPTS:
                out += self._skip(end, now)
            else:
                self._asked = end
                self.ask_at = now + min(RETRY_SECONDS * 2**self._attempts, SLOWEST_RETRY_SECONDS)
                self._attempts += 1
                return out, (self.expected, end)
        return out, None

    def hold(self, held: bool, now: float) -> None:
        """While held, ask for nothing: what is missing waits in a socket that is not read."""
        self._held = held
        self._settle(now)

    def _count(self, now: float) -> None:
        self.expected += 1
        self._unacked += 1
        if self._unacked == 1:
            self.ack_at = now + ACK_SECONDS
        if self.expected > self._known:
            self._known = self.expected

    def _skip(self, to: int, now: float) -> list[T | Gap]:
        """Hand on what there is below ``to`` and give the rest up."""
        out: list[T | Gap] = []
        for sequence in [*sorted(s for s in self._buffer if s < to), to]:
            if sequence > self.expected:
                out.append(Gap(f"{sequence - self.expected} messages were lost"))
            if sequence < to:
                out.append(self._pop(sequence))
            self.expected = sequence + (sequence < to)
        self._unacked += 1
        self.ack_at = now
        self._asked = 0
        return out + self._advance(now)

    def _advance(self, now: float) -> list[T | Gap]:
        out: list[T | Gap] = []
        while self.expected in self._buffer:
            out.append(self._pop(self.expected))
            self.expected += 1
            self._unacked += 1
        self._settle(now)
        return out

    def _pop(self, sequence: int) -> T:
        message, size = self._buffer.pop(sequence)
        self._bytes -= size
        return message

    def _settle(self, now: float) -> None:
        """After progress: is something missing still, and when is it asked for?"""
        self._attempts = 0
        if self.expected >= self._known or self._held:
            self.ask_at, self._asked = math.inf, 0
        elif self.expected < self._asked:
            self.ask_at = now + RETRY_SECONDS
        elif self._asked or self._buffer:
            self.ask_at = now
        else:
            self.ask_at = now + GRACE_SECONDS

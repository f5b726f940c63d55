"""The publisher's side of delivery: what it has sent and its subscribers have not acknowledged.

It keeps the messages until then, says whether there is credit for another one, and what is sent
again. No sockets and no clock: frames and times are arguments.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from omnistage.errors import SubscriberStalled, UpdatesLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omnistage.errors import OmniStageError
    from omnistage.wire import Buffer

Frames = tuple["Buffer", ...]

CREDIT: Final = 960
"""Unacknowledged messages of a topic. Less than a socket holds (1,000), so that none fills up."""
RETAINED_BYTES: Final = 64 << 20
"""Bytes of them; one message may be larger."""
REPLAY_MESSAGES: Final = 64
"""Messages sent again for one request, so that a replay holds up nobody else's messages for long"""
REPLAY_BYTES: Final = 8 << 20
"""Bytes of them; one message may be larger."""
HEARTBEAT_SECONDS: Final = 0.5
PEER_SECONDS: Final = 10.0
"""A peer that says nothing for so long is gone. Applications do block their event loop."""
CUT_SECONDS: Final = 2.0
"""And one whose connection is gone, if it does not come again: a process that was killed."""
MAX_PEERS: Final = 4096


class _Entry(NamedTuple):
    sequence: int
    size: int  # bytes
    frames: Frames  # empty: given up, it only counts until it is acknowledged


class Retained:
    """One topic's messages, from when they are sent until every peer has them.

    Args:
        start: Sequence of the first message.
        credit: Messages that may be unacknowledged.
        limit: Bytes that may be.
    """

    def __init__(
        self, start: int = 0, *, credit: int = CREDIT, limit: int = RETAINED_BYTES
    ) -> None:
        self.next_sequence = start
        self.subscribed = True
        self.stalled = False
        self.acked: dict[bytes, int] = {}  # peer -> sequence it has everything below of
        self._first = start
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._credit = credit
        self._limit = limit

    @property
    def unacknowledged(self) -> int:
        """Messages that a peer may still lack."""
        return len(self._entries)

    @property
    def first(self) -> int:
        """Sequence of the oldest message that can be sent again, or else of the next one."""
        return max(self._first, self._entries[0].sequence if self._entries else self.next_sequence)

    def admits(self, size: int) -> bool:
        """Whether a message of ``size`` bytes may be sent: there is credit for it."""
        if self.stalled:
            return False
        within = len(self._entries) < self._credit and self._bytes + size <= self._limit
        return within or not self._entries

    def append(self, frames: Frames, size: int) -> None:
        """Keep the message that is sent as :attr:`next_sequence`."""
        self._entries.append(_Entry(self.next_sequence, size, frames))
        self._bytes += size
        self.next_sequence += 1

    def give_up(self, *, stalled: bool) -> None:
        """Note that a message will never be sent, and let go of those before it.

        It takes a sequence all the same, so that the subscriber learns that it lacks one. All the
        topic's requests fail with this message: nobody needs what they had been sent before.

        Args:
            stalled: Whether to send nothing more until the peers have caught up.
        """
        self.next_sequence += 1
        self._first = self.next_sequence
        if not self.stalled:
            self._entries = deque(_Entry(e.sequence, e.size, ()) for e in self._entries)
        self.stalled = self.stalled or stalled

    def ack(self, peer: bytes, position: int) -> bool:
        """Note that ``peer`` has everything below ``position``.

        Returns:
            Whether the peer is new to this topic.
        """
        before = self.acked.get(peer)
        if 0 <= position <= self.next_sequence:
            self.acked[peer] = position if before is None else max(before, position)
            self._trim()
        return before is None and peer in self.acked

    def part(self, peer: bytes) -> None:
        """Wait for ``peer`` no more."""
        if self.acked.pop(peer, None) is not None and self.acked:
            self._trim()

    def replay(self, first: int, end: int) -> Iterator[Frames]:
        """The messages from ``first`` up to, not including, ``end``: as many as go at once."""
        first = max(first, self.first)
        # Behind _first they are consecutive, and the newest is the last.
        skip = len(self._entries) - (self.next_sequence - first)
        sent = 0
        for entry in islice(self._entries, max(0, skip), max(0, skip) + REPLAY_MESSAGES):
            if entry.sequence >= end or (sent and sent + entry.size > REPLAY_BYTES):
                return
            sent += entry.size
            if entry.frames:
                yield entry.frames

    def _trim(self) -> None:
        have = min(self.acked.values())
        while self._entries and self._entries[0].sequence < have:
            self._bytes -= self._entries.popleft().size
        # At half, so that one which hardly reads does not fail a request with every message.
        if len(self._entries) <= self._credit // 2 and self._bytes <= self._limit // 2:
            self.stalled = False


class _Peer:
    def __init__(self) -> None:
        self.heard = 0.0
        self.cut_at: float | None = None
        self.topics: set[bytes] = set()


class Ledger:
    """What a publisher owes to whom: its topics, and the peers that acknowledge them.

    A topic is kept while it is subscribed or a peer of it lives: a connection that is cut comes
    back and misses nothing. One that is dropped with messages in it fails its requests.

    Args:
        undelivered: Called with a topic whose open requests have failed, and why.
        max_topics: Topics at once.
        credit: See :class:`Retained`.
        limit: See :class:`Retained`.
    """

    def __init__(
        self,
        undelivered: Callable[[bytes, OmniStageError], None],
        *,
        max_topics: int,
        credit: int = CREDIT,
        limit: int = RETAINED_BYTES,
    ) -> None:
        self.topics: dict[bytes, Retained] = {}
        self.peers: dict[bytes, _Peer] = {}
        self._undelivered = undelivered
        self._max_topics = max_topics
        self._credit = credit
        self._limit = limit
        # Where a topic begins: behind all that went before, so that what is late from a topic's
        # former life is never taken for something new.
        self._floor = 0
        self._due = 0.0

    @property
    def owed(self) -> bool:
        """Whether a living peer has not acknowledged everything."""
        return any(t.unacknowledged and t.acked for t in self.topics.values())

    def subscribe(self, topic: bytes) -> int | None:
        """Take up a topic.

        Returns:
            The sequence of its next message; None if there are too many topics.
        """
        retained = self.topics.get(topic)
        if retained is None:
            if len(self.topics) >= self._max_topics:
                return None
            retained = Retained(self._floor, credit=self._credit, limit=self._limit)
            self.topics[topic] = retained
        retained.subscribed = True
        return retained.next_sequence

    def unsubscribe(self, topic: bytes) -> None:
        """Note that no connection subscribes a topic any more; its peers may come back."""
        retained = self.topics.get(topic)
        if retained is not None:
            retained.subscribed = False
            self._drop_if_alone(topic, retained)

    def ack(self, peer: bytes, positions: Sequence[tuple[bytes, int]], now: float) -> bool:
        """Take a peer's acknowledgement, its sign of life.

        Returns:
            Whether something is new to it: it wants a heartbeat at once.
        """
        if peer not in self.peers and len(self.peers) >= MAX_PEERS:
            return False
        new = False
        for topic, position in positions:
            retained = self.topics.get(topic)
            if retained is not None and retained.ack(peer, position):
                new = True
                if not self.peers:
                    self._due = now + HEARTBEAT_SECONDS
                self.peers.setdefault(peer, _Peer()).topics.add(topic)
        if peer in self.peers:
            self.peers[peer].heard, self.peers[peer].cut_at = now, None
            return new
        return not positions  # it takes itself for known, and learns by an empty one that it is not

    def cut(self, peer: bytes, now: float) -> None:
        """Note that there is no connection to a peer."""
        known = self.peers.get(peer)
        if known is not None and known.cut_at is None:
            known.cut_at = now

    def leave(self, peer: bytes, topic: bytes) -> None:
        """Take a peer off a topic that it does not want any more."""
        known, retained = self.peers.get(peer), self.topics.get(topic)
        if known is not None:
            known.topics.discard(topic)
            if not known.topics:
                del self.peers[peer]
        if retained is not None:
            retained.part(peer)
            self._drop_if_alone(topic, retained)

    def state(self, peer: bytes) -> tuple[tuple[bytes, int, int], ...]:
        """A heartbeat's content: (topic, first, next sequence) of each topic of a peer."""
        known = self.peers.get(peer)
        if known is None:
            return ()
        states = ((topic, self.topics[topic]) for topic in known.topics)
        return tuple((topic, state.first, state.next_sequence) for topic, state in states)

    def wait(self, now: float) -> float | None:
        """Seconds until :meth:`beat` has something to do; None while there are no peers."""
        return max(0.0, self._due - now) if self.peers else None

    def beat(self, now: float) -> list[bytes]:
        """Let go of peers that are gone.

        Returns:
            The peers whose heartbeat is due.
        """
        if not self.peers or now < self._due:
            return []
        late = now - self._due > 2 * HEARTBEAT_SECONDS
        self._due = now + HEARTBEAT_SECONDS
        for name, peer in list(self.peers.items()):
            cut = peer.cut_at is not None and now - peer.cut_at > CUT_SECONDS
            if not cut and now - peer.heard <= PEER_SECONDS:
                continue
            if late:  # this thread was stopped: what they said meanwhile is not read yet
                peer.heard, peer.cut_at = now - PEER_SECONDS / 2, None
            else:
                self.lose(name)
        return list(self.peers)

    def lose(self, name: bytes) -> None:
        """Wait no more for a peer, on any topic. Idempotent."""
        peer = self.peers.pop(name, None)
        if peer is None:
            return
        for topic in peer.topics:
            retained = self.topics[topic]
            retained.part(name)
            self._drop_if_alone(topic, retained)
            if not retained.acked and topic in self.topics:
                retained.give_up(stalled=True)
                self._undelivered(
                    topic,
                    SubscriberStalled("the request's subscriber does not answer any more"),
                )

    def _drop_if_alone(self, topic: bytes, retained: Retained) -> None:
        if retained.subscribed or retained.acked:
            return
        del self.topics[topic]
        self._floor = max(self._floor, retained.next_sequence)
        if retained.unacknowledged:
            self._undelivered(
                topic, UpdatesLost("the request's subscriber is gone; submit it again")
            )

"""Both machines of delivery and a channel between them that does to messages what it likes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omnistage.errors import OmniStageError
from omnistage.transport.reassembly import Gap, Reassembly
from omnistage.transport.retained import Ledger

SILENT = 3.0
SUBSCRIBED, DATA, BEAT, ACK, REPLAY, LEAVE = "subscribed", "data", "beat", "ack", "replay", "leave"


@dataclass
class Packet:
    kind: str
    to: str  # a listener's name; empty for the publisher
    epoch: int
    body: tuple[Any, ...]
    again: bool = False


@dataclass
class Listener:
    """A subscriber: a reassembly, and what it was handed."""

    name: str
    topic: bytes
    reassembly: Reassembly[int]
    out: list[int | Gap] = field(default_factory=list)
    held: bool = False
    heard: float = 0.0
    unread: list[Packet] = field(default_factory=list)
    since: int | None = None  # number of the first message behind its confirmation

    @property
    def peer(self) -> bytes:
        return self.name.encode()


class World:
    """One publisher (with its restarts), its listeners, and what is on its way between them.

    Messages are numbered over all topics and epochs, so that order can be seen in what arrives.
    """

    def __init__(self, credit: int, limit: int) -> None:
        self.now = 100.0
        self.credit, self.limit = credit, limit
        self.flying: list[Packet] = []
        self.listeners: dict[str, Listener] = {}
        self.numbers = 0
        self.names = 0
        self.published: list[tuple[int, bytes]] = []  # (number, topic), also what was given up
        self.failed: list[tuple[bytes, OmniStageError]] = []
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.ledger = Ledger(
            lambda topic, error: self.failed.append((topic, error)),
            max_topics=4,
            credit=self.credit,
            limit=self.limit,
        )
        for topic in {listener.topic for listener in self.listeners.values()}:
            self.subscribe(topic)

    def subscribe(self, topic: bytes) -> None:
        """What a connection that is made, or made again, brings about."""
        sequence = self.ledger.subscribe(topic)
        assert sequence is not None
        for listener in self.listeners.values():
            if listener.topic == topic:
                # On one socket none overtakes another.
                self.flying = [
                    p for p in self.flying if p.kind != SUBSCRIBED or p.to != listener.name
                ]
                self.flying.append(
                    Packet(SUBSCRIBED, listener.name, self.epoch, (sequence, self.numbers))
                )

    def join(self, topic: bytes) -> Listener:
        self.names += 1
        machine: Reassembly[int] = Reassembly(limit=self.credit + 2, limit_bytes=self.limit * 2)
        listener = Listener(f"{self.names}", topic, machine, heard=self.now)
        self.listeners[listener.name] = listener
        self.subscribe(topic)
        return listener

    def leave(self, listener: Listener) -> None:
        del self.listeners[listener.name]
        self.flying = [p for p in self.flying if p.to != listener.name]
        self.flying.append(Packet(LEAVE, "", self.epoch, (listener.peer, listener.topic)))
        if all(other.topic != listener.topic for other in self.listeners.values()):
            self.ledger.unsubscribe(listener.topic)

    def cut(self, topic: bytes) -> None:
        """The data connections of a topic's listeners are lost and made again."""
        names = {name for name, one in self.listeners.items() if one.topic == topic}
        self.flying = [p for p in self.flying if p.to not in names or p.kind == BEAT or p.again]
        self.ledger.unsubscribe(topic)
        if names:
            self.subscribe(topic)

    def publish(self, topic: bytes, size: int) -> None:
        retained = self.ledger.topics.get(topic)
        if retained is None:
            return
        number = self.numbers
        self.numbers += 1
        self.published.append((number, topic))
        if not retained.admits(size):
            retained.give_up(stalled=True)
            return
        sequence = retained.next_sequence
        frames = (number.to_bytes(4, "big"), sequence.to_bytes(4, "big"), bytes([size]))
        retained.append(frames, size)
        for listener in self.listeners.values():
            if listener.topic == topic:
                body = (sequence, number, size)
                self.flying.append(Packet(DATA, listener.name, self.epoch, body))

    def deliver(self, packet: Packet) -> None:
        if not packet.to:
            self._to_publisher(packet)
        elif packet.to in self.listeners:
            self._to_listener(self.listeners[packet.to], packet)

    def tick(self, seconds: float) -> None:
        """Time passes, and everyone does what is due."""
        self.now += seconds
        for peer in self.ledger.beat(self.now):
            self._beat(peer)
        for listener in self.listeners.values():
            machine = listener.reassembly
            if machine.epoch is None:
                continue
            if machine.ack(self.now) or self.now - listener.heard > SILENT:
                self._ack(listener)
            if self.now >= machine.ask_at:
                out, wanted = machine.ask(self.now)
                listener.out += out
                if wanted is not None:
                    body = (listener.peer, listener.topic, *wanted)
                    self.flying.append(Packet(REPLAY, "", machine.epoch, body))

    def hold(self, listener: Listener, held: bool) -> None:
        listener.held = held
        listener.reassembly.hold(held, self.now)
        if not held:
            unread, listener.unread = listener.unread, []
            for packet in unread:
                self._to_listener(listener, packet)

    def settle(self) -> None:
        """The channel heals: everything arrives, until nobody has anything to say."""
        for listener in list(self.listeners.values()):
            self.hold(listener, False)
        for topic in {listener.topic for listener in self.listeners.values()}:
            self.subscribe(topic)
        for _ in range(200):
            while self.flying:
                self.deliver(self.flying.pop(0))
            self.tick(0.25)
            if not self.flying and self.quiet:
                return

    @property
    def quiet(self) -> bool:
        acked = all(not t.unacknowledged and not t.stalled for t in self.ledger.topics.values())
        known = set(self.ledger.peers) == {one.peer for one in self.listeners.values()}
        positions = all(
            one.reassembly.expected == self.ledger.topics[one.topic].next_sequence
            and one.reassembly.due == math.inf
            for one in self.listeners.values()
        )
        return acked and known and positions

    def _to_publisher(self, packet: Packet) -> None:
        if packet.epoch != self.epoch:
            return
        if packet.kind == ACK:
            peer, positions = packet.body
            if self.ledger.ack(peer, positions, self.now):
                self._beat(peer)
        elif packet.kind == LEAVE:
            self.ledger.leave(*packet.body)
        elif packet.kind == REPLAY:
            peer, topic, first, end = packet.body
            retained = self.ledger.topics.get(topic)
            if retained is None:
                return
            if first < retained.first:
                self._beat(peer)
            for frames in retained.replay(first, end):
                number, sequence = (int.from_bytes(f, "big") for f in frames[:2])
                body = (sequence, number, frames[2][0])
                name = peer.decode()
                self.flying.append(Packet(DATA, name, self.epoch, body, again=True))

    def _to_listener(self, listener: Listener, packet: Packet) -> None:
        machine = listener.reassembly
        if listener.held and (packet.kind in {DATA, SUBSCRIBED}):
            if not packet.again:
                listener.unread.append(packet)
            return
        if packet.kind == SUBSCRIBED:
            sequence, number = packet.body
            if listener.since is None:
                listener.since = number
            listener.out += machine.subscribed(packet.epoch, sequence, self.now)
        elif packet.kind == DATA:
            sequence, number, size = packet.body
            if machine.passes(packet.epoch, sequence, self.now):
                listener.out.append(number)
                return
            listener.out += machine.take(packet.epoch, sequence, number, size, self.now)
        elif packet.epoch == machine.epoch:
            listener.heard = self.now
            for topic, first, next_sequence in packet.body[0]:
                if topic == listener.topic:
                    listener.out += machine.heard(packet.epoch, first, next_sequence, self.now)
            self._ack(listener)

    def _ack(self, listener: Listener) -> None:
        machine = listener.reassembly
        assert machine.epoch is not None
        body = (listener.peer, ((listener.topic, machine.expected),))
        self.flying.append(Packet(ACK, "", machine.epoch, body))

    def _beat(self, peer: bytes) -> None:
        state = self.ledger.state(peer)
        self.flying.append(Packet(BEAT, peer.decode(), self.epoch, (state,)))


def check_told(world: World, listener: Listener) -> None:
    """Everything published for a listener was handed to it once, in order, or a gap in its place.

    What was published before the last thing it was handed is meant; at rest, everything.
    """
    numbers = [item for item in listener.out if not isinstance(item, Gap)]
    assert numbers == sorted(set(numbers)), "handed on twice, or out of order"
    assert not numbers or (listener.since is not None and numbers[0] >= listener.since)
    place = {n: i for i, n in enumerate(n for n, t in world.published if t == listener.topic)}
    last: int | None = None
    for number in numbers:
        before = listener.out[: listener.out.index(number)]
        told = bool(before) and isinstance(before[-1], Gap)
        if last is not None and place[number] != place[last] + 1:
            assert told, f"{number} came after {last} and nothing was said"
        last = number


def check_complete(world: World, listener: Listener) -> None:
    """At rest: the last message is there too, or a gap in its place."""
    assert listener.since is not None
    due = [n for n, topic in world.published if topic == listener.topic and n >= listener.since]
    if due and (not listener.out or listener.out[-1] != due[-1]):
        assert listener.out, f"{due} were never handed on and nothing was said"
        assert isinstance(listener.out[-1], Gap), f"{due[-1]} was never handed on"
    first = next((item for item in listener.out), None)
    if due and first is not None and not isinstance(first, Gap):
        assert first == due[0], f"{due[0]} is missing and nothing was said"

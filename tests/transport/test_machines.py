"""Delivery's two machines through a channel that drops, delays, doubles and reorders.

Whatever it does: each message once, in order, or a gap where it would be; bounded memory; and
nothing left at the end.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from omnistage.transport.reassembly import ATTEMPTS, Gap, Reassembly
from omnistage.transport.retained import Ledger, Retained
from tests.transport.machines import World, check_complete, check_told

TOPICS = (b"a/x\0", b"a/y\0")
CREDIT = 8
LIMIT = 60
topics = st.sampled_from(TOPICS)
places = st.integers(0, 63)


class Delivery(RuleBasedStateMachine):
    """Any order of what publisher, subscribers and channel may do."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(CREDIT, LIMIT)

    @initialize(shared=st.booleans())
    def begin(self, shared: bool) -> None:
        for topic in (*TOPICS, *(TOPICS[:1] if shared else ())):
            self.world.join(topic)
        if shared or not self.world.names % 2:
            while self.world.flying:
                self.world.deliver(self.world.flying.pop(0))

    @rule(topic=topics, count=st.integers(1, 6), size=st.integers(1, 20))
    def publish(self, topic: bytes, count: int, size: int) -> None:
        for _ in range(count):
            self.world.publish(topic, size)

    @precondition(lambda self: self.world.flying)
    @rule(place=places, count=st.integers(1, 8))
    def deliver(self, place: int, count: int) -> None:
        for _ in range(min(count, len(self.world.flying))):
            self.world.deliver(self.world.flying.pop(place % len(self.world.flying)))

    @precondition(lambda self: self.world.flying)
    @rule()
    def deliver_all(self) -> None:
        for _ in range(len(self.world.flying)):
            self.world.deliver(self.world.flying.pop(0))

    @precondition(lambda self: self.world.flying)
    @rule(place=places, count=st.integers(1, 4))
    def drop(self, place: int, count: int) -> None:
        for _ in range(min(count, len(self.world.flying))):
            self.world.flying.pop(place % len(self.world.flying))

    @precondition(lambda self: self.world.flying)
    @rule(place=places)
    def double(self, place: int) -> None:
        packet = self.world.flying[place % len(self.world.flying)]
        self.world.flying.append(packet)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, 0.6, 3.5, 11.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(place=places)
    def no_connection(self, place: int) -> None:
        listener = list(self.world.listeners.values())[place % len(self.world.listeners)]
        self.world.ledger.cut(listener.peer, self.world.now)

    @rule(topic=topics)
    def cut(self, topic: bytes) -> None:
        self.world.cut(topic)

    @rule()
    def restart(self) -> None:
        self.world.start()

    @rule(place=places)
    def another_instead(self, place: int) -> None:
        """A subscriber leaves with messages on their way, as an abort makes it, and one comes."""
        old = list(self.world.listeners.values())[place % len(self.world.listeners)]
        check_told(self.world, old)
        self.world.leave(old)
        self.world.join(old.topic)

    @rule(place=places, held=st.booleans())
    def stall(self, place: int, held: bool) -> None:
        listener = list(self.world.listeners.values())[place % len(self.world.listeners)]
        self.world.hold(listener, held)

    @invariant()
    def memory_is_bounded(self) -> None:
        for retained in self.world.ledger.topics.values():
            assert retained.unacknowledged <= CREDIT
            assert retained._bytes <= LIMIT
        for listener in self.world.listeners.values():
            machine = listener.reassembly
            assert machine.waiting <= CREDIT + 2
            assert machine._bytes == sum(size for _, size in machine._buffer.values())
        assert len(self.world.ledger.topics) <= len(TOPICS)

    @invariant()
    def nothing_is_twice_out_of_order_or_silently_lost(self) -> None:
        for listener in self.world.listeners.values():
            check_told(self.world, listener)

    def teardown(self) -> None:
        world = self.world
        world.settle()
        assert world.quiet, "does not come to rest"
        for listener in world.listeners.values():
            check_told(world, listener)
            check_complete(world, listener)
            assert not listener.reassembly.waiting
        for listener in list(world.listeners.values()):
            world.leave(listener)
        while world.flying:
            world.deliver(world.flying.pop(0))
        assert not world.ledger.topics
        assert not world.ledger.peers
        assert world.ledger.wait(world.now) is None


def run(examples: int) -> None:
    run_state_machine_as_test(
        Delivery,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_message_arrives_once_in_order_or_is_said_to_be_lost() -> None:
    run(300)


@pytest.mark.slow
@pytest.mark.timeout(0)  # it takes as long as its examples do
def test_so_it_is_in_3000_examples() -> None:
    run(3000)


@pytest.mark.parametrize("listeners", [1, 3])
def test_a_channel_that_only_loses_delays_and_doubles_loses_nothing_for_good(
    listeners: int,
) -> None:
    world = World(CREDIT, LIMIT)
    joined = [world.join(TOPICS[0]) for _ in range(listeners)]
    while world.flying:
        world.deliver(world.flying.pop(0))
    for number in range(500):
        while not world.ledger.topics[TOPICS[0]].admits(1):
            world.tick(0.05)
            for packet in [world.flying.pop(0) for _ in range(len(world.flying))]:
                world.deliver(packet)
        world.publish(TOPICS[0], 1)
        if number % 3 == 0:
            world.flying.pop()
        if number % 7 == 0 and world.flying:
            world.flying.insert(0, world.flying[-1])
        if number % 5 == 0 and world.flying:
            world.deliver(world.flying.pop())
    world.settle()
    assert [listener.out for listener in joined] == [list(range(500))] * listeners
    assert not world.failed


def test_what_a_publisher_never_sends_again_is_lost_after_ten_requests() -> None:
    machine: Reassembly[str] = Reassembly()
    machine.subscribed(1, 0, 0.0)
    assert machine.take(1, 2, "c", 1, 0.0) == []
    now, asked = 0.0, 0
    out: list[str | Gap] = []
    while not out:
        now = machine.ask_at
        out, wanted = machine.ask(now)
        asked += wanted == (0, 2)
    assert asked == ATTEMPTS
    assert out == [Gap("2 messages were lost"), "c"]
    assert 3 < now < 5
    assert machine.ack(now)
    assert machine.due == math.inf


def test_a_former_epochs_confirmation_that_is_late_changes_nothing() -> None:
    machine: Reassembly[str] = Reassembly()
    machine.subscribed(1, 5, 0.0)
    assert machine.subscribed(2, 0, 0.0) == [Gap("it restarted")]
    assert machine.subscribed(1, 5, 0.0) == []
    assert machine.take(1, 5, "old", 1, 0.0) == []
    assert machine.take(2, 0, "new", 1, 0.0) == ["new"]


def test_an_acknowledgement_is_due_after_16_messages_or_20_ms() -> None:
    machine: Reassembly[int] = Reassembly()
    machine.subscribed(1, 0, 0.0)
    assert machine.ack(0.0)
    for number in range(15):
        machine.take(1, number, number, 1, 1.0)
        assert not machine.ack(1.0)
    machine.take(1, 15, 15, 1, 1.0)
    assert machine.ack(1.0)
    machine.take(1, 16, 16, 1, 2.0)
    assert not machine.ack(2.01)
    assert machine.due == pytest.approx(2.02)
    assert machine.ack(2.03)


def test_more_than_may_wait_gives_up_what_it_waits_for() -> None:
    machine: Reassembly[int] = Reassembly(limit_bytes=100)
    machine.subscribed(1, 0, 0.0)
    assert machine.take(1, 1, 1, 1000, 0.0) == []  # one may be larger
    assert machine.take(1, 3, 3, 1, 0.0) == [Gap("1 messages were lost"), 1]
    assert machine.take(1, 2, 2, 1, 0.0) == [2, 3]


def test_a_peer_that_is_cut_off_is_gone_sooner_than_a_silent_one() -> None:
    failed: list[bytes] = []
    ledger = Ledger(lambda topic, error: failed.append(topic), max_topics=9)
    for topic, peer in zip(TOPICS, (b"cut", b"silent"), strict=True):
        ledger.subscribe(topic)
        ledger.ack(peer, ((topic, 0),), 0.0)
        ledger.topics[topic].append((b"m",), 1)
    for beat in range(1, 30):
        ledger.cut(b"cut", beat / 2)
        if b"cut" not in ledger.beat(beat / 2):
            break
    assert failed == [TOPICS[0]]
    assert 2 < beat / 2 < 4
    assert not ledger.topics[TOPICS[0]].admits(1)
    assert ledger.topics[TOPICS[1]].admits(1)
    ledger.ack(b"another", ((TOPICS[0], ledger.topics[TOPICS[0]].next_sequence),), 3.0)
    assert ledger.topics[TOPICS[0]].admits(1)


def test_a_topics_next_life_begins_behind_its_last() -> None:
    ledger = Ledger(lambda topic, error: None, max_topics=1)
    assert ledger.subscribe(TOPICS[0]) == 0
    assert ledger.subscribe(TOPICS[1]) is None
    for _ in range(7):
        ledger.topics[TOPICS[0]].append((b"m",), 1)
    ledger.unsubscribe(TOPICS[0])
    assert ledger.subscribe(TOPICS[1]) == 7


def test_the_retained_log_is_bounded_in_bytes_but_for_one_message() -> None:
    retained = Retained(limit=100)
    assert retained.admits(1000)
    retained.append((b"m",), 1000)
    assert not retained.admits(1)
    assert retained.ack(b"p", 1)
    assert retained.admits(60)
    retained.append((b"m",), 60)
    assert not retained.admits(60)
    assert not retained.ack(b"q", 99)  # nobody can have what was never sent
    assert not retained.ack(b"q", -1)
    assert retained.acked == {b"p": 1}

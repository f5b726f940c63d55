"""Peers that send garbage at every socket: counted, cut off in the end; others do not notice."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
import zmq

from omnistage.errors import ProtocolError, SubscriberStalled
from omnistage.transport.delivery import MAX_RECEIVED
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.malformed import MAX_MALFORMED, MAX_OFFENDERS, Malformed
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import (
    MAX_HEADER_BYTES,
    MAX_SUBSCRIPTION_BYTES,
    PROTOCOL_VERSION,
    Ack,
    Data,
    Failed,
    Update,
    decode_data,
    encode,
    topic,
)
from tests.transport.test_faults import eventually, site
from tests.transport.test_transport import Handler, Hostile, Site

__all__ = ["site"]  # a fixture

RNG = random.Random(5)
JUNK = [
    [b""],
    [b"\xc1"],
    [b"\xdd\xff\xff\xff\xff"],
    [b"a", b"b"],
    [b""] * 50,
    [encode(Data(2, 1, 0, 0, 0, ()))],
    [encode(Ack(2, 1, ()))],
    [msgspec.msgpack.encode(["ack", 1, 1, [["text", -1]]])],
    *([RNG.randbytes(RNG.randrange(1, 300))] for _ in range(20)),
]


def junk(count: int) -> list[list[bytes]]:
    return [JUNK[i % len(JUNK)] for i in range(count)]


async def test_garbage_at_the_delivery_socket_is_ignored_after_a_while(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    publisher = site.publishers[0]
    dealer = site.endpoints.context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, b"odd")
    dealer.connect(publisher._delivery_endpoint)
    # It acknowledges like everybody else, and then does not.
    dealer.send(encode(Ack(PROTOCOL_VERSION, publisher.epoch, ((subscriber.topic, 0),))))
    ledger = publisher._ledger
    await eventually(lambda: b"odd" in ledger.peers)
    for frames in junk(MAX_MALFORMED + 50):
        dealer.send_multipart(frames)
    await eventually(lambda: b"odd" not in ledger.peers)
    dealer.send(encode(Ack(PROTOCOL_VERSION, publisher.epoch, ((subscriber.topic, 0),))))
    for i in range(100):
        source.send(subscriber.topic, i)
    await handler.wait_for(lambda: handler.ids == list(range(100)))
    await eventually(lambda: not ledger.topics[subscriber.topic].unacknowledged)
    assert list(ledger.topics[subscriber.topic].acked) != [b"odd"]
    assert not source.gone
    dealer.close(linger=0)
    subscriber.close()


async def test_a_topic_whose_only_peer_is_cut_off_fails_its_requests(site: Site) -> None:
    source, endpoint = await site.publisher()
    publisher, name = site.publishers[0], topic("audio", "odd")
    raw = site.endpoints.context.socket(zmq.SUB)
    raw.setsockopt(zmq.SUBSCRIBE, name)
    raw.connect(endpoint)
    dealer = site.endpoints.context.socket(zmq.DEALER)
    dealer.connect(publisher._delivery_endpoint)
    await eventually(lambda: name in publisher._ledger.topics)
    dealer.send(encode(Ack(PROTOCOL_VERSION, publisher.epoch, ((name, 0),))))
    await eventually(lambda: publisher._ledger.peers)
    for frames in junk(MAX_MALFORMED):
        dealer.send_multipart(frames)
    await eventually(lambda: source.gone)
    assert isinstance(source.gone[0][1], SubscriberStalled)
    raw.close(linger=0)
    dealer.close(linger=0)


async def test_garbage_at_the_control_socket_is_ignored_after_a_while(site: Site) -> None:
    await site.publisher()
    dealer = site.endpoints.context.socket(zmq.DEALER)
    dealer.connect(site.control.endpoint)
    for frames in junk(MAX_MALFORMED + 50):
        dealer.send_multipart(frames)
    dealer.send(encode(Failed(PROTOCOL_VERSION, "r", "X", "ignored")))
    await eventually(lambda: site.control.malformed.total >= MAX_MALFORMED)
    async with asyncio.timeout(5):
        await site.control.release("r")  # the engine is listened to
    another = site.endpoints.context.socket(zmq.DEALER)
    another.connect(site.control.endpoint)
    another.send(encode(Failed(PROTOCOL_VERSION, "r", "X", "heard")))
    await eventually(lambda: site.failed)
    assert [f.error for f in site.failed] == ["heard"]
    assert site.control.malformed.total == MAX_MALFORMED
    for socket in (dealer, another):
        socket.close(linger=0)


async def test_garbage_at_the_data_socket_is_counted_and_makes_no_topics(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    source, endpoint = await site.publisher()
    publisher = site.publishers[0]
    raw = site.endpoints.context.socket(zmq.XSUB)
    raw.connect(endpoint)
    for frames in junk(MAX_MALFORMED):
        raw.send_multipart(frames)
    for i in range(200):
        raw.send(b"\x01" + RNG.randbytes(RNG.randrange(60)))
        # A topic that no subscription stands behind: it would never be unsubscribed.
        raw.send_multipart([b"x", b"\x01" + topic("audio", f"s{i}")])
    raw.send(b"\x01" + topic("audio", "last"))
    await eventually(lambda: topic("audio", "last") in publisher._ledger.topics)
    assert list(publisher._ledger.topics) == [topic("audio", "last")]
    assert publisher.malformed > MAX_MALFORMED
    assert caplog.text.count("subscription ignored") == MAX_MALFORMED
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    source.send(subscriber.topic, 1)
    await handler.wait_for(lambda: handler.ids == [1])
    subscriber.close()
    raw.close(linger=0)


async def test_a_flood_of_subscriptions_does_not_keep_messages_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    answered = 0
    seen: list[int] = []

    def note(error: ProtocolError) -> None:
        nonlocal answered
        answered += 1
        if answered == 1:
            source.send(subscriber.topic, 1)  # while the rest of the flood is in the socket

    def publishes() -> list[Failed]:
        seen.append(answered)
        return []

    monkeypatch.setattr(source, "failures", publishes)
    monkeypatch.setattr(site.publishers[0], "_note_malformed", note)
    raw = site.endpoints.context.socket(zmq.XSUB)
    raw.setsockopt(zmq.SNDHWM, 0)
    raw.connect(endpoint)
    for i in range(5000):
        raw.send(b"\x01" + str(i).encode())
    await eventually(lambda: answered == 5000)
    await handler.wait_for(lambda: handler.ids == [1])
    assert len(set(seen)) >= 5000 // MAX_RECEIVED
    raw.close(linger=0)
    subscriber.close()


@pytest.mark.parametrize("where", ["data", "delivery", "control"])
async def test_a_frame_that_is_too_large_is_not_even_received(site: Site, where: str) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    target, kind, size = {
        "data": (endpoint, zmq.XSUB, MAX_SUBSCRIPTION_BYTES),
        "delivery": (site.publishers[0]._delivery_endpoint, zmq.DEALER, MAX_HEADER_BYTES),
        "control": (site.control.endpoint, zmq.DEALER, MAX_HEADER_BYTES),
    }[where]
    raw = site.endpoints.context.socket(kind)
    monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    raw.connect(target)
    raw.send(b"\x01" + bytes(size))
    assert await asyncio.to_thread(monitor.poll, 10_000)  # cut off
    raw.disable_monitor()
    monitor.close()
    raw.close(linger=0)
    source.send(subscriber.topic, 1)
    await handler.wait_for(lambda: handler.ids == [1])
    async with asyncio.timeout(5):
        await site.control.release("r")
    subscriber.close()


@pytest.mark.parametrize("where", ["data", "delivery"])
async def test_a_publisher_that_sends_garbage_is_cut_off_and_the_other_is_not(
    site: Site, where: str
) -> None:
    source, endpoint = await site.publisher(rank=1)
    hostile = Hostile(site.endpoints)
    handler = Handler()
    subscriber = Subscriber(site.endpoints, "audio", "d", handler)
    connecting = asyncio.create_task(subscriber.connect([hostile.endpoint, endpoint], within=10))
    await asyncio.to_thread(hostile.accept)
    await connecting
    for frames in junk(MAX_MALFORMED - 1):
        hostile.send_junk(where, frames)
    good = encode(Data(PROTOCOL_VERSION, 1, 0, 0, 0, (Update("r", ids=(7,)),)))
    hostile.data.send_multipart([subscriber.topic, good])
    await handler.wait_for(lambda: handler.ids == [7])
    await eventually(lambda: subscriber.counts.malformed == MAX_MALFORMED - 1)
    assert not handler.lost
    hostile.send_junk(where, [b""])
    await handler.wait_for(lambda: bool(handler.lost))
    assert "cut off" in str(handler.lost[0])
    hostile.send_junk(where, [b""])
    source.send(subscriber.topic, 8)
    await handler.wait_for(lambda: handler.ids == [7, 8])
    assert subscriber.counts.malformed == MAX_MALFORMED
    assert len(handler.lost) == 1
    subscriber.close()
    subscriber.close()
    for socket in (hostile.data, hostile.delivery):
        socket.close(linger=0)


async def test_one_publisher_under_two_names_is_taken_once() -> None:
    with Endpoints() as endpoints:
        site = Site(endpoints, "tcp://127.0.0.1:0")
        source, endpoint = await site.publisher()
        handler = Handler()
        subscriber = Subscriber(endpoints, "audio", "d", handler)
        names = [endpoint, endpoint.replace("127.0.0.1", "localhost")]
        connecting = asyncio.create_task(subscriber.connect(names, within=10))
        await eventually(lambda: subscriber.counts.malformed > 0)
        source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1])
        connecting.cancel()
        subscriber.close()
        assert site.publishers[0].close(5)
        site.control.close()
    assert handler.ids == [1]


def test_offenders_are_remembered_within_bounds() -> None:
    malformed = Malformed("message")
    for i in range(MAX_OFFENDERS + 10):
        malformed.note(str(i).encode(), ProtocolError("no"))
    assert len(malformed._by_peer) == MAX_OFFENDERS
    assert malformed.total == MAX_OFFENDERS + 10


@pytest.mark.parametrize("head", [b"", b"\xa4data", b"\xa4data\x01", b"\x03", b"\xc0\xc0"])
def test_a_header_of_millions_of_items_is_refused_without_making_them(head: bytes) -> None:
    count = 8 << 20
    raw = b"\xdd" + count.to_bytes(4, "big") + head + b"\x90" * count
    before = peak_kib()
    with pytest.raises(ProtocolError):
        decode_data(raw)
    assert peak_kib() - before < 100 << 10  # as lists they were 460 MB


def peak_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

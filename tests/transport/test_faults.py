"""Delivery over real sockets through a proxy that drops, delays, doubles, reorders, cuts."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import zmq

from omnistage.errors import SubscriberStalled
from omnistage.transport import link, retained
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import topic
from tests.transport.proxy import Faults, proxy
from tests.transport.test_transport import Handler, Site

MESSAGES = 250


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with Endpoints() as endpoints:
        site = Site(endpoints, "ipc")
        yield site
        for publisher in site.publishers:
            assert publisher.close(5)
        site.control.close()


async def eventually(condition: object, within: float = 20) -> None:
    assert callable(condition)
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)


def has_come(handler: Handler, count: int) -> bool:
    return len(handler.ids) == count


def free_port() -> str:
    """A tcp endpoint that a publisher can bind twice, one life after the other."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


async def check_nothing_is_kept(site: Site, subscriber: Subscriber) -> None:
    ledger = site.publishers[0]._ledger
    await eventually(lambda: not any(t.unacknowledged for t in ledger.topics.values()))
    assert not any(feed.reassembly.waiting for feed in subscriber._feeds)
    subscriber.close()
    await eventually(lambda: not ledger.topics and not ledger.peers)
    assert not link._links.get(site.endpoints)


async def run(site: Site, seed: int) -> None:
    """Some hundred messages through faults that the seed chooses, with a cut or two."""
    rng = random.Random(seed)
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint, seed) as between:
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        kinds = ["drop", "double", "delay", "truncate"]
        between.faults = Faults(**{kind: rng.choice([0.02, 0.05, 0.1]) for kind in kinds})
        cuts = {rng.randrange(MESSAGES) for _ in range(seed % 3)}
        for i in range(MESSAGES):
            source.send(subscriber.topic, i)
            if i in cuts:
                between.cut()
            if i % rng.choice([1, 5, 20]) == 0:
                await asyncio.sleep(rng.random() * 0.005)
        await handler.wait_for(lambda: bool(handler.lost) or len(handler.ids) == MESSAGES, 30)
        assert handler.ids == list(range(MESSAGES))
        assert not handler.lost
        assert between.harmed
        between.faults = Faults()
        await check_nothing_is_kept(site, subscriber)
    assert not source.gone


@pytest.mark.parametrize("seed", range(8))
async def test_every_update_comes_once_and_in_order_through_faults(site: Site, seed: int) -> None:
    await run(site, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 208))
async def test_so_it_is_200_times_more(site: Site, seed: int) -> None:
    await run(site, seed)


async def test_the_last_message_is_repaired_too(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1])
        between.faults = Faults(drop=1)
        source.send(subscriber.topic, 2)
        await eventually(lambda: between.harmed > 0)
        between.faults = Faults()
        await handler.wait_for(lambda: handler.ids == [1, 2])
        assert not handler.lost
        await check_nothing_is_kept(site, subscriber)


async def test_a_confirmation_that_is_lost_is_asked_for_again(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        between.unconfirmed = 3
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        assert not between.unconfirmed
        source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1])
        await check_nothing_is_kept(site, subscriber)


async def test_a_first_acknowledgement_that_is_lost_is_sent_again(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        between.faults = Faults(drop=1)
        connecting = asyncio.create_task(site.subscriber(handler, "d", between.endpoint))
        await eventually(lambda: between.harmed > 1)
        between.faults = Faults()
        subscriber = await connecting
        source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1])
        assert not handler.lost
        await check_nothing_is_kept(site, subscriber)


async def test_a_confirmation_that_a_full_queue_refuses_comes_once_there_is_room(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    source, endpoint = await site.publisher()
    name = topic("audio", "d")
    # It never reads, and its queue at the publisher is that of every message on the topic.
    stalled = site.endpoints.context.socket(zmq.SUB)
    stalled.setsockopt(zmq.RCVHWM, 1)
    stalled.setsockopt(zmq.SUBSCRIBE, name)
    stalled.connect(endpoint)
    await eventually(lambda: name in site.publishers[0]._ledger.topics)
    while not source.gone:
        source.send(name, *range(1000))
        await asyncio.sleep(0.0005)

    def refused() -> bool:
        stalled.setsockopt(zmq.SUBSCRIBE, name)  # one confirmation more
        return "before its subscription was confirmed" in caplog.text

    await eventually(refused)
    caplog.clear()
    handler = Handler()
    connecting = asyncio.create_task(site.subscriber(handler, "d", endpoint))
    await eventually(lambda: "before its subscription was confirmed" in caplog.text)
    assert not connecting.done()
    stalled.close(linger=0)
    subscriber = await connecting
    await eventually(lambda: not site.publishers[0]._ledger.topics[name].stalled)
    source.send(name, 1)
    await handler.wait_for(lambda: handler.ids == [1])
    subscriber.close()


async def test_a_restarted_publisher_whose_confirmation_is_lost_is_found_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "SILENT_SECONDS", 1.0)
    with Endpoints() as endpoints:
        site = Site(endpoints, free_port())
        source, endpoint = await site.publisher()
        handler = Handler()
        with proxy(endpoints, endpoint) as between:
            subscriber = await site.subscriber(handler, "d", between.endpoint)
            source.send(subscriber.topic, 1)
            await handler.wait_for(lambda: handler.ids == [1])
            between.unconfirmed = 1
            assert await asyncio.to_thread(site.publishers[0].close, 5)
            again, _ = await site.publisher()
            await handler.wait_for(lambda: len(handler.lost) == 2)
            assert "no heartbeat" in str(handler.lost[0])
            assert "restarted" in str(handler.lost[1])
            again.send(subscriber.topic, 2)
            await handler.wait_for(lambda: handler.ids == [1, 2])
            subscriber.close()
        assert site.publishers[1].close(5)
        site.control.close()


async def test_a_silent_publisher_is_noticed_and_taken_up_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SILENT_SECONDS", 1.0)
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        between.silent = True
        await handler.wait_for(lambda: bool(handler.lost))
        assert "no heartbeat for 1 s" in str(handler.lost[0])
        between.silent = False
        source.send(subscriber.topic, 7)
        await handler.wait_for(lambda: handler.ids == [7])
        await check_nothing_is_kept(site, subscriber)
    assert len(handler.lost) == 1


async def test_a_subscriber_that_says_nothing_is_given_up_and_comes_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "PEER_SECONDS", 1.0)
    monkeypatch.setattr(link, "_LIFE_SECONDS", 0.0)
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        between.silent = True
        await eventually(lambda: source.gone)
        assert isinstance(source.gone[0][1], SubscriberStalled)
        between.silent = False
        ledger = site.publishers[0]._ledger
        await eventually(lambda: ledger.peers and not ledger.topics[subscriber.topic].stalled)
        assert handler.lost
        source.send(subscriber.topic, 8)
        await handler.wait_for(lambda: handler.ids == [8])
        await check_nothing_is_kept(site, subscriber)


async def test_a_killed_subscriber_holds_nothing_for_long_and_not_its_successor(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "CUT_SECONDS", 0.5)
    source, endpoint = await site.publisher()
    killed, successor = Handler(), Handler()
    subscriber = await site.subscriber(killed, "d", endpoint)
    with monkeypatch.context() as patch:
        patch.setattr(link.Link, "_send", lambda *_: None)  # it does not say that it leaves
        subscriber.close()
    ledger = site.publishers[0]._ledger
    source.send(subscriber.topic, 1)
    another = await site.subscriber(successor, "d", endpoint)
    source.send(subscriber.topic, 2)
    await successor.wait_for(lambda: successor.ids[-1:] == [2])
    await eventually(lambda: not ledger.topics[subscriber.topic].unacknowledged)
    assert len(ledger.peers) == 1
    with monkeypatch.context() as patch:
        patch.setattr(link.Link, "_send", lambda *_: None)
        another.close()
    source.send(subscriber.topic, 3)
    await eventually(lambda: not ledger.topics and not ledger.peers)
    assert [type(error).__name__ for _, error in source.gone] == ["UpdatesLost"]


async def test_a_reader_that_stops_fails_alone_and_memory_stays_bounded(site: Site) -> None:
    source, endpoint = await site.publisher()
    slow, quick = Handler(), Handler()
    held = await site.subscriber(slow, "slow", endpoint)
    other = await site.subscriber(quick, "quick", endpoint)
    held.pause()
    topic = site.publishers[0]._ledger.topics[held.topic]
    for i in range(1200):
        source.send(held.topic, i)
        source.send(other.topic, i)
        if i % 50 == 0:
            await quick.wait_for(partial(has_come, quick, i + 1))
        assert topic.unacknowledged <= retained.CREDIT
    await quick.wait_for(lambda: len(quick.ids) == 1200)
    assert quick.ids == list(range(1200))
    assert not quick.lost
    assert {destination for destination, _ in source.gone} == {held.topic}
    assert isinstance(source.gone[0][1], SubscriberStalled)
    held.resume()
    await slow.wait_for(lambda: bool(slow.lost))
    assert slow.ids == list(range(retained.CREDIT))
    await eventually(lambda: not topic.stalled)
    source.send(held.topic, 5000)
    await slow.wait_for(lambda: slow.ids[-1] == 5000)
    assert len(slow.lost) == 1
    other.close()
    await check_nothing_is_kept(site, held)


async def test_a_closing_publisher_sends_again_what_was_lost(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        between.faults = Faults(drop=0.3)
        for i in range(40):
            source.send(subscriber.topic, i)
        source.send(subscriber.topic, 40)
        await eventually(lambda: between.harmed > 0)
        between.faults = Faults()
        assert await asyncio.to_thread(site.publishers[0].close, 5)
        await handler.wait_for(lambda: len(handler.ids) == 41 or bool(handler.lost))
        assert handler.ids == list(range(41))
        subscriber.close()


@pytest.mark.slow
async def test_64_idle_subscriptions_cost_next_to_nothing(site: Site) -> None:
    _, endpoint = await site.publisher()
    subscribers = [await site.subscriber(Handler(), f"d-{i}", endpoint) for i in range(64)]
    await asyncio.sleep(1)
    before = time.process_time()
    await asyncio.sleep(10)
    used = time.process_time() - before
    print(f"64 subscriptions idle for 10 s: {used * 1e3:.1f} ms of CPU")  # noqa: T201 a measurement
    assert used < 0.02  # all threads of both sides: 0.2% of a core
    for subscriber in subscribers:
        subscriber.close()

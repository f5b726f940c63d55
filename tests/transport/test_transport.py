"""Publisher, subscriber and control socket over real sockets, in one process and across faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from omnistage.errors import ConfigError, OmniStageError, StartupError, UpdatesLost
from omnistage.request import Start
from omnistage.transport.control import ControlServer
from omnistage.transport.endpoints import Endpoints, check_bind, listen
from omnistage.transport.handover import HandOver
from omnistage.transport.keys import Keys, make_keys
from omnistage.transport.publisher import Outgoing, Publisher, PublisherConfig
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import (
    PROTOCOL_VERSION,
    Data,
    Failed,
    Heartbeat,
    Replay,
    Subscribed,
    Update,
    decode_delivery,
    encode,
    topic,
)


class Source:
    """A publisher's source that is fed by the test."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self.queue: HandOver[Outgoing] = HandOver(limit)
        self.gone: list[tuple[bytes, OmniStageError]] = []
        self.reports: list[Failed] = []
        self.released: list[str] = []

    def fileno(self) -> int:
        return self.queue.fileno()

    def messages(self) -> Iterator[Outgoing]:
        yield from self.queue.drain()

    def failures(self) -> list[Failed]:
        taken, self.reports = self.reports, []
        return taken

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def undelivered(self, destination: bytes, error: OmniStageError) -> None:
        self.gone.append((destination, error))

    def send(self, destination: bytes, *ids: int) -> None:
        update = Update("r", ids=ids, start=Start())
        assert self.queue.put(Outgoing(destination, time.monotonic_ns(), (update,)))


class Handler:
    """An update handler that remembers."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.lost: list[UpdatesLost] = []
        self.changed = asyncio.Event()

    def on_update(self, update: Update, buffers: Sequence[Any], stamp: int) -> None:
        self.ids += update.ids
        self.changed.set()

    def on_lost(self, error: UpdatesLost) -> None:
        self.lost.append(error)
        self.changed.set()

    async def wait_for(self, condition: Callable[[], bool], within: float = 10) -> None:
        async with asyncio.timeout(within):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Site:
    """An app's endpoints and control socket, and any number of publishers in this process."""

    def __init__(self, endpoints: Endpoints, bind: str) -> None:
        self.endpoints = endpoints
        self.bind = bind
        self.failed: list[Failed] = []
        self.control = ControlServer(endpoints, self.failed.append)
        self.publishers: list[Publisher] = []

    async def publisher(self, rank: int = 0, source: Source | None = None) -> tuple[Source, str]:
        source = source or Source()
        config = PublisherConfig(
            bind=self.bind,
            directory=str(self.endpoints.directory),
            control=self.control.endpoint,
            owner_pid=os.getpid(),
            keys=None if self.endpoints.curve is None else self.endpoints.curve.keys,
        )
        self.publishers.append(Publisher(source, config, dp_index=rank))
        self.control.hellos.pop(rank, None)
        self.publishers[-1].start()
        async with asyncio.timeout(10):
            while rank not in self.control.hellos:
                await asyncio.sleep(0.005)
        return source, self.control.hellos[rank].data_endpoint

    async def subscriber(self, handler: Handler, name: str, *endpoints: str) -> Subscriber:
        subscriber = Subscriber(self.endpoints, "audio", name, handler)
        await subscriber.connect(endpoints, within=10)
        return subscriber


@pytest.fixture(params=["ipc", "tcp", "tcp with keys"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    keys = None
    if request.param == "tcp with keys":
        make_keys(tmp_path / "keys")
        keys = Keys.load(tmp_path / "keys")
    with Endpoints(keys=keys) as endpoints:
        site = Site(endpoints, "ipc" if request.param == "ipc" else "tcp://127.0.0.1:0")
        yield site
        for publisher in site.publishers:
            assert publisher.close(5)
        site.control.close()
    assert not endpoints.directory.exists()


async def test_updates_arrive_in_order_each_once(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d-1", endpoint)
    for i in range(900):
        source.send(topic("audio", "d-1"), i)
    await handler.wait_for(lambda: len(handler.ids) == 900)
    assert handler.ids == list(range(900))
    assert not handler.lost
    subscriber.close()


async def test_similar_channels_and_subscribers_get_only_their_own(site: Site) -> None:
    source, endpoint = await site.publisher()
    one, ten = Handler(), Handler()
    subscribers = [await site.subscriber(h, n, endpoint) for h, n in ((one, "d-1"), (ten, "d-10"))]
    for _ in range(10):
        source.send(topic("audio", "d-1"), 1)
        source.send(topic("audio", "d-10"), 10)
    await ten.wait_for(lambda: len(ten.ids) == 10)
    await one.wait_for(lambda: len(one.ids) == 10)
    assert (one.ids, ten.ids) == ([1] * 10, [10] * 10)
    for subscriber in subscribers:
        subscriber.close()


async def test_a_second_subscriber_of_a_live_topic_is_confirmed_where_it_joins(site: Site) -> None:
    source, endpoint = await site.publisher()
    first, second = Handler(), Handler()
    a = await site.subscriber(first, "d", endpoint)
    for i in range(5):
        source.send(a.topic, i)
    await first.wait_for(lambda: len(first.ids) == 5)
    b = await site.subscriber(second, "d", endpoint)
    source.send(a.topic, 99)
    await second.wait_for(lambda: bool(second.ids))
    await first.wait_for(lambda: len(first.ids) == 6)
    assert second.ids == [99]
    assert not first.lost
    assert not second.lost
    a.close()
    b.close()


async def test_a_subscriber_of_two_ranks_keeps_their_sequences_apart(site: Site) -> None:
    sources = [await site.publisher(rank) for rank in (0, 1)]
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", *(endpoint for _, endpoint in sources))
    for i in range(100):
        sources[i % 2][0].send(subscriber.topic, i)
    await handler.wait_for(lambda: len(handler.ids) == 100)
    assert [i for i in handler.ids if i % 2] == list(range(1, 100, 2))
    assert not handler.lost
    subscriber.close()


async def test_without_a_publisher_the_subscription_fails_with_a_sentence(site: Site) -> None:
    subscriber = Subscriber(site.endpoints, "audio", "d", Handler())
    with pytest.raises(StartupError, match="0 of 1 publishers confirmed"):
        await subscriber.connect([site.endpoints.ipc()], within=0.2)
    subscriber.close()


async def test_hello_is_awaited_and_its_absence_named(site: Site) -> None:
    await site.publisher(0)
    assert [h.pid for h in await site.control.wait_for_hellos(1, within=5)] == [os.getpid()]
    with pytest.raises(StartupError, match="1 of 2 engine cores"):
        await site.control.wait_for_hellos(2, within=0.1)


async def test_failures_reach_the_control_socket(site: Site) -> None:
    source, _ = await site.publisher()
    source.reports.append(Failed(PROTOCOL_VERSION, "r", "ProcessorError", "why"))
    source.queue.wake()
    async with asyncio.timeout(5):
        while not site.failed:
            await asyncio.sleep(0.005)
    assert site.failed[0].error == "why"


async def test_a_release_is_answered_by_every_rank_after_what_came_before_it(site: Site) -> None:
    sources = [(await site.publisher(rank)) for rank in (0, 1)]
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", sources[0][1])
    for i in range(300):
        sources[0][0].send(subscriber.topic, i)
    async with asyncio.timeout(5):
        await asyncio.gather(*(site.control.release(f"r{i}") for i in range(20)))
    assert [sorted(s.released) for s, _ in sources] == [sorted(f"r{i}" for i in range(20))] * 2
    await handler.wait_for(lambda: len(handler.ids) == 300)
    assert not site.control._releases
    subscriber.close()


class Gated(Source):
    """A source whose first message waits, so that what comes meanwhile is there at one wake-up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.log: list[str] = []

    def messages(self) -> Iterator[Outgoing]:
        for message in super().messages():
            self.gate.wait(10)
            self.log.append(f"sent {message.updates[0].ids[0]}")
            yield message

    def release(self, request_id: str) -> None:
        self.log.append(f"released {request_id}")


async def test_a_release_comes_after_everything_that_was_handed_over_before_it(site: Site) -> None:
    source = Gated()
    await site.publisher(0, source)
    source.send(topic("audio", "d"), 1)
    await asyncio.sleep(0.05)
    source.send(topic("audio", "d"), 2)
    releasing = asyncio.create_task(site.control.release("r"))
    await asyncio.sleep(0.05)
    source.gate.set()
    async with asyncio.timeout(5):
        await releasing
    assert source.log == ["sent 1", "sent 2", "released r"]


async def test_a_release_is_not_awaited_from_a_rank_that_is_gone(site: Site) -> None:
    await site.publisher(0)
    assert await asyncio.to_thread(site.publishers[0].close, 5)
    async with asyncio.timeout(10):
        while True:
            try:
                async with asyncio.timeout(0.2):
                    await site.control.release("r")
                break
            except TimeoutError:  # not noticed yet: the message went to a closing connection
                continue
    assert not site.control._releases


async def test_a_publisher_that_cannot_bind_says_so_at_once() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with Endpoints() as endpoints, taken:
        site = Site(endpoints, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StartupError, match="Address already in use"):
            await site.publisher()
        site.control.close()


async def test_a_topic_without_subscriber_is_undelivered_not_dropped(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    subscriber.close()
    async with asyncio.timeout(10):
        while not source.gone:
            source.send(subscriber.topic, 1)
            await asyncio.sleep(0.01)
    assert isinstance(source.gone[0][1], UpdatesLost)


async def test_what_was_handed_over_is_sent_before_the_publisher_closes(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    for i in range(500):
        source.send(subscriber.topic, i)
    assert await asyncio.to_thread(site.publishers[0].close, 5)
    await handler.wait_for(lambda: len(handler.ids) == 500)
    subscriber.close()


async def test_a_restarted_publisher_is_reported_as_a_loss_and_taken_up_again() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    bind = f"tcp://127.0.0.1:{port.getsockname()[1]}"
    port.close()
    with Endpoints() as endpoints:
        site = Site(endpoints, "ipc")
        site.bind = bind
        source, endpoint = await site.publisher()
        handler = Handler()
        subscriber = await site.subscriber(handler, "d", endpoint)
        source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1])
        assert await asyncio.to_thread(site.publishers[0].close, 5)
        again, _ = await site.publisher()
        await handler.wait_for(lambda: bool(handler.lost))
        assert "restarted" in str(handler.lost[0])
        again.send(subscriber.topic, 2)
        await handler.wait_for(lambda: handler.ids == [1, 2])
        subscriber.close()
        assert site.publishers[1].close(5)
        site.control.close()


class Relay:
    """A TCP relay in a thread that can hold back what flows to the publisher, or cut both ways."""

    def __init__(self, target: str, delay: float = 0.0) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._delay = delay
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.passed = b""
        self._sockets: list[socket.socket] = []
        self._all: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def cut(self) -> None:
        for s in self._sockets:
            _shut(s)
        self._sockets.clear()

    def close(self) -> None:
        _shut(self._server)  # wakes accept()
        self.cut()
        while self._threads:
            self._threads.pop().join()
        for s in (self._server, *self._all):
            s.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._target)
            self._sockets += [client, upstream]
            self._all += [client, upstream]
            self._start(self._pump, client, upstream, True)
            self._start(self._pump, upstream, client, False)

    def _pump(self, source: socket.socket, sink: socket.socket, upward: bool) -> None:
        handshake = b""
        waited = not (upward and self._delay)
        try:
            while chunk := source.recv(65536):
                if not waited:
                    # 64 bytes of greeting, then the READY command with its length in its 2nd byte.
                    handshake += chunk
                    end = 66 + handshake[65] if len(handshake) > 65 else len(handshake)
                    if len(handshake) > end:
                        early = max(0, len(chunk) - (len(handshake) - end))
                        sink.sendall(chunk[:early])
                        time.sleep(self._delay)
                        chunk, waited = chunk[early:], True
                self.passed += chunk
                sink.sendall(chunk)
        except OSError:
            return
        finally:
            _shut(source)
            _shut(sink)


def _shut(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)


async def test_a_subscription_that_arrives_300_ms_late_loses_nothing() -> None:
    with Endpoints() as endpoints:
        site = Site(endpoints, "tcp://127.0.0.1:0")
        source, endpoint = await site.publisher()
        relay = Relay(endpoint, delay=0.3)
        handler = Handler()
        began = time.monotonic()
        subscriber = await site.subscriber(handler, "d", relay.endpoint)
        assert time.monotonic() - began >= 0.3
        for i in range(100):
            source.send(subscriber.topic, i)
        await handler.wait_for(lambda: len(handler.ids) == 100)
        assert handler.ids == list(range(100))
        subscriber.close()
        relay.close()
        assert site.publishers[0].close(5)
        site.control.close()


async def test_what_was_sent_while_the_connection_was_cut_is_sent_again() -> None:
    with Endpoints() as endpoints:
        site = Site(endpoints, "tcp://127.0.0.1:0")
        source, endpoint = await site.publisher()
        relay = Relay(endpoint)
        handler = Handler()
        subscriber = await site.subscriber(handler, "d", relay.endpoint)
        source.send(subscriber.topic, 0)
        await handler.wait_for(lambda: handler.ids == [0])
        relay.cut()
        retained = site.publishers[0]._ledger.topics[subscriber.topic]
        sent = 1
        async with asyncio.timeout(10):
            while retained.subscribed:  # until the publisher has noticed
                source.send(subscriber.topic, sent)
                sent += 1
                await asyncio.sleep(0.01)
        source.send(subscriber.topic, sent)
        await handler.wait_for(lambda: handler.ids[-1] == sent)
        assert handler.ids == list(range(sent + 1))
        assert not handler.lost
        assert not source.gone
        subscriber.close()
        relay.close()
        assert site.publishers[0].close(5)
        site.control.close()


class Hostile:
    """A publisher of the test's own, whose subscriber is sent what the test likes."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.data = endpoints.context.socket(zmq.XPUB)
        self.data.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.data.bind(endpoint := endpoints.ipc())
        self.endpoint = endpoint
        self.delivery = endpoints.context.socket(zmq.ROUTER)
        self.delivery.bind(delivery := endpoints.ipc())
        self._subscribed = Subscribed(PROTOCOL_VERSION, 1, 0, 0, delivery)

    def accept(self) -> None:
        """Confirm the subscription."""
        self.topic = self.data.recv()[1:]
        self.data.send_multipart([self.topic, encode(self._subscribed)])
        self.peer, _ = self.delivery.recv_multipart()
        self.beat(0, 0)

    def beat(self, first: int, next_sequence: int) -> None:
        beat = Heartbeat(PROTOCOL_VERSION, 1, 0, ((self.topic, first, next_sequence),))
        self.delivery.send_multipart([self.peer, encode(beat)])

    def send_junk(self, where: str, frames: list[bytes]) -> None:
        """Send frames that are no message to the subscriber, on either socket."""
        if where == "data":
            self.data.send_multipart([self.topic, *frames])
        else:
            self.delivery.send_multipart([self.peer, *frames])

    def asked(self) -> tuple[int, int]:
        """The next request for a replay."""
        while True:
            message = decode_delivery(self.delivery.recv_multipart()[1])
            if isinstance(message, Replay):
                return message.first, message.end


async def test_malformed_frames_are_counted_and_the_stream_lives_on() -> None:
    with Endpoints() as endpoints:
        hostile = Hostile(endpoints)
        handler = Handler()
        subscriber = Subscriber(endpoints, "audio", "d", handler)
        connecting = asyncio.create_task(subscriber.connect([hostile.endpoint], within=10))
        await asyncio.to_thread(hostile.accept)
        await connecting
        bad, good, last = (
            encode(Data(PROTOCOL_VERSION, 1, 0, n, 0, (Update("r", ids=(4 + n,)),)))
            for n in (0, 1, 4)
        )
        for frames in (
            [b"\xc1"],
            [],
            [bad[:-3]],
            [bad, b"a buffer too many"],
            [encode(Data(2, 1, 0, 0, 0, ()))],
            [encode(Subscribed(PROTOCOL_VERSION, 9, 0, 0))],
        ):
            hostile.data.send_multipart([subscriber.topic, *frames])
        hostile.data.send_multipart([subscriber.topic, good])
        assert await asyncio.to_thread(hostile.asked) == (0, 1)
        for frames in ([], [b"\xc1"], [bad[:-3]], [bad]):
            hostile.delivery.send_multipart([hostile.peer, subscriber.topic, *frames])
        await handler.wait_for(lambda: handler.ids == [4, 5])
        assert subscriber.counts.malformed == 6 + 3
        hostile.data.send_multipart([subscriber.topic, good])  # again
        hostile.data.send_multipart([subscriber.topic, last])
        assert await asyncio.to_thread(hostile.asked) == (2, 4)
        assert not handler.lost
        hostile.beat(4, 5)
        await handler.wait_for(lambda: handler.ids == [4, 5, 8])
        assert "2 messages were lost" in str(handler.lost[0])
        subscriber.close()


async def test_a_handler_that_raises_loses_only_its_own_update(site: Site) -> None:
    class Picky(Handler):
        def on_update(self, update: Update, buffers: Sequence[Any], stamp: int) -> None:
            if update.request_id == "bad":
                raise RuntimeError("no")
            super().on_update(update, buffers, stamp)

    source, endpoint = await site.publisher()
    handler = Picky()
    subscriber = await site.subscriber(handler, "d", endpoint)
    updates = tuple(Update(name, ids=(i,)) for i, name in enumerate(("a", "bad", "c")))
    source.queue.put(Outgoing(subscriber.topic, 0, updates))
    await handler.wait_for(lambda: handler.ids == [0, 2])
    subscriber.close()


async def test_control_survives_hostile_messages(site: Site) -> None:
    dealer = site.endpoints.context.socket(zmq.DEALER)
    dealer.connect(site.control.endpoint)
    for frames in ([b""], [b"\xc1"], [b"a", b"b"], [encode(Data(1, 1, 0, 0, 0, ()))]):
        dealer.send_multipart(frames)
    dealer.send(encode(Failed(PROTOCOL_VERSION, "r", "X", "last")))
    async with asyncio.timeout(5):
        while not site.failed:
            await asyncio.sleep(0.005)
    assert [f.error for f in site.failed] == ["last"]
    dealer.close()


async def test_hostile_subscriptions_are_ignored(site: Site) -> None:
    source, endpoint = await site.publisher()
    raw = site.endpoints.context.socket(zmq.SUB)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(endpoint)
    for junk in (b"", b"\xff" * 300, b"a/b", b"audio/d\0x"):
        raw.setsockopt(zmq.SUBSCRIBE, junk)
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    source.send(subscriber.topic, 1)
    await handler.wait_for(lambda: handler.ids == [1])
    subscriber.close()
    raw.close()


STALLED = """
import sys, zmq
s = zmq.Context().socket(zmq.SUB)
s.setsockopt(zmq.RCVHWM, 1)
s.setsockopt(zmq.RCVBUF, 4096)
s.setsockopt(zmq.SUBSCRIBE, sys.argv[2].encode() + bytes(1))
s.connect(sys.argv[1])
print(len(s.recv_multipart()), flush=True)
sys.stdin.read()
"""


async def test_a_stalled_subscriber_fails_alone() -> None:
    with Endpoints() as endpoints:
        site = Site(endpoints, "tcp://127.0.0.1:0")
        source, endpoint = await site.publisher()
        handler = Handler()
        subscriber = await site.subscriber(handler, "quick", endpoint)
        stalled = subprocess.Popen(
            [sys.executable, "-c", STALLED, endpoint, "audio/stalled"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert stalled.stdout is not None
        assert await asyncio.to_thread(stalled.stdout.readline) == b"2\n"
        os.kill(stalled.pid, signal.SIGSTOP)
        sent = 0
        async with asyncio.timeout(50):
            while not source.gone:
                for _ in range(20):
                    source.send(topic("audio", "stalled"), *range(20_000))
                source.send(subscriber.topic, sent)
                sent += 1
                await asyncio.sleep(0.001)
        assert type(source.gone[0][1]).__name__ == "SubscriberStalled"
        await handler.wait_for(lambda: len(handler.ids) == sent)
        assert not handler.lost
        stalled.kill()
        stalled.communicate()
        subscriber.close()
        assert site.publishers[0].close(5)
        site.control.close()


def test_the_private_directory_is_private_and_goes() -> None:
    with Endpoints() as endpoints:
        assert stat.S_IMODE(endpoints.directory.stat().st_mode) == 0o700
        directory = endpoints.directory
    assert not directory.exists()
    endpoints.close()


def test_a_directory_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        Endpoints(deep)
    assert not list(deep.iterdir())


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:5",
        "tcp://10.0.0.1:5",
        "tcp://[::]:5",
        "tcp://[::1:5",
        "tcp://example.org:5",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:²",
        "udp://127.0.0.1:1",
        "",
        "tcp://127.0.0.1:x",
    ],
)
def test_only_ipc_and_loopback_may_be_bound(bind: str) -> None:
    with pytest.raises(ConfigError):
        check_bind(bind)


def test_the_hand_over_queue_is_bounded_and_keeps_order() -> None:
    queue: HandOver[int] = HandOver(100)
    taken: list[int] = []
    refused = 0

    def write() -> None:
        nonlocal refused
        for i in range(5000):
            while not queue.put(i):
                refused += 1

    writer = threading.Thread(target=write)
    writer.start()
    rng = random.Random(1)
    while len(taken) < 5000:
        taken += queue.drain()
        assert len(queue) <= 100
        if rng.random() < 0.1:
            time.sleep(0.0001)
    writer.join()
    assert taken == list(range(5000))
    queue.close()


def test_32_that_bind_at_once_get_ports_of_their_own(tmp_path: Path) -> None:
    with zmq.Context() as context, ThreadPoolExecutor(32) as pool:
        sockets = [context.socket(zmq.XPUB) for _ in range(32)]
        try:
            made = pool.map(lambda one: listen(one, "tcp://127.0.0.1:0", tmp_path), sockets)
            ports = {endpoint.rpartition(":")[2] for endpoint in made}
        finally:
            for socket in sockets:
                socket.close(0)
    assert len(ports) == 32
    assert "0" not in ports

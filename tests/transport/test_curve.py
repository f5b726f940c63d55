"""CURVE over real sockets: who is admitted, who is not, what each is told, what others can read."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from omnistage.errors import StartupError
from omnistage.request import Start
from omnistage.transport.curve import Curve
from omnistage.transport.endpoints import Endpoints, check_bind, connect, listen, set_options
from omnistage.transport.keys import Keys, add_client, make_keys
from omnistage.transport.publisher import Outgoing
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import Update
from tests.transport.test_transport import Handler, Relay, Site, Source

TCP = "tcp://127.0.0.1:0"
UNKNOWN = "does not admit our key"
UNFIT = "both sides need keys or none"
# ZMTP 3.0: signature, version, mechanism, not a server, filler; as every plain peer begins.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def new_keys(directory: Path) -> Path:
    make_keys(directory)
    return directory


def copied(source: Path, client: str, to: Path) -> Path:
    """What a host that connects is given."""
    (to / "clients").mkdir(parents=True)
    shutil.copy(source / "server.key", to)
    shutil.copy(source / "clients" / f"{client}.key_secret", to / "clients")
    return to


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return new_keys(tmp_path / "keys")


@pytest.fixture
async def site(directory: Path) -> AsyncIterator[Site]:
    with Endpoints(keys=Keys.load(directory)) as endpoints:
        site = Site(endpoints, TCP)
        yield site
        for publisher in site.publishers:
            assert publisher.close(5)
        site.control.close()
    assert not [t for t in threading.enumerate() if t.name == "omnistage-curve"]


async def eventually(condition: object, within: float = 10) -> None:
    assert callable(condition)
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_client_with_its_own_copy_of_the_keys_is_served(
    site: Site, directory: Path, tmp_path: Path
) -> None:
    source, endpoint = await site.publisher()
    add_client(directory, "remote")  # while it runs
    keys = Keys.load(copied(directory, "remote", tmp_path / "there"))
    with Endpoints(keys=keys) as there:
        handler = Handler()
        subscriber = Subscriber(there, "audio", "d", handler)
        await subscriber.connect([endpoint], within=10)
        source.send(subscriber.topic, 1, 2, 3)
        await handler.wait_for(lambda: handler.ids == [1, 2, 3])
        subscriber.close()
    assert site.publishers[0].refused == 0


def stranger(kind: str, directory: Path, tmp_path: Path) -> Keys | None:
    """The keys of one who must not get in."""
    other = new_keys(tmp_path / "other")
    if kind == "an unknown client":
        return Keys.load(copied(other, "default", tmp_path / "there"))
    if kind == "a client that was removed":
        add_client(directory, "gone")
        (directory / "clients" / "gone.key").unlink()
        return Keys.load(directory, "gone")
    return Keys.load(other) if kind == "another server's key" else None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("an unknown client", UNKNOWN),
        ("a client that was removed", UNKNOWN),
        ("another server's key", UNFIT),
        ("no key", UNFIT),
    ],
)
async def test_a_stranger_gets_nothing_and_is_told_why(
    site: Site,
    directory: Path,
    tmp_path: Path,
    kind: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = stranger(kind, directory, tmp_path)
    if kind == "an unknown client":
        assert keys is not None
        shutil.copy(directory / "server.key", keys.directory)
    source, endpoint = await site.publisher()
    with Endpoints(keys=keys) as there:
        handler = Handler()
        subscriber = Subscriber(there, "audio", "d", handler)
        with caplog.at_level(logging.WARNING), pytest.raises(StartupError, match=why):
            await subscriber.connect([endpoint], within=0.5)
        source.send(subscriber.topic, 1)
        await eventually(lambda: source.gone)  # nobody is subscribed
        assert handler.ids == []
        subscriber.close()
    assert site.publishers[0].refused >= 1
    assert "connection refused, 1 so far" in caplog.text
    assert not site.publishers[0]._ledger.topics


async def test_a_client_with_keys_is_told_of_a_publisher_without(directory: Path) -> None:
    with Endpoints() as plain, Endpoints(keys=Keys.load(directory)) as there:
        site = Site(plain, TCP)
        _, endpoint = await site.publisher()
        subscriber = Subscriber(there, "audio", "d", Handler())
        with pytest.raises(StartupError, match=UNFIT):
            await subscriber.connect([endpoint], within=0.5)
        subscriber.close()
        assert site.publishers[0].close(5)
        site.control.close()


async def test_a_stranger_at_the_delivery_socket_is_refused_too(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    with Endpoints() as there:
        dealer = there.context.socket(zmq.DEALER)
        dealer.connect(site.publishers[0]._delivery_endpoint)
        dealer.send(b"\xc1")
        await eventually(lambda: site.publishers[0].refused == 1)
    source.send(subscriber.topic, 1)
    await handler.wait_for(lambda: handler.ids == [1])
    subscriber.close()


async def test_many_refusals_are_counted_and_logged_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    host, port = endpoint.removeprefix("tcp://").split(":")
    with caplog.at_level(logging.WARNING):
        for hello in (GREETING, b"GET / HTTP/1.1\r\n\r\n") * 200:
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(hello)
        await eventually(lambda: site.publishers[0].refused == 200)
    assert caplog.text.count("connection refused") == 1
    source.send(subscriber.topic, 1)
    await handler.wait_for(lambda: handler.ids == [1])
    subscriber.close()


@pytest.mark.parametrize("secured", [True, False])
async def test_a_relay_on_the_way_reads_nothing_with_keys_and_all_without(
    directory: Path, secured: bool
) -> None:
    ids = tuple(range(1000, 1020))
    spoken = [b"request-8842", b"alto", b"audio/d", msgspec.msgpack.encode(ids)[3:]]
    with Endpoints(keys=Keys.load(directory) if secured else None) as endpoints:
        site = Site(endpoints, TCP)
        source, endpoint = await site.publisher()
        relay = Relay(endpoint)
        handler = Handler()
        subscriber = await site.subscriber(handler, "d", relay.endpoint)
        update = Update("request-8842", ids=ids, start=Start(voice="alto"))
        source.queue.put(Outgoing(subscriber.topic, 0, (update,)))
        await handler.wait_for(lambda: handler.ids == list(ids))
        subscriber.close()
        relay.close()
        assert site.publishers[0].close(5)
        site.control.close()
    assert [text in relay.passed for text in spoken] == [not secured] * len(spoken)
    assert len(relay.passed) > 300


async def test_ipc_stays_plain_and_one_subscriber_may_use_both(directory: Path) -> None:
    with Endpoints(keys=Keys.load(directory)) as endpoints, Endpoints() as plain:
        site = Site(endpoints, TCP)
        sources = [await site.publisher(0)]
        site.bind = "ipc"
        sources.append(await site.publisher(1))
        handler, other = Handler(), Handler()
        subscriber = await site.subscriber(handler, "d", *(endpoint for _, endpoint in sources))
        beside = Subscriber(plain, "audio", "plain", other)
        await beside.connect([sources[1][1]], within=10)
        for source, _ in sources:
            source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1, 1])
        for each in (subscriber, beside):
            each.close()
        for publisher in site.publishers:
            assert publisher.close(5)
        assert [p.refused for p in site.publishers] == [0, 0]
        site.control.close()


def switches(thread: threading.Thread) -> int:
    """How often a thread has been woken so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


async def test_nobody_wakes_the_thread_while_nobody_connects(site: Site) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    curve = site.publishers[0]._curve
    assert curve is not None
    assert curve._gate is not None
    await asyncio.sleep(0.1)
    before = switches(curve._gate.thread)
    for i in range(100):
        source.send(subscriber.topic, i)
    await handler.wait_for(lambda: len(handler.ids) == 100)
    await asyncio.sleep(1)
    assert switches(curve._gate.thread) == before
    subscriber.close()


def test_a_context_ends_at_once_while_strangers_knock(directory: Path, tmp_path: Path) -> None:
    other = Keys.load(new_keys(tmp_path / "other"))
    with Endpoints(keys=other) as there:
        for _ in range(5):
            with Endpoints(keys=Keys.load(directory)) as endpoints:
                router = endpoints.context.socket(zmq.ROUTER)
                set_options(router)
                endpoint = listen(router, TCP, endpoints.directory, endpoints.curve)
                dealers = [there.context.socket(zmq.DEALER) for _ in range(20)]
                for dealer in dealers:
                    connect(dealer, endpoint, there.curve)
                assert endpoints.curve is not None
                while not endpoints.curve.refused:
                    time.sleep(0.005)
                for dealer in dealers[10:]:
                    dealer.close(0)
                began = time.monotonic()
            assert time.monotonic() - began < 5
            for dealer in dealers[:10]:
                dealer.close(0)
            assert not [t for t in threading.enumerate() if t.name == "omnistage-curve"]


def test_without_anybody_to_ask_nobody_is_admitted(directory: Path) -> None:
    """The gate's thread may be gone; its sockets then let nobody in."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = Keys.load(directory)
    curve = Curve(context, keys)
    router = context.socket(zmq.ROUTER)
    curve.listen(router)
    assert curve._gate is not None
    curve._gate._asked.unbind("inproc://zeromq.zap.01")
    router.bind("tcp://127.0.0.1:*")
    dealer = context.socket(zmq.DEALER)
    curve.connect(dealer)
    dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    dealer.send(b"hello")
    assert not router.poll(500)
    context.destroy(linger=0)
    curve.join()


def of_this_host() -> list[str]:
    """Addresses under which others reach this host, if there are any."""
    found = [a for addresses in psutil.net_if_addrs().values() for a in addresses]
    own = [a.address for a in found if a.family == socket.AF_INET]
    return [f"tcp://{address}:0" for address in own if not address.startswith("127.")][:1]


@pytest.mark.parametrize("bind", ["tcp://[::1]:0", "tcp://127.0.0.2:0", *of_this_host()])
async def test_every_address_works_for_both_sockets(bind: str, directory: Path) -> None:
    with Endpoints(keys=Keys.load(directory)) as endpoints:
        site = Site(endpoints, check_bind(bind, Keys.load(directory)))
        source, endpoint = await site.publisher()
        assert endpoint.startswith(bind.rpartition(":")[0])
        handler = Handler()
        subscriber = await site.subscriber(handler, "d", endpoint)
        source.send(subscriber.topic, 1)
        await handler.wait_for(lambda: handler.ids == [1])
        subscriber.close()
        assert site.publishers[0].close(5)
        site.control.close()


async def test_a_publisher_whose_key_is_gone_says_so(directory: Path) -> None:
    with Endpoints(keys=Keys.load(directory)) as endpoints:
        site = Site(endpoints, TCP)
        (directory / "server.key").unlink()
        with pytest.raises(StartupError, match=r"server\.key cannot be used"):
            await site.publisher(0, Source())
        site.control.close()

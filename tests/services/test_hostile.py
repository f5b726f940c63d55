"""Clients and decoders that say what they should not: refused, and nobody else is disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from omnistage.errors import StartupError
from omnistage.testing import FakeDecoder, Script
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.service_link import ServiceLink
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import PROTOCOL_VERSION
from omnistage.wire_services import (
    SPEECH,
    Abort,
    Aborted,
    DecoderInfo,
    Done,
    Greet,
    Input,
    ServiceMessage,
    Submit,
    Welcome,
)
from tests.services.factories import Services
from tests.services.test_services import by_prompt, nothing_is_left


class Peer:
    """Speaks the protocol by hand."""

    def __init__(self, endpoints: Endpoints, endpoint: str, name: str, decoder: Any = None) -> None:
        self.name = name
        self.said: asyncio.Queue[ServiceMessage] = asyncio.Queue()
        greeting = Greet(PROTOCOL_VERSION, name, decoder)
        self.link = ServiceLink(endpoints, endpoint, greeting, self)

    def submit(self, request_id: str, consumers: Any = (), **fields: Any) -> None:
        submit = Submit(PROTOCOL_VERSION, request_id, "", Input("a"), consumers, self.name)
        self.link.send(msgspec.structs.replace(submit, **fields))

    async def next(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(5):
            while not isinstance(message := await self.said.get(), kind):
                pass
        return message

    def on_up(self, welcome: Welcome) -> None:
        """Nothing."""

    def on_message(self, message: ServiceMessage) -> None:
        self.said.put_nowait(message)

    def on_down(self, why: str) -> None:
        """Nothing."""

    def on_update(self, *_: Any) -> None:
        """Nothing."""

    def on_lost(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    with Endpoints() as endpoints:
        yield endpoints


async def test_a_request_that_was_aborted_before_it_came_is_not_decoded(
    services: Services, endpoints: Endpoints
) -> None:
    ar = await services.ar(Script(ids=[7] * 4000, ids_per_step=40))
    decoder = await services.decoder(ar, lambda: FakeDecoder(repeat=2400), max_unread=0.5)
    peers = [Peer(endpoints, service.endpoint, "me") for service in (ar, decoder)]
    info = [await peer.link.answered(5) for peer in peers][1].decoder
    assert info is not None
    subscriber = Subscriber(endpoints, SPEECH, "me", peers[1])
    await subscriber.connect(info.publishers, within=5)
    peers[1].link.send(Abort(PROTOCOL_VERSION, "r"))
    await peers[1].next(Aborted)
    peers[0].submit("r", (("audio", info.subscriber),))
    await peers[0].next(Done)
    await asyncio.sleep(0.2)
    assert len(decoder) == 0
    subscriber.close()
    for peer in peers:
        peer.link.close()


async def test_what_a_client_awaits_is_not_another_ones_to_continue(
    services: Services, endpoints: Endpoints
) -> None:
    ar = await services.ar(by_prompt)
    one, other = (Peer(endpoints, ar.endpoint, name) for name in ("one", "other"))
    await asyncio.gather(one.link.answered(5), other.link.answered(5))
    one.submit("r", more=True)
    await one.next(Done)
    draining = asyncio.ensure_future(ar.drain())
    other.submit("q", after="r")
    assert (await other.next(Done)).fault.kind == "StageClosed"
    assert not draining.done()
    one.submit("s", after="r")
    assert (await one.next(Done)).fault is None
    async with asyncio.timeout(5):
        await draining
    other.submit("t", reply="one")
    assert "the client that submits it" in (await other.next(Done)).fault.message
    one.link.close()
    other.link.close()
    await nothing_is_left(ar)


GOOD = DecoderInfo("decoder", "d", "tcp://127.0.0.1:9", ("tcp://127.0.0.1:9",), 24_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_unread", -1.0),
        ("max_unread", float("nan")),
        ("sample_rate", 0),
        ("publishers", []),
        ("publishers", ["tcp://127.0.0.1:9"] * 100),
        ("publishers", ["here"]),
        ("service", "tcp://nowhere"),
        ("service", "tcp://h:1" * 100_000),
        ("subscriber", "another"),
        ("subscriber", ""),
        ("name", "a b"),
    ],
)
async def test_a_decoder_that_cannot_be_is_not_listed(
    services: Services, endpoints: Endpoints, field: str, value: Any
) -> None:
    ar = await services.ar(by_prompt)
    # As it would be sent by what does not check: straight from the fields.
    fields = dict(zip(GOOD.__struct_fields__, msgspec.structs.astuple(GOOD), strict=True))
    peer = Peer(endpoints, ar.endpoint, "d", list((fields | {field: value}).values()))
    with pytest.raises(StartupError, match="refuses"):
        await peer.link.answered(5)
    assert not ar._decoders
    peer.link.close()

"""Connections between services and clients that are cut, or stand still, and come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omnistage import Pipeline
from omnistage.errors import ConfigError, StageClosed
from omnistage.services.ar import ARService
from omnistage.testing import Script
from omnistage.transport import service_link
from omnistage.transport.endpoints import Endpoints
from tests.services.factories import Services
from tests.services.test_hostile import Peer
from tests.services.test_services import IDS, by_prompt, heard, nothing_is_left


class Wire:
    """A way to a tcp endpoint that can swallow what is sent, and be cut."""

    def __init__(self, endpoint: str) -> None:
        self.swallows = False
        self._port = int(endpoint.rpartition(":")[2])
        self._writers: list[asyncio.StreamWriter] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self.swallows = False

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.swallows:
                writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def wire_to(endpoint: str) -> AsyncIterator[tuple[Wire, str]]:
    wire = Wire(endpoint)
    server = await asyncio.start_server(wire.connected, "127.0.0.1", 0)
    try:
        yield wire, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        wire.cut()


@pytest.mark.parametrize("lost", ["split", "submit"])
async def test_a_request_whose_message_a_cut_has_lost_fails(
    services: Services, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ar = await services.ar(by_prompt, bind="tcp://127.0.0.1:0")
    await services.decoder(ar)
    async with wire_to(ar.endpoint) as (wire, endpoint), Pipeline.connect(endpoint) as pipeline:
        stage = pipeline._routes[0].ar
        real = getattr(stage, lost)

        def at_the_cut(*args: Any, **options: Any) -> Any:
            wire.swallows = True
            return real(*args, **options)

        monkeypatch.setattr(stage, lost, at_the_cut)
        speaking = asyncio.ensure_future(heard(pipeline, "a"))
        async with asyncio.timeout(5):
            while not wire.swallows:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        wire.cut()
        with pytest.raises(StageClosed, match="was cut"):
            await speaking
        monkeypatch.undo()
        await comes_back(pipeline)
        assert await heard(pipeline, "a") == [ord("a")] * 10
    await nothing_is_left(ar)


async def test_a_service_that_stood_still_ends_what_was_given_up(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_link, "SILENT_SECONDS", 0.7)
    ar: ARService = await services.ar(Script(ids=IDS, stalls=True))
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        stream = pipeline.submit("a")
        await anext(stream)
        with monkeypatch.context() as silence:
            silence.setattr(ar._server, "_send", lambda *_: None)
            with pytest.raises(StageClosed, match="does not answer"):
                await stream.finished()
        await nothing_is_left(ar, decoder)
        await comes_back(pipeline)


async def comes_back(pipeline: Pipeline) -> None:
    async with asyncio.timeout(5):
        while not pipeline.health().ok:
            await asyncio.sleep(0.01)


async def test_a_link_closes_every_socket_of_its_own(services: Services) -> None:
    ar = await services.ar(by_prompt)
    with Endpoints() as endpoints:
        handler = Peer(endpoints, ar.endpoint, "one")
        await handler.link.answered(5)
        handler.link.close()
        assert all(socket.closed for socket in list(endpoints.context._sockets))
        with pytest.raises(ConfigError, match="cannot connect"):
            Peer(endpoints, "tcp://*:x", "one")
        assert all(socket.closed for socket in list(endpoints.context._sockets))

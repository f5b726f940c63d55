"""Services and clients on one event loop, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from omnistage import ChunkPolicy, DecoderStageConfig
from omnistage.services.ar import ARService
from omnistage.services.decoder import DecoderService
from omnistage.services.process import Service
from omnistage.testing import FakeDecoder, Script, scripted
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.keys import Keys

CHUNKS = ChunkPolicy(first=4, growth=1.0, steady=4)


@asynccontextmanager
async def running(make: Callable[[Endpoints], Any], keys: Keys | None = None) -> AsyncIterator[Any]:
    """A service that serves until the block is left."""
    with Endpoints(keys=keys) as endpoints:
        service: Service = make(endpoints)
        try:
            await service.start()
            serving = asyncio.ensure_future(service.serve())
            try:
                yield service
            finally:
                serving.cancel()
                await asyncio.wait([serving])
        finally:
            await service.aclose()


class Services:
    """Starts services; all end with the test."""

    def __init__(self, stack: AsyncExitStack, keys: Keys | None = None) -> None:
        self._stack = stack
        self._keys = keys

    async def ar(
        self, script: Any = None, *, bind: str = "ipc", split: Any = None, **contract: Any
    ) -> ARService:
        """An AR service that plays a script."""
        where = "ipc" if self._keys is None else bind
        keys = None if self._keys is None else self._keys.directory
        played = script or Script(ids=range(40))
        stage = scripted(played, split=split, bind=where, keys=keys)
        service: ARService = await self._stack.enter_async_context(
            running(lambda at: ARService(stage(at), at, bind=bind, **contract), self._keys)
        )
        return service

    async def decoder(
        self, ar: ARService, build: Any = FakeDecoder, *, bind: str = "ipc", **config: Any
    ) -> DecoderService:
        """A decoder service that has joined it."""
        settings = {"chunks": CHUNKS, **config}
        made = DecoderStageConfig(build=build, **settings)
        service: DecoderService = await self._stack.enter_async_context(
            running(lambda at: DecoderService(made, at, connect=ar.endpoint, bind=bind), self._keys)
        )
        return service

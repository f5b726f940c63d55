"""Clients vanish at random points, in every way there is: afterwards it is as if none had come."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from omnistage import Pipeline
from omnistage.errors import OmniStageError, StartupError
from omnistage.services.ar import ARService
from omnistage.services.decoder import DecoderService
from omnistage.testing import Script
from omnistage.transport.service_link import ServiceLink
from tests.services.factories import Services

SCRIPT = Script(ids=list(range(100, 140)) * 5, step_after=0.005, ids_per_step=4)
BIND = "tcp://127.0.0.1:0"
AT_ONCE = 16
ROUNDS = 4
REMEMBER = {"_gone", "_aborted"}  # the latest thousand, on purpose
LONGEST_SECONDS = 0.15  # of a life; a request would take 0.25 s
WITHIN = 30.0  # cut connections are given up after a second, lost subscribers after ten


class Wire:
    """A TCP proxy before a service, whose connections can be cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.removeprefix("tcp://").rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._away = False
        self.endpoint = ""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stay_away()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._server is not None:
            self._server.close()

    def cut(self) -> None:
        """Break every connection; new ones are made."""
        for writer in self._writers:
            writer.transport.abort()

    def stay_away(self) -> None:
        """Break every connection for good."""
        self._away = True  # not closed yet: asyncio loses a connection that it is just accepting
        self.cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._away:
            writer.transport.abort()
            return
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            their_reader, their_writer = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, their_writer}
            await asyncio.gather(pass_on(reader, their_writer), pass_on(their_reader, writer))
            self._writers -= {writer, their_writer}
        writer.transport.abort()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


def links_of(pipeline: Pipeline) -> list[ServiceLink]:
    """Its connections to the services."""
    links = []
    for route in pipeline._routes:
        stage: Any = route.ar
        links += [stage._link] if stage._link is not None else []
        links += [
            replica._link for branch in stage.branches for replica in branch._replicas.values()
        ]
    return links


def vanish(link: ServiceLink) -> None:
    """Close the socket as the end of a process does, without a word."""
    link._down("it has vanished")
    link._closed = True
    link._timer.cancel()
    link._monitor.close()
    link._reader.close()
    link._socket.disable_monitor()
    link._events.close(linger=0)
    link._socket.close(linger=0)


async def read(stream: Any) -> None:
    with contextlib.suppress(OmniStageError):
        async for _ in stream:
            pass


class Crowd:
    """Clients, so many at once, until a number of disconnects has been made."""

    def __init__(self, ar: ARService, count: int, seed: int) -> None:
        self.made: Counter[str] = Counter()
        self._endpoint = ar.endpoint
        self._count = count
        self._rng = random.Random(seed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._live())

    async def _live(self) -> None:
        while self.made.total() < self._count:
            way = self._rng.choice(["close", "drop", "cut", "stay away"])
            async with Wire(self._endpoint) as wire:
                through = way in {"cut", "stay away"}
                pipeline = Pipeline.connect(wire.endpoint if through else self._endpoint)
                # Those that never say goodbye may be gone before they have said hello.
                with contextlib.suppress(StartupError, OmniStageError):
                    async with pipeline:
                        await self._use(pipeline, wire, way)

    async def _use(self, pipeline: Pipeline, wire: Wire, way: str) -> None:
        async with self._streams(pipeline) as streams:
            for stream in streams[1:]:  # some are aborted before
                await asyncio.sleep(self._rng.random() * LONGEST_SECONDS / 2)
                self._count_one("abort")
                with contextlib.suppress(OmniStageError):
                    await stream.abort()
            await asyncio.sleep(self._rng.random() * LONGEST_SECONDS)
            self._count_one(way)
            if way == "drop":
                for link in links_of(pipeline):
                    vanish(link)
            elif way == "stay away":
                wire.stay_away()
                await asyncio.sleep(self._rng.random() * LONGEST_SECONDS)
            elif way == "cut":
                wire.cut()
                await asyncio.sleep(self._rng.random() * LONGEST_SECONDS)

    @asynccontextmanager
    async def _streams(self, pipeline: Pipeline) -> AsyncIterator[list[Any]]:
        streams = [pipeline.submit("a") for _ in range(self._rng.randint(1, 4))]
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        try:
            yield streams
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def _count_one(self, way: str) -> None:
        self.made[way] += 1


def contents(ar: ARService, decoders: list[DecoderService]) -> dict[str, int]:
    """How much there is in every container of the services, their servers and publishers."""
    found: dict[str, int] = {}
    stage: Any = ar.stage
    parts: dict[str, Any] = {"ar": ar, "ar server": ar._server, "stage": stage}
    publishers = {"ar publisher": stage._publisher}
    for index, decoder in enumerate(decoders):
        parts[f"decoder {index}"] = decoder
        parts[f"server {index}"] = decoder._server
        parts[f"stage {index}"] = decoder._branch.decoder
        publishers[f"publisher {index}"] = decoder._publisher
    for name, publisher in publishers.items():
        parts[f"{name} ledger"] = publisher._ledger
        parts[f"{name} source"] = publisher._source
    for name, part in parts.items():
        for attribute, value in vars(part).items():
            if attribute in REMEMBER:
                assert len(value) <= 1024
            elif isinstance(value, dict | set | list | deque):
                found[f"{name}.{attribute}"] = len(value)
    return found


def level() -> tuple[float, int]:
    """Resident memory in MB and open files of this process, which the clients are in too."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free, but not given back, is no leak
    process = psutil.Process()
    return process.memory_info().rss / 1e6, process.num_fds()


async def settled(ar: ARService, decoders: list[DecoderService], before: dict[str, int]) -> None:
    """Return when the services have what they had before anybody came."""
    try:
        async with asyncio.timeout(WITHIN):
            while contents(ar, decoders) != before or len(ar) or any(map(len, decoders)):
                await asyncio.sleep(0.05)
    except TimeoutError:
        now = contents(ar, decoders)
        assert {k: v for k, v in now.items() if v != before[k]} == {}


@pytest.mark.parametrize(
    ("count", "growth"),
    [
        # As many as warm up the process: what its memory does then says nothing.
        (500, None),
        pytest.param(10_000, 1.05, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
# asyncio's server, which is the proxy's, loses a connection that it accepts as it closes.
@pytest.mark.filterwarnings("ignore:unclosed (transport|<socket):ResourceWarning")
async def test_nothing_is_left_of_clients_that_vanish(
    services: Services, caplog: pytest.LogCaptureFixture, count: int, growth: float | None
) -> None:
    caplog.set_level(logging.ERROR, "omnistage")  # pytest keeps each record
    seed = int(os.environ.get("OMNISTAGE_SEED", "0"))
    ar = await services.ar(SCRIPT, bind=BIND)
    decoders = [await services.decoder(ar, bind=BIND) for _ in range(2)]
    before = contents(ar, decoders)
    made: Counter[str] = Counter()
    levels = []
    for number, share in enumerate([count // 10] + [count // ROUNDS] * ROUNDS):
        crowd = Crowd(ar, share, seed + number)
        await crowd.run()
        await settled(ar, decoders, before)
        levels.append(level())
        made += crowd.made
    memory, files = zip(*levels, strict=True)
    print(f"{dict(made)}, MB: {memory}, files: {files}")  # noqa: T201  for who runs it with -s
    assert set(made) == {"abort", "close", "drop", "cut", "stay away"}
    assert files[-1] <= files[0] + 2  # such connections, until they are collected
    # Of the start, once a quarter has filled what remembers its last thousand.
    assert growth is None or memory[-1] < memory[1] * growth
    # And they serve as before.
    async with Pipeline.connect(ar.endpoint) as pipeline:
        assert (await pipeline.submit("a").finished()).output_tokens == len(SCRIPT.ids)

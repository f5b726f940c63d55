"""A client that stalls: its requests end, and the services' memory is flat beside it."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from omnistage import Pipeline
from omnistage.request import StageInput
from omnistage.services.ar import ARService
from omnistage.services.decoder import DecoderService
from omnistage.testing import FakeDecoder, Script
from tests.services.factories import Services

SECONDS = 60
WARM_SECONDS = 12.0  # a client that says nothing is given up after ten
GROWTH = 1.05

CLIENT = """
import asyncio, sys, time
from omnistage import Pipeline

async def main():
    async with Pipeline.connect(sys.argv[1]) as pipeline:
        streams = [pipeline.submit("endless") for _ in range(4)]
        for stream in streams:
            await stream.__aenter__()
            await anext(aiter(stream))
        print("ready", flush=True)
        if sys.argv[2] == "blocked":
            time.sleep(600)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def script(asked: StageInput) -> Script:
    if asked.prompt == "endless":
        return Script(ids=[1] * 100_000, step_after=0.02)
    return Script(ids=range(200), step_after=0.002)


async def load(pipeline: Pipeline) -> None:
    while True:
        await pipeline.submit("short").finished()


@asynccontextmanager
async def stalling(ar: ARService, how: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A client process with four requests that it does not read."""
    arguments = ("-c", CLIENT, ar.endpoint, how)
    client = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert client.stdout is not None
        assert await client.stdout.readline() == b"ready\n"
        yield client
    finally:
        client.kill()
        await client.wait()


async def nothing_is_left(ar: ARService, decoder: DecoderService) -> None:
    async with asyncio.timeout(10):
        while len(ar) or len(decoder):
            await asyncio.sleep(0.05)


async def test_the_requests_of_a_client_that_is_frozen_end(services: Services) -> None:
    ar = await services.ar(script)
    decoder = await services.decoder(ar)
    async with stalling(ar, "unread") as client:
        assert len(ar) == 4
        client.send_signal(signal.SIGSTOP)
        await nothing_is_left(ar, decoder)


def resident() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 1e6


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["unread", "blocked"])
async def test_memory_is_flat_beside_a_client_that_stalls(services: Services, how: str) -> None:
    ar = await services.ar(script)
    decoder = await services.decoder(ar, lambda: FakeDecoder(repeat=2400))
    async with stalling(ar, how), Pipeline.connect(ar.endpoint) as pipeline:
        loads = [asyncio.ensure_future(load(pipeline)) for _ in range(4)]
        await asyncio.sleep(WARM_SECONDS)
        before = resident()
        levels = []
        for _ in range(SECONDS):
            await asyncio.sleep(1)
            levels.append(resident())
        stalled = len(ar) - len(loads)
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    said = f"{how}: {before:.1f} MB, then at most {max(levels):.1f}; {stalled} requests stalled"
    print(said)  # noqa: T201  figures for who runs it with -s
    assert max(levels) < before * GROWTH
    await nothing_is_left(ar, decoder)

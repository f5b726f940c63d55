"""A minute under load beside a subscriber that has stalled: memory stays, and neighbours go on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from omnistage import Subscription, subscribe

SECONDS = 60
SETTLED = 10  # seconds until caches, queues and the retained log are as full as they get
GROWTH = 24 << 20  # bytes; a leak of one message in a hundred would be more

ENGINE = """
import asyncio, collections, json, sys, time
from omnistage import Pipeline
from omnistage.errors import OmniStageError
from omnistage.testing import Script, scripted

async def main(seconds):
    script = Script(ids=range(2000), ids_per_step=50, step_after=0.005)
    counts = collections.Counter()
    async with Pipeline(ar=scripted(script), decoder=None) as pipeline:
        print(pipeline.endpoints[0], flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        end = time.monotonic() + seconds

        async def go_on(name):
            while time.monotonic() < end:
                try:
                    await pipeline.submit("x", subscribers=[name]).finished()
                    counts[name] += 1
                except OmniStageError as error:
                    counts[f"{name} {type(error).__name__}"] += 1
                    await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            for name in ("stalled", "quick") * 8:
                group.create_task(go_on(name))
        print(json.dumps(counts), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(float(sys.argv[1])))
"""

READER = """
import asyncio, sys
import omnistage

async def main(endpoint, reads):
    async with omnistage.subscribe(endpoint, subscriber="stalled") as updates:
        print("ready", flush=True)
        if not reads:
            await asyncio.Event().wait()  # the loop is well, and nobody reads
        async for update in updates:
            pass

asyncio.run(main(sys.argv[1], sys.argv[2] == "reads"))
"""


@asynccontextmanager
async def running(script: str, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A script's process with the first line that it printed; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        yield process, await line(process)
    finally:
        process.kill()
        await process.communicate()


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


class Neighbour:
    """Reads everything, and knows which requests have not ended."""

    def __init__(self) -> None:
        self.updates = 0
        self.open: set[str] = set()

    async def read(self, subscription: Subscription) -> None:
        async for update in subscription:
            self.updates += 1
            self.open.add(update.request_id)
            if update.terminal is not None:
                assert update.terminal.error is None
                self.open.discard(update.request_id)


async def watch(processes: dict[str, Process], seconds: float) -> dict[str, list[int]]:
    """Resident bytes of each process, once a second."""
    taken: dict[str, list[int]] = {name: [] for name in processes}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, process in processes.items():
            taken[name].append(psutil.Process(process.pid).memory_info().rss)
        await asyncio.sleep(1)
    return taken


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("how", ["does not read", "is stopped"])
async def test_memory_is_flat_for_a_minute_beside_a_stalled_subscriber(how: str) -> None:
    kind = "stalls" if how == "does not read" else "reads"
    neighbour = Neighbour()
    async with (
        running(ENGINE, str(SECONDS)) as (engine, endpoint),
        running(READER, endpoint, kind) as (stalled, ready),
        subscribe(endpoint, subscriber="quick") as subscription,
        asyncio.TaskGroup() as group,
    ):
        assert ready == "ready"
        reading = group.create_task(neighbour.read(subscription))
        assert engine.stdin is not None
        engine.stdin.write(b"\n")
        if how == "is stopped":
            await asyncio.sleep(2)
            stalled.send_signal(signal.SIGSTOP)
        taken = await watch({"engine": engine, "stalled": stalled}, SECONDS)
        counts = json.loads(await line(engine))
        async with asyncio.timeout(10):
            while neighbour.open:
                await asyncio.sleep(0.1)
        reading.cancel()
    for name, sizes in taken.items():
        grown = max(sizes[SETTLED:]) - sizes[SETTLED]
        print(f"{name}: {sizes[SETTLED] >> 20} MiB and {grown / 2**20:.1f} more")  # noqa: T201
        assert grown < GROWTH
    print(counts, f"{neighbour.updates} updates at the neighbour")  # noqa: T201 a measurement
    assert counts["stalled SubscriberStalled"] > 8
    assert not [name for name in counts if name.startswith("quick ")]
    assert counts["quick"] > 50

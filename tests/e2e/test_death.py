"""An engine, its worker or the decoder's thread dies: everybody learns it, in time and by name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest

from omnistage.errors import EngineDead, OmniStageError, StageClosed
from omnistage.pipeline import Pipeline
from omnistage.stream import Stream
from tests.e2e.conftest import PROMPT, ar_of, make_pipeline, read
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
WITHIN = 2.0


async def how_it_ends(stream: Stream) -> tuple[OmniStageError, float]:
    """The error that a stream ends with, and when it came."""
    with pytest.raises(OmniStageError) as raised:
        await read(stream)
    return raised.value, time.monotonic()


def core_of(pipeline: Pipeline) -> int:
    control = ar_of(pipeline)._control
    assert control is not None
    return control.hellos[0].pid


async def check_dead(pipeline: Pipeline, reason: str) -> None:
    """Later submissions fail at once, and ``health()`` says why."""
    began = time.monotonic()
    for _ in range(3):
        error, _ = await how_it_ends(pipeline.submit(PROMPT, sampling=ENDLESS))
        assert isinstance(error, StageClosed)
        assert reason in str(error)
    assert time.monotonic() - began < WITHIN
    assert not pipeline.health().ok
    assert reason in (pipeline.health().reason or "")
    with pytest.raises(StageClosed):
        await pipeline.ready()


async def test_an_idle_engine_that_is_killed_is_noticed_without_a_request() -> None:
    async with make_pipeline() as pipeline:
        await read(pipeline.submit(PROMPT, sampling={"max_tokens": 3}))
        os.kill(core_of(pipeline), signal.SIGKILL)
        async with asyncio.timeout(WITHIN):
            while pipeline.health().ok:
                await asyncio.sleep(0.01)
        await check_dead(pipeline, "engine process is gone")


async def test_a_worker_that_a_dead_engine_leaves_behind_is_ended_with_the_pipeline() -> None:
    """One that waits for another rank does not hear that its engine is gone; nor a stopped one."""
    async with make_pipeline() as pipeline:
        await read(pipeline.submit(PROMPT, sampling={"max_tokens": 3}))
        children = psutil.Process(core_of(pipeline)).children()
        (worker,) = (p for p in children if "resource_tracker" not in " ".join(p.cmdline()))
        worker.suspend()
        os.kill(core_of(pipeline), signal.SIGKILL)
        async with asyncio.timeout(WITHIN):
            while pipeline.health().ok:
                await asyncio.sleep(0.01)
        assert worker.is_running()
    async with asyncio.timeout(WITHIN):
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["core", "worker"])
async def test_a_killed_process_of_the_engine_reaches_every_open_stream(victim: str) -> None:
    async with make_pipeline() as pipeline:
        # More than run at once, some of them read by nobody.
        streams = [pipeline.submit(PROMPT, sampling=ENDLESS) for _ in range(40)]
        unread, read_by = streams[:8], streams[8:]
        for stream in unread:
            await stream.__aenter__()
        tasks = [asyncio.create_task(how_it_ends(stream)) for stream in read_by]
        await asyncio.sleep(0.3)
        pid = core_of(pipeline)
        if victim == "worker":
            children = psutil.Process(pid).children()
            (pid,) = (p.pid for p in children if "resource_tracker" not in " ".join(p.cmdline()))
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ends = await asyncio.gather(*tasks)
        assert all(isinstance(error, EngineDead) for error, _ in ends)
        for stream in unread:
            error, _ = await how_it_ends(stream)
            assert isinstance(error, EngineDead)
        assert time.monotonic() - began < WITHIN
        await check_dead(pipeline, "engine process is gone")


async def test_a_decoder_thread_that_dies_reaches_every_open_stream() -> None:
    async with make_pipeline() as pipeline:
        await read(pipeline.submit(PROMPT, sampling={"max_tokens": 3}))
        tasks = [
            asyncio.create_task(how_it_ends(pipeline.submit(PROMPT, sampling=ENDLESS)))
            for _ in range(8)
        ]
        await asyncio.sleep(0.1)
        (branch,) = branches_of(pipeline)

        def dies(work: Any) -> Any:
            raise MemoryError("no memory in the decoder's thread")

        decoder: Any = branch.decoder
        began = time.monotonic()
        decoder._run = dies
        ends = await asyncio.gather(*tasks)
        assert max(when for _, when in ends) - began < WITHIN
        assert all(isinstance(error, StageClosed) for error, _ in ends)
        await check_dead(pipeline, "no memory in the decoder's thread")
        await asyncio.wait([pipeline._host])  # type: ignore[type-var]
        await check_dead(pipeline, "no memory in the decoder's thread")

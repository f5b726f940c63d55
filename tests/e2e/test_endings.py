"""Every way to leave a stream early, and every way a stage can fail one, on real vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest
from prometheus_client import REGISTRY

from omnistage.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    OmniStageError,
    StageClosed,
    StreamClosed,
)
from omnistage.pipeline import Health, Pipeline
from omnistage.request import AudioChunk
from tests.e2e.conftest import (
    PROMPT,
    ar_of,
    make_pipeline,
    read,
    wait_until_idle,
)
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


async def test_breaking_out_of_the_loop_aborts_everywhere(pipeline: Pipeline) -> None:
    async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
        async for _ in stream:
            break
    await wait_until_idle(pipeline)
    assert stream.usage is None


async def test_leaving_before_the_first_chunk_aborts_everywhere(pipeline: Pipeline) -> None:
    async with pipeline.submit(PROMPT, sampling=ENDLESS):
        pass
    await wait_until_idle(pipeline)


@pytest.mark.parametrize("after_chunks", [0, 1, 3])
async def test_cancelling_the_reader_aborts_everywhere(
    pipeline: Pipeline, after_chunks: int
) -> None:
    seen: list[AudioChunk] = []
    enough = asyncio.Event()

    async def reader() -> None:
        async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
            async for chunk in stream:
                seen.append(chunk)
                if len(seen) >= after_chunks:
                    enough.set()

    task = asyncio.create_task(reader())
    if after_chunks:
        await enough.wait()
    else:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_idle(pipeline)


async def test_cancelling_a_reader_without_a_with_block_aborts_too(pipeline: Pipeline) -> None:
    stream = pipeline.submit(PROMPT, sampling=ENDLESS)
    await anext(stream)
    waiting = asyncio.create_task(_read_on(stream))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await wait_until_idle(pipeline)
    with pytest.raises(StreamClosed):
        await anext(stream)


async def _read_on(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_closing_twice_aborts_once_and_reading_on_is_refused(pipeline: Pipeline) -> None:
    stream = pipeline.submit(PROMPT, sampling=ENDLESS)
    await anext(stream)
    await stream.aclose()
    await stream.abort()
    with pytest.raises(StreamClosed):
        await anext(stream)
    await wait_until_idle(pipeline)


@pytest.mark.parametrize("chunks", [0, 1, 4])
async def test_abort_returns_when_every_stage_has_let_go(pipeline: Pipeline, chunks: int) -> None:
    await wait_until_idle(pipeline)
    streams = [pipeline.submit(PROMPT, sampling=ENDLESS) for _ in range(8)]
    for stream in streams:
        await stream.__aenter__()
        for _ in range(chunks):
            await anext(stream)
    await asyncio.gather(*(stream.abort() for stream in streams for _ in range(2)))
    assert not pipeline._running
    assert not len(ar_of(pipeline))
    assert not any(len(branch.decoder) for branch in branches_of(pipeline))
    # At once, without waiting: no request holds a block any more.
    assert await ar_of(pipeline)._engine._llm.reset_prefix_cache()  # type: ignore[union-attr]


async def test_aborting_before_the_start_starts_nothing(pipeline: Pipeline) -> None:
    stream = pipeline.submit(PROMPT, sampling=ENDLESS)
    await stream.abort()
    with pytest.raises(StreamClosed):
        await anext(stream)
    assert not pipeline._running


async def test_dropping_a_stream_aborts_and_says_so(pipeline: Pipeline) -> None:
    stream = pipeline.submit(PROMPT, sampling=ENDLESS)
    await anext(stream)
    streams = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="dropped unfinished"):
        streams.clear()
    await wait_until_idle(pipeline)


async def test_another_event_loop_is_refused(pipeline: Pipeline) -> None:
    def elsewhere() -> None:
        with pytest.raises(StageClosed, match="another event loop"):
            asyncio.run(_read_on(pipeline.submit(PROMPT)))

    await asyncio.to_thread(elsewhere)


async def test_health_and_ready_say_whether_requests_are_taken(pipeline: Pipeline) -> None:
    await wait_until_idle(pipeline)
    await pipeline.ready()
    assert pipeline.health() == Health(ok=True, reason=None, running=0)
    async with pipeline.submit(PROMPT, sampling=ENDLESS):
        assert pipeline.health().running == 1
    never = make_pipeline()
    assert not never.health().ok
    assert "not running" in (never.health().reason or "")
    with pytest.raises(StageClosed):
        await never.ready()


async def test_a_request_is_counted_by_how_it_ended(pipeline: Pipeline) -> None:
    def counted(name: str, **labels: str) -> float:
        value = REGISTRY.get_sample_value(
            f"omnistage:{name}",
            {"model_name": "checkpoint", "stage": "decoder", "replica": "0", **labels},
        )
        return value or 0.0

    finished = counted("requests_success_total", finished_reason="length")
    aborted = counted("requests_failure_total", error="StreamClosed")
    audio = counted("audio_duration_s_sum")
    await read(pipeline.submit(PROMPT, sampling={"max_tokens": 60, "ignore_eos": True}))
    async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
        await anext(stream)
        assert counted("num_requests_running") == 1
    assert counted("requests_success_total", finished_reason="length") == finished + 1
    assert counted("requests_failure_total", error="StreamClosed") == aborted + 1
    assert counted("audio_duration_s_sum") - audio == pytest.approx(60 * 4 / 24_000)
    assert counted("num_requests_running") == 0


async def test_aborting_one_leaves_the_others_alone(pipeline: Pipeline) -> None:
    others = [
        asyncio.create_task(
            read(pipeline.submit(PROMPT, sampling={"max_tokens": 120, "ignore_eos": True}))
        )
        for _ in range(10)
    ]
    for _ in range(5):
        async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
            await anext(stream)
    for ids, _ in await asyncio.gather(*others):
        assert len(ids) == 120
    await wait_until_idle(pipeline)


async def test_100_aborts_at_any_moment_leave_nothing(pipeline: Pipeline) -> None:
    async def one(i: int) -> None:
        stream = pipeline.submit(PROMPT, sampling=ENDLESS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.002 * i), stream:
                await _read_on(stream)

    await asyncio.gather(*(one(i) for i in range(100)))
    await wait_until_idle(pipeline)
    ids, _ = await read(pipeline.submit(PROMPT, sampling={"max_tokens": 10, "ignore_eos": True}))
    assert len(ids) == 10


async def test_a_timeout_is_a_deadline_error_and_aborts(pipeline: Pipeline) -> None:
    stream = pipeline.submit(PROMPT, sampling=ENDLESS, timeout=0.2)
    with pytest.raises(DeadlineExceeded, match=r"after 0\.2 s"):
        await read(stream)
    await wait_until_idle(pipeline)
    with pytest.raises(InvalidRequest):
        pipeline.submit(PROMPT, timeout=0)


def engine_processes() -> list[Any]:
    children: list[Any] = psutil.Process().children(recursive=True)
    return children


def assert_gone(before: set[int]) -> None:
    """No process but those is left; one that vLLM had to kill may take a moment to be reaped."""
    gone = [p for p in engine_processes() if p.pid not in before]
    _, alive = psutil.wait_procs(gone, timeout=10)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_a_killed_engine_fails_running_and_later_requests_within_seconds() -> None:
    before = {p.pid for p in engine_processes()}
    async with make_pipeline() as pipeline:
        running = [asyncio.create_task(_outcome(pipeline)) for _ in range(8)]
        await asyncio.sleep(0.3)
        core = ar_of(pipeline)._control.hellos[0].pid  # type: ignore[union-attr]
        began = time.monotonic()
        os.kill(core, signal.SIGKILL)
        outcomes = await asyncio.gather(*running)
        assert time.monotonic() - began < 2
        assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
        assert isinstance(await _outcome(pipeline), StageClosed)
        assert not pipeline.health().ok
        assert "engine process is gone" in (pipeline.health().reason or "")
    assert_gone(before)


async def _outcome(pipeline: Pipeline) -> OmniStageError | None:
    try:
        await read(pipeline.submit(PROMPT, sampling=ENDLESS))
    except OmniStageError as error:
        return error
    return None


async def test_leaving_the_pipeline_fails_what_is_running_and_leaves_nothing_behind() -> None:
    before = {p.pid for p in engine_processes()}
    threads = {t.name for t in __import__("threading").enumerate()}
    async with make_pipeline() as pipeline:
        endpoints = ar_of(pipeline)._endpoints
        running = [asyncio.create_task(_outcome(pipeline)) for _ in range(4)]
        await asyncio.sleep(0.2)
    outcomes = await asyncio.gather(*running)
    assert all(isinstance(outcome, StageClosed) for outcome in outcomes)
    assert not endpoints.directory.exists()
    assert_gone(before)
    after = {t.name for t in __import__("threading").enumerate()}
    assert not [name for name in after - threads if "omnistage" in name]
    with pytest.raises(StageClosed):
        await read(pipeline.submit(PROMPT))
    with pytest.raises(StageClosed, match="entered once"):
        await pipeline.__aenter__()
    await pipeline.aclose()


async def test_a_model_that_does_not_exist_is_a_config_error_and_leaves_nothing() -> None:
    before = {p.pid for p in engine_processes()}
    with pytest.raises(OmniStageError, match="no-such-model"):
        async with make_pipeline(model="./no-such-model"):
            pass
    assert_gone(before)


async def test_a_decoder_that_cannot_be_built_stops_the_engine_again() -> None:
    before = {p.pid for p in engine_processes()}

    def build() -> Any:
        raise RuntimeError("no weights")

    with pytest.raises(OmniStageError, match="no weights"):
        async with make_pipeline(decoder=build):
            pass
    assert_gone(before)

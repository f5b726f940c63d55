"""Audio on its way to whoever reads it, on real vLLM: whole, once, in the portions asked for."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnistage.adapters.input import TextInput
from omnistage.config import Deadlines
from omnistage.core.engine import Engine
from omnistage.errors import DeadlineExceeded, OmniStageError, ServerError, StreamClosed
from omnistage.pipeline import Pipeline
from omnistage.request import AudioChunk, ChunkPolicy, FinishReason
from omnistage.stages import decoder as decoder_module
from omnistage.stream import Stream
from tests.e2e.conftest import EOS, HOP, PROMPT, generate, ids_of, read, wait_until_idle
from tests.e2e.inside import llm_of, nothing_left
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


def greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


async def sizes(stream: Stream) -> tuple[list[int], list[int]]:
    """The frames of each chunk, and the ids in them."""
    async with stream:
        chunks = [chunk async for chunk in stream]
    return [len(chunk.pcm) // HOP for chunk in chunks], ids_of(chunks)


@pytest.mark.parametrize(("tokens", "expected"), [(50, [25, 25]), (57, [25, 25, 7])])
async def test_a_length_that_is_a_multiple_of_the_chunk_repeats_no_chunk(
    pipeline: Pipeline, tokens: int, expected: list[int]
) -> None:
    chunks = ChunkPolicy(first=25, growth=1, steady=25)
    got, ids = await sizes(pipeline.submit(PROMPT, sampling=greedy(tokens), chunks=chunks))
    assert got == expected
    assert ids == list((await generate(pipeline, PROMPT, **greedy(tokens))).token_ids)


async def test_neither_load_nor_earlier_streams_change_a_streams_portions(
    pipeline: Pipeline,
) -> None:
    chunks = ChunkPolicy(first=3, growth=2, steady=24)

    def submit() -> Stream:
        return pipeline.submit(PROMPT, sampling=greedy(90), chunks=chunks)

    alone = await sizes(submit())
    assert alone[0] == [3, 6, 12, 24, 24, 21]
    others = [pipeline.submit(PROMPT, sampling=greedy(60)) for _ in range(20)]
    loaded = await asyncio.gather(*(sizes(submit()) for _ in range(3)), *map(sizes, others))
    assert loaded[:3] == [alone] * 3
    assert await sizes(submit()) == alone


async def test_audio_in_one_piece_is_what_the_chunks_are_together(pipeline: Pipeline) -> None:
    async with pipeline.submit(PROMPT, sampling=greedy(70)) as stream:
        pieces = [chunk.pcm async for chunk in stream]
    speech = await pipeline.submit(PROMPT, sampling=greedy(70)).collect()
    np.testing.assert_array_equal(speech.pcm, np.concatenate(pieces))
    assert len(speech.pcm) == 70 * HOP


async def test_a_reader_that_comes_after_the_end_still_gets_all(pipeline: Pipeline) -> None:
    streams = [pipeline.submit(PROMPT, sampling=greedy(120)) for _ in range(3)]
    for stream in streams:
        await stream.__aenter__()
    await wait_until_idle(pipeline)
    assert all(stream.usage for stream in streams)
    expected = list((await generate(pipeline, PROMPT, **greedy(120))).token_ids)
    for stream in streams:
        ids, usage = await read(stream)
        assert ids == expected
        assert usage.output_tokens == 120


async def test_good_streams_leave_no_warning(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await read(pipeline.submit(PROMPT, sampling=greedy(40)))
        await read(pipeline.submit(PROMPT, sampling={"temperature": 0.0}))
        await read(pipeline.submit(PROMPT, sampling=greedy(9), request_id="no-valid-id"))
    assert [r for r in caplog.records if r.name.startswith("omnistage")] == []


async def test_unread_audio_goes_with_its_stream(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def make(*args: Any, **fields: Any) -> AudioChunk:
        chunk = AudioChunk(*args, **fields)
        made.append(weakref.ref(chunk.pcm))
        return chunk

    def alive() -> int:
        return sum(pcm() is not None for pcm in made)

    monkeypatch.setattr(decoder_module, "AudioChunk", make)
    async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
        await anext(stream)
        async with asyncio.timeout(20):
            while alive() < 2:
                await asyncio.sleep(0.01)
    gc.collect(0)
    assert alive() == 0
    with pytest.raises(StreamClosed):
        await anext(stream)


async def test_a_generator_around_a_stream_takes_it_along_when_it_is_closed(
    pipeline: Pipeline,
) -> None:
    llm, closed = llm_of(pipeline), []
    vllms_own = llm.generate

    async def watched(prompt: Any, params: Any, request_id: str, **options: Any) -> Any:
        async with aclosing(vllms_own(prompt, params, request_id, **options)) as outputs:
            try:
                async for output in outputs:
                    yield output
            finally:
                closed.append(request_id)

    async def speak() -> AsyncIterator[AudioChunk]:
        async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
            async for chunk in stream:
                yield chunk

    async with nothing_left(pipeline):
        llm.generate = watched
        try:
            generator = speak()
            chunk = await anext(generator)
            await generator.aclose()  # type: ignore[attr-defined]
        finally:
            del llm.generate
        assert closed == [chunk.request_id]  # by now, not some time later
        assert not pipeline.health().running


async def test_300_cancels_at_once_leave_nothing_running(pipeline: Pipeline) -> None:
    async with nothing_left(pipeline):
        tasks = [
            asyncio.create_task(read(pipeline.submit(PROMPT, sampling=ENDLESS))) for _ in range(300)
        ]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert not pipeline.health().running


async def test_an_abort_that_fails_says_so_and_is_logged(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: Engine) -> None:
        raise OSError("on purpose")

    stream = pipeline.submit(PROMPT, sampling=ENDLESS)
    await anext(stream)
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(Engine, "settle", fails)
        with pytest.raises(OSError, match="on purpose"):
            await stream.abort()
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    (logged,) = [r for r in errors if stream.request_id in r.getMessage()]
    assert logged.exc_info is not None
    assert isinstance(logged.exc_info[1], OSError)
    await wait_until_idle(pipeline)


async def test_an_external_id_can_be_used_again_while_its_last_request_is_aborted(
    pipeline: Pipeline,
) -> None:
    expected = list((await generate(pipeline, PROMPT, **greedy(30))).token_ids)
    for _ in range(3):
        first = pipeline.submit([1, 4, 150, 151, 3], sampling=ENDLESS, request_id="again")
        await anext(first)
        aborting = asyncio.create_task(first.abort())
        ids, _ = await read(pipeline.submit(PROMPT, sampling=greedy(30), request_id="again"))
        assert ids == expected
        await aborting


@pytest.mark.parametrize("where", ["input adapter", "vLLM"])
async def test_a_submission_that_fails_half_way_leaves_nothing_and_can_be_tried_again(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise OSError("on purpose")

    async with nothing_left(pipeline):
        with monkeypatch.context() as patched:
            target: Any = TextInput if where == "input adapter" else llm_of(pipeline).renderer
            name = "adapt" if where == "input adapter" else "render_cmpl_async"
            patched.setattr(target, name, fails)
            with pytest.raises(ServerError, match="OSError: on purpose") as raised:
                await read(pipeline.submit(PROMPT, sampling=greedy(9), request_id="r"))
            assert isinstance(raised.value.__cause__, OSError)
        ids, _ = await read(pipeline.submit(PROMPT, sampling=greedy(9), request_id="r"))
        assert len(ids) == 9


async def test_a_submission_that_is_aborted_while_its_input_is_made_never_reaches_vllm(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    async with nothing_left(pipeline):
        monkeypatch.setattr(TextInput, "adapt", waits)
        async with pipeline.submit(PROMPT, sampling=ENDLESS) as stream:
            await asyncio.sleep(0)
        monkeypatch.undo()
        with pytest.raises(OmniStageError):
            await anext(stream)


@pytest.mark.parametrize("extra", [[], [EOS]], ids=["another stop id", "the end id too"])
async def test_ignore_eos_and_stop_ids_together_mean_what_they_mean_to_vllm(
    pipeline: Pipeline, extra: list[int]
) -> None:
    free = await generate(pipeline, PROMPT, **greedy(40))
    sampling = {**greedy(40), "stop_token_ids": [free.token_ids[12], *extra]}
    expected = await generate(pipeline, PROMPT, **sampling)
    assert len(expected.token_ids) < 40
    ids, usage = await read(pipeline.submit(PROMPT, sampling=sampling))
    assert ids == list(expected.token_ids)
    assert usage.finish_reason == expected.finish_reason


async def test_a_first_id_that_ends_the_request_gives_empty_audio_and_the_reason(
    pipeline: Pipeline,
) -> None:
    first = (await generate(pipeline, PROMPT, **greedy(1))).token_ids
    stop = {"temperature": 0.0, "stop_token_ids": list(first)}
    ids, usage = await read(pipeline.submit(PROMPT, sampling=stop, request_id="no-valid-id"))
    assert ids == []
    assert (usage.output_tokens, usage.finish_reason) == (1, FinishReason.STOP)


@pytest.mark.parametrize("kept", [1, 5])
async def test_updates_that_stop_coming_fail_their_request_and_no_other(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    (branch,) = branches_of(pipeline)
    decoder: Any = branch.decoder
    impatient = replace(decoder._config, deadlines=Deadlines(between_chunks=0.5))
    silent, on_update = pipeline.submit(PROMPT, sampling=ENDLESS), decoder.on_update
    seen: list[Any] = []

    def drop(update: Any, buffers: Any, stamp: int) -> None:
        if update.request_id == silent.request_id:
            seen.append(update)
            if len(seen) > kept:
                return
        on_update(update, buffers, stamp)

    monkeypatch.setattr(decoder, "on_update", drop)
    async with nothing_left(pipeline):
        with monkeypatch.context() as patched:
            patched.setattr(decoder, "_config", impatient)
            await silent.__aenter__()
        other = asyncio.create_task(read(pipeline.submit(PROMPT, sampling=greedy(60))))
        with pytest.raises(DeadlineExceeded, match=r"no update for 0\.5 s.*'ar'") as raised:
            await read(silent)
        assert raised.value.request_id == silent.request_id
        assert len((await other)[0]) == 60
    assert seen[-1].terminal.reason is FinishReason.ABORT  # in vLLM too, long before its length

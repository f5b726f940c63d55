"""Each ending of a request on real vLLM: one terminal or none, one outcome, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from vllm.engine.protocol import StreamingInput
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

from omnistage.errors import (
    DeadlineExceeded,
    DecoderError,
    InvalidRequest,
    OmniStageError,
    ProcessorError,
    ReaderStalled,
    ServerError,
    StreamClosed,
    UpdatesLost,
)
from omnistage.pipeline import Pipeline
from omnistage.request import FinishReason, Start
from omnistage.stream import Stream
from omnistage.wire import PROTOCOL_VERSION, Admission, Failed, encode
from tests.e2e.conftest import PROMPT, ar_of, read
from tests.e2e.inside import (
    ADDED_IN_SHUTDOWN,
    PREPROCESSING_FAILS,
    Published,
    llm_of,
    nothing_left,
    report,
)
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
LONG: list[int] = [1, 4, *(70 + i % 100 for i in range(900)), 3]
FORCE_77: dict[str, Any] = {**ENDLESS, "allowed_token_ids": [77]}


async def outcome(stream: Stream) -> Any:
    """How a stream ended: its usage or its error."""
    try:
        return (await read(stream))[1]
    except OmniStageError as error:
        return error


async def until(pipeline: Pipeline, **wanted: int) -> None:
    """Return when the engine holds so much."""
    async with asyncio.timeout(10):
        while not wanted.items() <= (await report(pipeline)).items():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("sampling", "reason", "tokens"),
    [
        ({"max_tokens": 32, "ignore_eos": True}, FinishReason.LENGTH, 32),
        (
            {**ENDLESS, "allowed_token_ids": [78], "stop_token_ids": [78]},
            FinishReason.STOP,
            1,
        ),
        (
            {
                **ENDLESS,
                "allowed_token_ids": [78],
                "repetition_detection": RepetitionDetectionParams(
                    max_pattern_size=1, min_pattern_size=1, min_count=12
                ),
            },
            FinishReason.REPETITION,
            12,
        ),
    ],
    ids=["length", "stop", "repetition"],
)
async def test_the_finish_reason_is_the_ar_stages(
    pipeline: Pipeline, sampling: dict[str, Any], reason: FinishReason, tokens: int
) -> None:
    stream = pipeline.submit(PROMPT, sampling=sampling)
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            usage = await outcome(stream)
    assert (usage.finish_reason, usage.output_tokens) == (reason, tokens)
    assert published.starts == {stream.request_id: 1}
    assert published.terminals == {stream.request_id: [str(reason)]}


async def test_an_error_behind_the_ar_stage_goes_before_its_finish_reason(
    pipeline: Pipeline, crowded: Pipeline
) -> None:
    short = {"max_tokens": 20, "ignore_eos": True}
    async with nothing_left(pipeline):
        late = pipeline.submit(PROMPT, sampling=short, request_id="raises-at-the-end")
        with Published(pipeline) as published:
            assert isinstance(await outcome(late), ProcessorError)
        assert published.terminals == {late.request_id: ["error"]}
    async with nothing_left(crowded):
        force = {**short, "max_tokens": 200, "allowed_token_ids": [77]}
        failing = crowded.submit(PROMPT, sampling=force)
        assert isinstance(await outcome(failing), DecoderError)


@pytest.mark.parametrize(
    ("name", "reason"), [(PREPROCESSING_FAILS, "error"), (ADDED_IN_SHUTDOWN, "abort")]
)
async def test_a_request_that_never_reached_the_scheduler_fails_at_once(
    pipeline: Pipeline, name: str, reason: str
) -> None:
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            stream = pipeline.submit(PROMPT, sampling=ENDLESS, request_id=name, timeout=5)
            error = await outcome(stream)
    assert isinstance(error, ServerError)
    assert f"vLLM ended the request with {reason}" in error.message
    assert error.request_id == stream.request_id
    assert not published.terminals


async def test_a_prompt_that_does_not_fit_is_the_callers_error(pipeline: Pipeline) -> None:
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            error = await outcome(pipeline.submit([70] * 1024, sampling=ENDLESS))
    assert isinstance(error, InvalidRequest)
    assert not published.terminals


async def test_a_full_queue_refuses_at_once_and_serves_again_afterwards(crowded: Pipeline) -> None:
    async with nothing_left(crowded):
        streams = [crowded.submit(PROMPT, sampling=ENDLESS) for _ in range(60)]
        outcomes = [asyncio.create_task(outcome(stream)) for stream in streams]
        async with asyncio.timeout(5):
            refused = [await one for one in outcomes[48:]]
        assert all(isinstance(error, ServerError) for error in refused)
        assert all("cannot accept new requests" in error.message for error in refused)
        await asyncio.gather(*(stream.abort() for stream in streams))
        await asyncio.gather(*outcomes)
        short = {"max_tokens": 5, "ignore_eos": True}
        assert len((await read(crowded.submit(PROMPT, sampling=short)))[0]) == 5


async def test_abort_while_queued(crowded: Pipeline) -> None:
    async with nothing_left(crowded):
        running = [crowded.submit(PROMPT, sampling=ENDLESS) for _ in range(16)]
        queued = [crowded.submit(PROMPT, sampling=ENDLESS) for _ in range(8)]
        tasks = [asyncio.create_task(outcome(stream)) for stream in running + queued]
        await until(crowded, requests=24)
        with Published(crowded) as published:
            await asyncio.gather(*(stream.abort() for stream in queued))
            # Only now: an abort is answered after what was published before it has left.
            held = await report(crowded)
        assert (held["requests"], held["records"]) == (16, 16)
        assert all(published.terminals[s.request_id] == ["abort"] for s in queued)
        assert all(published.starts[s.request_id] == 1 for s in queued)
        await asyncio.gather(*(stream.abort() for stream in running))
        assert all(isinstance(one, StreamClosed) for one in await asyncio.gather(*tasks))


async def test_abort_between_two_chunks_of_a_prefill(crowded: Pipeline) -> None:
    async with nothing_left(crowded):
        with Published(crowded) as published:
            # 900 ids take 29 steps; the second one waits for those of the first.
            streams = [crowded.submit(LONG, sampling=ENDLESS) for _ in range(2)]
            tasks = [asyncio.create_task(outcome(stream)) for stream in streams]
            await until(crowded, requests=2)
            await asyncio.gather(*(stream.abort() for stream in streams))
            assert all(isinstance(one, StreamClosed) for one in await asyncio.gather(*tasks))
            assert (await report(crowded))["requests"] == 0
        assert list(published.terminals.values()) == [["abort"], ["abort"]]
        assert published.ids == 0


async def test_abort_while_decoding_and_at_the_very_end(pipeline: Pipeline) -> None:
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            streams = []
            for tokens in (900, 4, 4, 4, 4):
                stream = pipeline.submit(
                    PROMPT, sampling={"max_tokens": tokens, "ignore_eos": True}
                )
                streams.append(stream)
                await anext(stream)  # of the short ones this is all there is
                await stream.abort()
            await report(pipeline)
        assert set(published.terminals) == {stream.request_id for stream in streams}
        assert all(len(reasons) == 1 for reasons in published.terminals.values())
        assert published.terminals[streams[0].request_id] == ["abort"]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("a loss", UpdatesLost),
        ("a deadline", DeadlineExceeded),
        ("a reader that does not read", ReaderStalled),
        ("a report of the engine's side", ProcessorError),
    ],
)
async def test_whatever_fails_a_request_aborts_it_in_vllm(
    pipeline: Pipeline, cause: str, kind: type[OmniStageError]
) -> None:
    (branch,) = branches_of(pipeline)
    decoder: Any = branch.decoder
    async with nothing_left(pipeline):
        timeout = 0.1 if cause == "a deadline" else None
        before = decoder._config
        if cause == "a reader that does not read":
            decoder._config = replace(before, max_unread=0.001, slow_reader="fail")
        with Published(pipeline) as published:
            streams = [pipeline.submit(PROMPT, sampling=ENDLESS, timeout=timeout) for _ in range(4)]
            for stream in streams:
                await stream.__aenter__()
            if cause == "a loss":
                await until(pipeline, requests=4)
                decoder.on_lost(UpdatesLost("on purpose"))
            elif cause == "a report of the engine's side":
                for stream in streams:
                    failed = Failed(
                        PROTOCOL_VERSION, stream.request_id, kind.__name__, "on purpose"
                    )
                    ar_of(pipeline)._on_failed(failed)
            # Nobody has closed them yet, or reads: what failed them aborts them all the same.
            await until(pipeline, requests=0)
            outcomes = [await outcome(stream) for stream in streams]
            assert all(isinstance(error, kind) for error in outcomes)
            decoder._config = before
        assert list(published.terminals.values()) == [["abort"]] * len(published.terminals)


async def test_a_client_that_is_gone_is_aborted(pipeline: Pipeline) -> None:
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            tasks = []
            for _ in range(4):
                stream = pipeline.submit(PROMPT, sampling=ENDLESS)
                tasks.append(asyncio.create_task(outcome(stream)))
            await until(pipeline, requests=4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await report(pipeline)
        assert list(published.terminals.values()) == [["abort"]] * 4


def session_of(pipeline: Pipeline, name: str) -> SamplingParams:
    """Sampling of a session of vLLM's own whose updates go to the pipeline's decoder."""
    (branch,) = branches_of(pipeline)
    record = Admission(PROTOCOL_VERSION, name, 0, False, (branch.consumer,), Start())
    return SamplingParams(
        max_tokens=6,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"omnistage": encode(record)},
    )


@pytest.mark.parametrize("when", ["running", "waiting", "aborted"])
async def test_a_session_ends_once_however_it_is_closed(pipeline: Pipeline, when: str) -> None:
    llm, params = llm_of(pipeline), session_of(pipeline, f"session-{when}")
    segment, closing = asyncio.Event(), asyncio.Event()

    async def inputs() -> AsyncIterator[Any]:
        for ids in (PROMPT, [70, 71]):
            yield StreamingInput(prompt=tokens_input(ids))
        if when != "running":
            await closing.wait()

    async def consume() -> None:
        count = 0
        async for output in llm.generate(inputs(), params, f"session-{when}"):
            count += len(output.outputs[0].token_ids)
            if count >= 12:
                segment.set()

    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            task = asyncio.create_task(consume())
            if when != "running":
                await segment.wait()
                assert not published.terminals  # two segments have ended
                closing.set() if when == "waiting" else task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await report(pipeline)
            await asyncio.sleep(0.05)
        reason = "length" if when == "running" else "abort"
        assert published.terminals == {f"session-{when}": [reason]}
        assert published.starts == {f"session-{when}": 1}

"""Ways that vLLM runs, end to end, which no other test here needs: every id, or a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from omnistage import ARStageConfig, Pipeline, TokenUpdates, subscribe
from omnistage.core.collector import EXTRA_ARG
from omnistage.errors import InvalidRequest
from omnistage.request import FinishReason, TokenUpdate
from omnistage.wire import PROTOCOL_VERSION, Admission, encode
from tests.e2e.conftest import ENGINE_ARGS, PROMPT, generate, make_pipeline, read
from tests.e2e.rows import GREEDY, prompt, reading
from tests.omni_models.checkpoint import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.mode("priority scheduling", "`submit(priority=...)`, lower first")
async def test_who_has_priority_is_first_and_nobody_loses_an_id() -> None:
    args = {**ENGINE_ARGS, "scheduling_policy": "priority", "max_num_seqs": 1}
    async with make_pipeline(processor=TokenUpdates(), engine_args=args) as pipeline:
        ended: list[int] = []

        async def one(priority: int) -> list[int]:
            sampling = {**GREEDY, "max_tokens": 40}
            ids, _ = await read(
                pipeline.submit(prompt(priority), sampling=sampling, priority=priority)
            )
            ended.append(priority)
            return ids

        first = asyncio.ensure_future(one(0))
        await asyncio.sleep(0.02)  # it runs; the others wait for its place
        order = [5, 3, 9, 1]
        taken = await asyncio.gather(first, *map(one, order))
        assert ended == [0, 1, 3, 5, 9]
        for priority, ids in zip([0, *order], taken, strict=True):
            reference = await generate(pipeline, prompt(priority), max_tokens=40, **GREEDY)
            assert ids == list(reference.token_ids)


@pytest.mark.mode("logprobs", "computed, and read where you call the engine yourself")
async def test_ids_with_logprobs_are_all_published(pipeline: Pipeline) -> None:
    sampling = {**GREEDY, "max_tokens": 30, "logprobs": 3, "prompt_logprobs": 2}
    ids, usage = await read(pipeline.submit(PROMPT, sampling=sampling))
    reference = await generate(pipeline, PROMPT, max_tokens=30, logprobs=3, **GREEDY)
    assert ids == list(reference.token_ids)
    assert usage.output_tokens == 30
    assert len(reference.logprobs) == 30


@pytest.mark.mode("KV cache events", "`engine_args={'kv_events_config': ...}`")
async def test_kv_events_come_beside_the_ids(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(endpoint)
        args = {**ENGINE_ARGS, "kv_events_config": events}
        async with make_pipeline(processor=TokenUpdates(), engine_args=args) as pipeline:
            asked = prompt(3, 100)
            ids, _ = await read(pipeline.submit(asked, sampling={**GREEDY, "max_tokens": 60}))
            reference = await generate(pipeline, asked, max_tokens=60, **GREEDY)
            assert ids == list(reference.token_ids)
            async with asyncio.timeout(10):
                frames = await socket.recv_multipart()
            batch: Any = msgspec.msgpack.decode(frames[-1])
            assert any(b"BlockStored" in msgspec.msgpack.encode(event) for event in batch[1]), batch
    finally:
        context.destroy(linger=0)


@pytest.mark.mode("stop strings, text only", "`detokenize=True`, without a consumer")
async def test_a_request_that_ends_here_may_stop_at_a_string(models: Path) -> None:
    config = ARStageConfig(
        model=checkpoint(models, "OmniPlain", bytewise=True),
        processor=TokenUpdates(),
        engine_args={**ENGINE_ARGS, "skip_tokenizer_init": False},
        start_method="fork",
    )
    async with Pipeline(ar=config, decoder=None) as pipeline:
        # Only ids that are bytes, so that there is text.
        letters = {**GREEDY, "allowed_token_ids": list(range(256)), "detokenize": True}
        stream = pipeline.submit(PROMPT, sampling={**letters, "max_tokens": 30})
        whole = (await stream.finished()).text
        assert whole
        assert len(whole) > 8
        stop = whole[4:6]
        stream = pipeline.submit(PROMPT, sampling={**letters, "max_tokens": 30, "stop": [stop]})
        usage = await stream.finished()
        assert usage.finish_reason is FinishReason.STOP
        assert usage.text == whole[: whole.index(stop)]
        async with reading(pipeline):
            refused = pipeline.submit(
                PROMPT, sampling={**letters, "stop": [stop]}, subscribers=["rows"]
            )
            with pytest.raises(InvalidRequest, match="stop_token_ids"):
                await refused.finished()


@pytest.mark.mode("stop strings with a consumer", "refused: use `stop_token_ids`")
@pytest.mark.mode("several samples of one request (`n > 1`)", "refused: submit it n times")
async def test_what_a_consumer_would_be_harmed_by_is_refused(pipeline: Pipeline) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stop": ["x"]}, "stop_token_ids"),
        ({"n": 2}, "submit the request"),
    ]
    for sampling, words in cases:
        with pytest.raises(InvalidRequest, match=words):
            await read(pipeline.submit(PROMPT, sampling=sampling))


@pytest.mark.mode("streaming input", "through an `AsyncLLM` of your own: segments on the wire")
@pytest.mark.parametrize("scheduling", ["sync", "async"])
async def test_each_segment_of_a_session_is_told_from_the_next_and_the_end_comes_once(
    scheduling: str, models: Path
) -> None:
    from tests.e2e.engines import make_llm

    config = ARStageConfig(model=checkpoint(models, "OmniPlain"), processor=TokenUpdates())
    llm = make_llm(config, scheduling, "uni")
    try:
        async with (
            Pipeline(ar=config, decoder=None, llm=llm) as pipeline,
            subscribe(pipeline.endpoints, subscriber="rows") as updates,
        ):
            record = encode(Admission(PROTOCOL_VERSION, "session", consumers=(("audio", "rows"),)))
            gate = [asyncio.Event() for _ in range(3)]

            def params(tokens: int) -> SamplingParams:
                return SamplingParams(
                    max_tokens=tokens,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                    extra_args={EXTRA_ARG: record},
                    **GREEDY,
                )

            async def inputs() -> AsyncIterator[StreamingInput]:
                for i, event in enumerate(gate):
                    await event.wait()
                    given: Any = {"prompt_token_ids": prompt(i, 20)}
                    yield StreamingInput(given, params(4 + i))

            async def drive() -> list[int]:
                ids: list[int] = []
                async for output in llm.generate(inputs(), params(4), "session"):
                    ids += output.outputs[0].token_ids
                return ids

            gate[0].set()
            driving = asyncio.ensure_future(drive())
            segments: dict[int, list[TokenUpdate]] = {}
            ended = 0
            async with asyncio.timeout(30):
                async for update in updates:
                    segments.setdefault(update.segment, []).append(update)
                    if update.segment_end:
                        assert update.terminal is None
                        ended += 1
                        gate[min(ended, 2)].set()
                    if update.terminal is not None:
                        break
                returned = await driving
            published = [
                [i for update in segments.get(n, []) for i in update.ids] for n in range(3)
            ]
            assert [len(ids) for ids in published] == [4, 5, 6]
            assert [i for ids in published for i in ids] == returned
            for updates_of_one in segments.values():
                positions = [u.position for u in updates_of_one if u.ids]
                counts = [len(u.ids) for u in updates_of_one if u.ids]
                assert positions == list(np.cumsum([0, *counts])[:-1])
    finally:
        llm.shutdown()


@pytest.mark.mode("LoRA", "refused: a request cannot choose an adapter")
async def test_an_adapter_cannot_be_chosen(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidRequest, match="lora_request"):
        await read(pipeline.submit(PROMPT, sampling={"lora_request": "mine"}))

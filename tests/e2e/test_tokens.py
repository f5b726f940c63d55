"""Ids at the decoder against vLLM's own answer, token for token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnistage.errors import InvalidRequest
from omnistage.pipeline import Pipeline
from omnistage.request import FinishReason
from tests.e2e.conftest import EOS, PROMPT, generate, read, wait_until_idle

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


def prompts(count: int) -> list[list[int]]:
    return [[1, 4, *(68 + (i * 7 + k) % 100 for k in range(1 + 3 * i)), 3] for i in range(count)]


@pytest.mark.mode("start method `fork`", "")
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}],
    ids=["greedy", "sampled"],
)
async def test_16_concurrent_requests_of_mixed_lengths_equal_generate(
    pipeline: Pipeline, sampling: dict[str, Any]
) -> None:
    requests = [
        (prompt, {**sampling, "max_tokens": 5 + 13 * i, "ignore_eos": bool(i % 2)})
        for i, prompt in enumerate(prompts(16))
    ]

    async def ours(i: int) -> Any:
        prompt, fields = requests[i]
        return await read(pipeline.submit(prompt, sampling=fields, seed=i))

    results = await asyncio.gather(*(ours(i) for i in range(16)))
    for i, (ids, usage) in enumerate(results):
        prompt, fields = requests[i]
        reference = await generate(pipeline, prompt, seed=i, **fields)
        assert ids == list(reference.token_ids)
        assert usage.output_tokens == len(ids)
        assert usage.prompt_tokens == len(prompt)
        assert usage.finish_reason == reference.finish_reason


async def test_the_published_ids_are_those_of_vllms_own_final_output(pipeline: Pipeline) -> None:
    from omnistage.core import engine

    finals: dict[str, list[int]] = {}
    original = engine._usage

    def spy(output: Any) -> Any:
        finals[output.request_id] = list(output.outputs[0].token_ids)
        return original(output)

    engine._usage = spy
    try:
        streams = [
            pipeline.submit(
                prompt, sampling={"max_tokens": 40 + 5 * i, "temperature": 1.0, "ignore_eos": True}
            )
            for i, prompt in enumerate(prompts(16))
        ]
        results = await asyncio.gather(*map(read, streams))
    finally:
        engine._usage = original
    for stream, (ids, _) in zip(streams, results, strict=True):
        assert ids == finals[stream.request_id]


async def test_stop_token_ids_end_the_stream_and_are_published(pipeline: Pipeline) -> None:
    reference = await generate(pipeline, PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True)
    stop = reference.token_ids[9]
    at = list(reference.token_ids).index(stop)
    ids, usage = await read(
        pipeline.submit(PROMPT, sampling={"temperature": 0.0, "stop_token_ids": [stop]})
    )
    assert ids == list(reference.token_ids[: at + 1])
    assert usage.finish_reason is FinishReason.STOP


async def test_a_stop_at_the_first_token_gives_one_id(pipeline: Pipeline) -> None:
    reference = await generate(pipeline, PROMPT, temperature=0.0, max_tokens=1)
    ids, usage = await read(
        pipeline.submit(
            PROMPT, sampling={"temperature": 0.0, "stop_token_ids": list(reference.token_ids)}
        )
    )
    assert ids == list(reference.token_ids)
    assert (usage.output_tokens, usage.finish_reason) == (1, FinishReason.STOP)


async def test_min_tokens_holds_the_stop_back(pipeline: Pipeline) -> None:
    reference = await generate(pipeline, PROMPT, temperature=0.0, max_tokens=3)
    sampling = {
        "temperature": 0.0,
        "min_tokens": 8,
        "max_tokens": 20,
        "stop_token_ids": list(reference.token_ids),
    }
    ids, usage = await read(pipeline.submit(PROMPT, sampling=sampling))
    assert len(ids) >= 8
    assert not set(ids[:8]) & {*reference.token_ids, EOS}
    assert usage.output_tokens == len(ids)


async def test_max_tokens_1_gives_one_id(pipeline: Pipeline) -> None:
    ids, usage = await read(pipeline.submit(PROMPT, sampling={"max_tokens": 1}))
    assert len(ids) == 1
    assert usage.finish_reason is FinishReason.LENGTH


async def test_ignore_eos_runs_to_max_tokens(pipeline: Pipeline) -> None:
    ids, usage = await read(
        pipeline.submit(PROMPT, sampling={"max_tokens": 300, "ignore_eos": True})
    )
    assert len(ids) == 300
    assert usage.finish_reason is FinishReason.LENGTH


async def test_without_max_tokens_a_request_may_use_the_models_whole_length(
    pipeline: Pipeline,
) -> None:
    ids, usage = await read(pipeline.submit(PROMPT, sampling={"ignore_eos": True}))
    assert len(ids) == 1024 - len(PROMPT)
    assert usage.finish_reason is FinishReason.LENGTH


async def test_zero_valid_codec_ids_end_in_an_empty_stream(pipeline: Pipeline) -> None:
    stream = pipeline.submit(
        PROMPT, sampling={"max_tokens": 25, "ignore_eos": True}, request_id="no-valid-id"
    )
    ids, usage = await read(stream)
    assert ids == []
    assert (usage.output_tokens, usage.dropped_tokens) == (25, 25)


@pytest.mark.parametrize(
    ("prompt", "sampling", "parameter"),
    [
        ([1] * 1100, {}, "input_tokens"),
        ([1, VOCAB := 1344], {}, "prompt"),
        ([], {}, "prompt"),
        ("text without a tokenizer", {}, None),
        (PROMPT, {"stop": ["x"]}, "stop"),
        (PROMPT, {"n": 2}, "n"),
        (PROMPT, {"no_such_field": 1}, "sampling"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"max_tokens": 0}, "max_tokens"),
        (PROMPT, {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        (PROMPT, {"min_tokens": 5, "stop_token_ids": [-1]}, "stop_token_ids"),
        (PROMPT, {"max_tokens": 2.5}, "sampling"),
        (PROMPT, {"max_tokens": 10**30}, "sampling"),
        (PROMPT, {"ignore_eos": "x"}, "sampling"),
        (PROMPT, {"seed": 2**70}, "sampling"),
        (PROMPT, {"include_stop_str_in_output": 5}, "sampling"),
        (PROMPT, {"_all_stop_token_ids": {99_999}, "min_tokens": 3}, "sampling"),
        (PROMPT, {"_bad_words_token_ids": [[1.5]]}, "sampling"),
        (PROMPT, {"extra_args": {"omnistage": b"x"}}, "extra_args"),
        (PROMPT, {"logit_bias": {99_999: 1.0}}, "logit_bias"),
        (PROMPT, {"allowed_token_ids": [99_999]}, "allowed_token_ids"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_the_engine_lives_on(
    pipeline: Pipeline, prompt: Any, sampling: dict[str, Any], parameter: str | None
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await read(pipeline.submit(prompt, sampling=sampling))
    assert raised.value.parameter == parameter
    assert raised.value.request_id
    await wait_until_idle(pipeline)
    assert await read(pipeline.submit(PROMPT, sampling={"max_tokens": 2}))


async def test_two_requests_of_one_external_id_stay_apart(pipeline: Pipeline) -> None:
    a, b = (
        pipeline.submit(
            [1, 4, unit, 3], sampling={"max_tokens": 30, "temperature": 0.0}, request_id="same"
        )
        for unit in (70, 120)
    )
    assert a.request_id != b.request_id
    (ids_a, _), (ids_b, _) = await asyncio.gather(read(a), read(b))
    assert ids_a != ids_b

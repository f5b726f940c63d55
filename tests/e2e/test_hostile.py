"""Whatever one request brings along, fifteen others get the ids that they would get alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from omnistage.errors import DecoderError, ProcessorError
from omnistage.pipeline import Pipeline
from omnistage.request import Start
from omnistage.wire import PROTOCOL_VERSION, Admission, encode
from tests.e2e.conftest import PROMPT, generate, read
from tests.e2e.inside import Published, llm_of, nothing_left
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
# Without 77, which the decoder of the crowded pipeline fails on.
ALONE: dict[str, Any] = {
    "max_tokens": 60,
    "temperature": 0.0,
    "ignore_eos": True,
    "logit_bias": {77: -100.0},
}


@asynccontextmanager
async def fifteen_others(pipeline: Pipeline) -> AsyncIterator[None]:
    """Run fifteen requests beside the block, and compare their ids with vLLM's own."""
    prompts = [[1, 4, *(70 + (7 * i + k) % 100 for k in range(1 + i)), 3] for i in range(15)]
    expected = await asyncio.gather(*(generate(pipeline, p, **ALONE) for p in prompts))
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            streams = [pipeline.submit(prompt, sampling=ALONE) for prompt in prompts]
            others = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.05)
            yield
            results = await asyncio.gather(*others)
        assert [ids for ids, _ in results] == [list(e.token_ids) for e in expected]
        for stream in streams:
            assert published.terminals[stream.request_id] == ["length"]


def record(
    request_id: str = "hostile",
    consumers: Any = (("audio", "nobody"),),
    version: int = PROTOCOL_VERSION,
    **start: Any,
) -> bytes:
    return encode(Admission(version, request_id, 0, False, consumers, Start(**start)))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


GOOD = record()
BAD: list[Any] = [
    None,
    True,
    7,
    -1.5,
    "text",
    [],
    [1, [2, [3]]],
    {},
    nested(40),
    {"omnistage": GOOD},
    ["<f4", [2], 1],  # as vLLM sends an array
    b"",
    b"\xc1" * 64,
    b"\x91" * 5_000,
    b"\xdd\xff\xff\xff\xff",  # an array of four billion items
    *(GOOD[:end] for end in range(1, len(GOOD), 5)),
    GOOD + b"\x00",
    record(version=99),
    record(version=-1),
    record(consumers=(("video", "s"),)),
    record(consumers=(("audio", ""),)),
    record(consumers=(("audio", "a/b\0"),)),
    record(request_id="x" * 1_000_000),
    record(consumers=tuple(("audio", f"s{i}") for i in range(10_000))),
    record(options={"x": "y" * 4_000_000}),
    record(consumers=(("audio", "nobody"), ("audio", "nobody"))),
    msgspec.msgpack.encode([PROTOCOL_VERSION, "hostile", 2**64 - 1]),
    msgspec.msgpack.encode([PROTOCOL_VERSION, None]),
    msgspec.msgpack.encode([PROTOCOL_VERSION, "hostile", 0, False, [["audio"]]]),
    msgspec.msgpack.encode([PROTOCOL_VERSION, "hostile", 0, False, [], nested(3)]),
    msgspec.msgpack.encode(nested(200)),
    random.Random(5).randbytes(1_000_000),
    GOOD,  # for nobody who has subscribed
]


async def alone(pipeline: Pipeline, value: Any, name: str = "hostile") -> Any:
    """A request of vLLM's own with that in its ``extra_args``."""
    params = SamplingParams(
        max_tokens=4, ignore_eos=True, detokenize=False, extra_args={"omnistage": value}
    )
    final = None
    async for output in llm_of(pipeline).generate({"prompt_token_ids": PROMPT}, params, name):
        final = output
    assert final is not None
    return final.outputs[0]


async def test_hostile_records_harm_nobody(pipeline: Pipeline) -> None:
    # Once, so that the thread with which pyzmq sends large messages is there.
    await alone(pipeline, bytes(1_000_000))
    async with fifteen_others(pipeline):
        for i, value in enumerate(BAD):
            output = await alone(pipeline, value, f"hostile-{i}")
            assert len(output.token_ids) == 4, value


async def test_a_record_that_names_another_request_gets_nothing_of_it(pipeline: Pipeline) -> None:
    async with fifteen_others(pipeline):
        (branch,) = branches_of(pipeline)
        records = [record(name, (branch.consumer,)) for name in pipeline._running]
        assert len(records) == 15
        outputs = await asyncio.gather(*(alone(pipeline, value) for value in records))
        assert all(len(output.token_ids) == 4 for output in outputs)


async def test_extra_args_of_others_pass(pipeline: Pipeline) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"theirs": nested(5)})
    params.detokenize = False
    async with nothing_left(pipeline):
        async for _ in llm_of(pipeline).generate({"prompt_token_ids": PROMPT}, params, "theirs"):
            pass


@pytest.mark.parametrize("kind", ["raises", "garbage", "raises-at-the-end"])
async def test_a_processor_that_fails(crowded: Pipeline, kind: str) -> None:
    async with fifteen_others(crowded):
        stream = crowded.submit(PROMPT, sampling={**ENDLESS, "max_tokens": 40}, request_id=kind)
        with pytest.raises(ProcessorError, match="Mixed") as raised:
            await read(stream)
        assert raised.value.request_id == stream.request_id


@pytest.mark.parametrize("seconds", [1, pytest.param(5, marks=pytest.mark.slow)])
async def test_a_processor_that_blocks_delays_and_loses_nothing(
    pipeline: Pipeline, seconds: int
) -> None:
    async with fifteen_others(pipeline):
        sampling = {**ENDLESS, "max_tokens": 40}
        ids, usage = await read(
            pipeline.submit(PROMPT, sampling=sampling, request_id=f"blocks{seconds}")
        )
        assert len(ids) == usage.output_tokens == 40


async def test_a_decoder_that_raises_on_the_third_batch(crowded: Pipeline) -> None:
    async with fifteen_others(crowded):
        force = {**ENDLESS, "max_tokens": 300, "allowed_token_ids": [77]}
        stream = crowded.submit(PROMPT, sampling=force)
        with pytest.raises(DecoderError, match="third batch") as raised:
            await read(stream)
        assert (raised.value.request_id, raised.value.stage) == (stream.request_id, "decoder")

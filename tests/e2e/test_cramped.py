"""Real vLLM with a KV cache for two and a half requests, and a model that cannot sample its end id.

Requests are preempted and resumed here, prefill in chunks, and wait for one another's blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omnistage.adapters.processor import TokenUpdates
from omnistage.errors import InvalidRequest
from omnistage.pipeline import Pipeline
from omnistage.request import FinishReason
from tests.e2e.conftest import (
    CHECKPOINT,
    ENGINE_ARGS,
    PROMPT,
    generate,
    make_pipeline,
    read,
    wait_until_idle,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LONGEST = 256
BEYOND = 151_645  # an end id of a tokenizer that the audio head does not have
CRAMPED: dict[str, Any] = {
    **ENGINE_ARGS,
    "enable_chunked_prefill": True,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "block_size": 32,
    "num_gpu_blocks_override": LONGEST // 32 + 1,  # and vLLM's null block
    "disable_log_stats": False,  # preemptions are counted
}


def checkpoint_without_an_end(directory: Path) -> Path:
    """The talker's checkpoint, whose generation config declares an end id beyond its head."""
    for file in CHECKPOINT.iterdir():
        if file.name != "generation_config.json":
            (directory / file.name).symlink_to(file)
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [{BEYOND}]}}')
    return directory


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cramped(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    model = checkpoint_without_an_end(tmp_path_factory.mktemp("endless"))
    pipeline = make_pipeline(model=str(model), processor=TokenUpdates(), engine_args=CRAMPED)
    async with pipeline as running:
        yield running


def request(i: int, tokens: int = 45) -> tuple[list[int], dict[str, Any]]:
    prompt = [1, 4, *(68 + (i * 11 + k) % 100 for k in range(50)), 3]
    return prompt, {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}


@pytest.mark.mode("preemption and resume", "")
async def test_preempted_requests_give_every_id_once(cramped: Pipeline) -> None:
    from prometheus_client import REGISTRY

    requests = [request(i) for i in range(6)]
    alone = [list((await generate(cramped, p, **s)).token_ids) for p, s in requests]

    def preempted() -> float:
        samples = [s for m in REGISTRY.collect() for s in m.samples]
        return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")

    before = preempted()
    streams = [cramped.submit(p, sampling=s) for p, s in requests]
    results = await asyncio.gather(*map(read, streams))
    assert preempted() > before
    assert [ids for ids, _ in results] == alone
    await wait_until_idle(cramped)


async def test_preempted_requests_that_are_aborted_hold_nothing(cramped: Pipeline) -> None:
    for _ in range(3):
        streams = [cramped.submit(*request(i)[:1], sampling=request(i)[1]) for i in range(6)]
        for stream in streams:
            await stream.__aenter__()
        await anext(streams[0])
        await asyncio.gather(*(stream.abort() for stream in streams))
        await wait_until_idle(cramped, within=1)


async def test_a_request_as_long_as_the_cache_waits_and_blocks_nobody(cramped: Pipeline) -> None:
    short = [cramped.submit(p, sampling=s) for p, s in (request(i) for i in range(3))]
    longest = cramped.submit([70] * (LONGEST - 20), sampling={"ignore_eos": True})
    later = [cramped.submit(p, sampling=s) for p, s in (request(i) for i in range(3))]
    results = await asyncio.gather(*map(read, [*short, longest, *later]))
    assert [len(ids) for ids, _ in results] == [45, 45, 45, 20, 45, 45, 45]
    with pytest.raises(InvalidRequest):
        await read(cramped.submit([70] * LONGEST))
    assert (await read(cramped.submit(PROMPT, sampling={"max_tokens": 3})))[1] is not None


@pytest.mark.parametrize(
    ("sampling", "parameter"),
    [({"min_tokens": 2, "max_tokens": 5}, "min_tokens"), ({}, "max_tokens")],
    ids=["the end would be masked", "the end would never come"],
)
async def test_an_end_id_outside_the_head_costs_one_request_not_the_engine(
    cramped: Pipeline, sampling: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await read(cramped.submit(PROMPT, sampling=sampling))
    assert raised.value.parameter == parameter
    ids, usage = await read(cramped.submit(PROMPT, sampling={"max_tokens": 5}))
    assert (len(ids), usage.finish_reason) == (5, FinishReason.LENGTH)
    stop = {"temperature": 0.0, "stop_token_ids": [ids[0]]}
    assert await read(cramped.submit(PROMPT, sampling=stop))

"""Rows at a subscriber, on real vLLM, in every way that it runs a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omnistage import ARStageConfig, HiddenStates, Pipeline
from omnistage.errors import InvalidRequest
from tests.e2e.conftest import PROMPT, generate
from tests.e2e.engines import WAYS
from tests.e2e.inside import llm_of
from tests.e2e.rows import (
    GREEDY,
    Reader,
    check,
    check_nothing_left,
    close,
    make_llm,
    prompt,
    reading,
    run,
    worker_of,
)
from tests.omni_models.checkpoint import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session", scope="module", params=WAYS)
async def rows(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Pipeline]:
    """A pipeline whose consumers get rows."""
    config = ARStageConfig(model=checkpoint(models, "OmniRows"), processor=HiddenStates())
    llm = make_llm(config, *WAYS[request.param])
    try:
        parallel = llm.vllm_config.parallel_config
        assert parallel.distributed_executor_backend == WAYS[request.param][1]
        async with Pipeline(ar=config, decoder=None, llm=llm) as pipeline:
            worker = await worker_of(pipeline)
            assert worker.kinds[:3] == ["OmniCPUWorker", "PayloadWorkerMixin", "CPUWorker"]
            assert worker.overlaps == (WAYS[request.param][0] == "async")
            yield pipeline
    finally:
        llm.shutdown()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def reader(rows: Pipeline) -> AsyncIterator[Reader]:
    async with reading(rows) as taken:
        yield taken


@pytest.mark.mode(
    "synchronous and asynchronous scheduling",
    "ids and rows; forced on CPU, where vLLM turns the second off",
)
@pytest.mark.mode("uniprocess and multiprocess executor", "ids and rows")
@pytest.mark.mode("chunked prefill", "ids and rows")
async def test_every_row_comes_once_and_is_what_the_ids_were_sampled_from(
    rows: Pipeline, reader: Reader
) -> None:
    for length, tokens in [(5, 1), (5, 40), (48, 3), (120, 30)]:  # the last in three chunks
        asked = prompt(length, length)
        ids, own = await run(rows, reader, asked, max_tokens=tokens)
        reference = await generate(rows, asked, max_tokens=tokens, **GREEDY)
        assert ids == list(reference.token_ids)
        check(asked, ids, own)
    await check_nothing_left(rows)


async def test_rows_are_made_in_another_thread_only_where_outputs_are_awaited_in_one(
    rows: Pipeline, reader: Reader
) -> None:
    await run(rows, reader, PROMPT, max_tokens=5)
    worker = await worker_of(rows)
    awaited = llm_of(rows).vllm_config.parallel_config.distributed_executor_backend == "mp"
    expected = "WorkerAsyncOutputCopy" if worker.overlaps and awaited else "MainThread"
    assert worker.threads == [expected]


@pytest.mark.mode("preemption and resume", "ids and rows, each once")
async def test_preempted_requests_give_every_row_once(rows: Pipeline, reader: Reader) -> None:
    from prometheus_client import REGISTRY

    def preempted() -> float:
        samples = [s for m in REGISTRY.collect() for s in m.samples]
        return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")

    asked = [prompt(i) for i in range(6)]
    alone = [await run(rows, reader, p, max_tokens=45) for p in asked]
    before = preempted()
    together = await asyncio.gather(*(run(rows, reader, p, max_tokens=45) for p in asked))
    assert preempted() > before
    for p, (ids, own), (ids_alone, rows_alone) in zip(asked, together, alone, strict=True):
        assert ids == ids_alone
        check(p, ids, own)
        assert close(own, rows_alone)
    await check_nothing_left(rows)


@pytest.mark.mode("prefix cache", "rows: passed over, or served with `prefix_rows=True`")
async def test_a_prompt_that_the_cache_has_is_computed_again_for_its_rows(
    rows: Pipeline, reader: Reader
) -> None:
    asked = prompt(77, 100)
    first = await run(rows, reader, asked, max_tokens=5)
    await generate(rows, asked, max_tokens=2, **GREEDY)  # reads the cache
    again = await run(rows, reader, asked, max_tokens=5)
    check(asked, *again)
    assert close(again[1], first[1])
    with pytest.raises(InvalidRequest, match="cached prefix") as refused:
        await run(rows, reader, asked, max_tokens=5, skip_reading_prefix_cache=False)
    assert refused.value.parameter == "skip_reading_prefix_cache"


@pytest.mark.mode("abort at any point", "ids and rows")
async def test_an_abort_amid_a_crowd_costs_nobody_a_row(rows: Pipeline, reader: Reader) -> None:
    streams = [
        rows.submit(prompt(i, 60), sampling={**GREEDY, "max_tokens": 150}, subscribers=["rows"])
        for i in range(3)
    ]
    ended = [asyncio.ensure_future(stream.finished()) for stream in streams]
    crowd = [prompt(10 + i) for i in range(3)]
    running = [asyncio.ensure_future(run(rows, reader, p, max_tokens=45)) for p in crowd]
    for i, stream in enumerate(streams):
        async with asyncio.timeout(20):
            while len(reader.ids.get(stream.request_id, ())) < 1 + 3 * i:
                await asyncio.sleep(0.005)
        await stream.abort()
    for p, (ids, own) in zip(crowd, await asyncio.gather(*running), strict=True):
        check(p, ids, own)
    await asyncio.gather(*ended, return_exceptions=True)
    for i, stream in enumerate(streams):
        async with asyncio.timeout(20):
            await reader.end(stream.request_id).wait()
        own, ids = reader.rows(stream.request_id), reader.ids[stream.request_id]
        # Rows and ids of one step come together: each id has the row that it was sampled from.
        check(prompt(i, 60), ids, own)
    await check_nothing_left(rows)


async def test_for_a_request_that_nobody_consumes_no_row_is_taken(
    rows: Pipeline, reader: Reader
) -> None:
    """One without a consumer and one of somebody else's: alone, and beside one that has rows."""

    def others() -> list[Any]:
        return [
            rows.submit(prompt(1), sampling={**GREEDY, "max_tokens": 20}).finished(),
            generate(rows, prompt(2), max_tokens=20, **GREEDY),
        ]

    await check_nothing_left(rows)
    before = await worker_of(rows)
    await asyncio.gather(*others())
    assert (await worker_of(rows))[2:] == before[2:]
    (ids, own), *_ = await asyncio.gather(run(rows, reader, PROMPT, max_tokens=20), *others())
    check(PROMPT, ids, own)
    built = (await worker_of(rows)).built[len(before.built) :]
    assert len(set(built)) == 1
    assert len(built) == 20

"""Two engine cores behind one pipeline: every one's publisher is subscribed and serves requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from omnistage import Pipeline
from omnistage.errors import EngineDead, OmniStageError
from tests.e2e.conftest import ar_of
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(200)]

TEXTS = [f"This is number {number}." for number in ("one", "two", "three", "four", "five", "six")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    engine_args = {"data_parallel_size": 2}
    made = Pipeline.from_preset("talker", start_method="fork", engine_args=engine_args)
    async with made as running:
        yield running


@pytest.mark.mode("data parallelism", "two engine cores")
async def test_every_core_publishes_and_each_request_is_whole(pipeline: Pipeline) -> None:
    assert len(set(pipeline.endpoints)) == 2
    together = await asyncio.gather(*(pipeline.submit(t, seed=1).collect() for t in TEXTS))
    alone = [await pipeline.submit(t, seed=1).collect() for t in TEXTS]
    for one, other in zip(together, alone, strict=True):
        assert one.usage.output_tokens == other.usage.output_tokens
        assert len(one.pcm) == len(other.pcm) > 0
    (branch,) = branches_of(pipeline)
    subscriber = branch.decoder._subscriber
    assert subscriber is not None
    assert all(feed.reassembly.expected > 0 for feed in subscriber._feeds)
    assert subscriber.counts.lost == 0


async def test_an_abort_is_answered_by_every_core(pipeline: Pipeline) -> None:
    for text in TEXTS:
        async with pipeline.submit(text) as stream:
            await anext(aiter(stream))
        assert not len(ar_of(pipeline))
        assert not len(branches_of(pipeline)[0].decoder)


async def test_the_death_of_one_core_ends_the_stage(pipeline: Pipeline) -> None:
    control = ar_of(pipeline)._control
    assert control is not None
    streams = [pipeline.submit(text) for text in TEXTS]
    for stream in streams:
        await stream.__aenter__()
    os.kill(control.hellos[1].pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*(s.finished() for s in streams), return_exceptions=True)
    assert any(isinstance(outcome, EngineDead) for outcome in outcomes)
    assert all(isinstance(o, EngineDead) for o in outcomes if isinstance(o, OmniStageError))
    with pytest.raises(EngineDead):
        await pipeline.submit("Hello.").finished()

"""A thousand requests ended at random points, and what they leave behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from omnistage.errors import OmniStageError
from omnistage.pipeline import Pipeline
from tests.e2e.conftest import PROMPT, generate, read
from tests.e2e.inside import Published, count_alive, nothing_left

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

PER_REQUEST = ("Record", "_Open", "_Channel", "Event", "Request", "SamplingParams")
# Where a request is aborted: by then it was not admitted, queued, prefilling, decoding, or over.
POINTS = ("unstarted", "submitted", "soon", "later", "first chunk", "last chunk", "over")


async def abort_at(pipeline: Pipeline, point: str, random: random.Random) -> None:
    tokens = random.randrange(1, 30) if point in {"last chunk", "over"} else 900
    prompt = [1, 4, *(70 + random.randrange(100) for _ in range(random.randrange(1, 200))), 3]
    stream = pipeline.submit(prompt, sampling={"max_tokens": tokens, "ignore_eos": True})
    with contextlib.suppress(OmniStageError):
        if point == "unstarted":
            await stream.abort()
            return
        async with stream:
            if point == "submitted":
                return
            if point in {"soon", "later"}:
                await asyncio.sleep(random.random() * (0.02 if point == "soon" else 0.3))
            elif point == "first chunk":
                await anext(stream)
            elif point == "last chunk":
                async for chunk in stream:
                    if chunk.index >= tokens // 8:
                        break
            else:
                await read(stream)
    await stream.abort()


async def abort_many(pipeline: Pipeline, count: int, normal: int) -> None:
    seeded = random.Random(count)
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    reference = list((await generate(pipeline, PROMPT, **sampling)).token_ids)
    # Enough at a time that some wait for one of the 32 places.
    places = asyncio.Semaphore(64)

    async def one(i: int) -> None:
        async with places:
            await abort_at(pipeline, POINTS[i % len(POINTS)], seeded)

    # Not none: the engine was forked with pytest's log handler, which keeps what was logged in
    # earlier tests, tracebacks and all.
    before = {name: await count_alive(pipeline, name) for name in PER_REQUEST}
    async with nothing_left(pipeline):
        with Published(pipeline) as published:
            await asyncio.gather(*(one(i) for i in range(count)))
            streams = [pipeline.submit(PROMPT, sampling=sampling) for _ in range(normal)]
            results = await asyncio.gather(*map(read, streams))
        assert all(ids == reference for ids, _ in results)
        assert all(len(reasons) == 1 for reasons in published.terminals.values())
        assert set(published.starts.values()) == {1}
        # One that was aborted before its first step is started and ended by one update.
        assert set(published.starts) == set(published.terminals)
        assert all(published.terminals[s.request_id] == ["length"] for s in streams)
    after = {name: await count_alive(pipeline, name) for name in PER_REQUEST}
    assert after == before


async def test_210_aborts_at_random_points_leave_nothing(pipeline: Pipeline) -> None:
    await abort_many(pipeline, 210, 20)


@pytest.mark.slow
async def test_1000_aborts_at_random_points_leave_nothing(pipeline: Pipeline) -> None:
    await abort_many(pipeline, 1000, 100)

"""Payloads on real vLLM where something goes wrong, or several things are at work at once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage import ARStageConfig, HiddenStates, Pipeline
from omnistage.errors import EngineDead, PayloadError
from omnistage.worker import mixin
from tests.e2e.conftest import PROMPT
from tests.e2e.rows import (
    GREEDY,
    Reader,
    check,
    check_nothing_left,
    close,
    prompt,
    reading,
    run,
    running,
    workers_of,
)
from tests.e2e.test_conditioning import voice
from tests.e2e.test_cramped import CRAMPED
from tests.e2e.test_embeddings import embeddings
from tests.e2e.test_payload_modes import TWO, numbers, stage
from tests.omni_models.checkpoint import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def spoken(
    pipeline: Pipeline, reader: Reader, asked: list[int], given: Any, **sampling: Any
) -> tuple[list[int], np.ndarray, set[int]]:
    """A conditioned request's ids and rows, and which voices its model saw."""
    stream = pipeline.submit(
        asked,
        conditioning=None if given is None else {"voice": given},
        sampling={**GREEDY, "max_tokens": 12, **sampling},
        subscribers=["rows"],
    )
    await stream.finished()
    async with asyncio.timeout(20):
        await reader.end(stream.request_id).wait()
    said = numbers(reader, stream.request_id, "voices")
    return (
        reader.ids[stream.request_id],
        reader.rows(stream.request_id),
        {n for _, rows in said for row in rows for n in row},
    )


@TWO
async def test_cached_prefixes_are_those_of_the_same_conditioning(
    scheduling: str, executor: str, models: Path
) -> None:
    """What is computed behind half a conditioned block goes on where the cached half ends."""
    config = stage(models, "OmniConditioned", prefix_rows=True)
    async with running(config, scheduling, executor, num_gpu_blocks_override=60) as (
        pipeline,
        reader,
    ):
        asked = prompt(7, 100)
        block = np.random.default_rng(5).normal(0, 0.5, (48, 256)).astype(np.float32)
        block[0, 0] = 0.3
        given: list[Any] = [voice(100), voice(200), None, block]
        fresh = {"skip_reading_prefix_cache": True}
        alone = [await spoken(pipeline, reader, asked, v, **fresh) for v in given]
        assert [voices for *_, voices in alone] == [{100}, {200}, {-1}, {300}]
        assert len({tuple(ids) for ids, *_ in alone}) == 4
        together = await asyncio.gather(*(spoken(pipeline, reader, asked, v) for v in 2 * given))
        # Of this one a block of 32 is cached, and the positions behind it are conditioned too.
        half = [*asked[:32], *prompt(9, 50)]
        alone.append(await spoken(pipeline, reader, half, block, **fresh))
        together.insert(4, await spoken(pipeline, reader, half, block))
        for (ids, rows, voices), reference in zip(together, alone + alone[:4], strict=True):
            assert (ids, voices) == (reference[0], reference[2])
            assert close(rows, reference[1])
        await check_nothing_left(pipeline)


@pytest.mark.parametrize(
    ("scheduling", "executor", "ranks", "length"),
    [("sync", "uni", 1, 103), ("async", "mp", 2, 104)],
    ids=["preprocess", "postprocess"],
)
async def test_an_error_of_one_rank_leaves_no_other_waiting(
    scheduling: str,
    executor: str,
    ranks: int,
    length: int,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that takes rows fails its step's requests; one of a model's hook ends the engine."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    async with (
        asyncio.timeout(50),
        running(stage(models, "OmniRaises"), scheduling, executor, tensor_parallel_size=ranks) as (
            pipeline,
            reader,
        ),
    ):
        with pytest.raises(PayloadError, match="declares 'codes' and returned NoneType"):
            await run(pipeline, reader, [1001, *PROMPT], max_tokens=190)
        check(PROMPT, *await run(pipeline, reader, PROMPT, max_tokens=20))
        await check_nothing_left(pipeline)
        other = asyncio.ensure_future(run(pipeline, reader, PROMPT, max_tokens=200))
        began = time.monotonic()
        for asked in (run(pipeline, reader, prompt(1, length), max_tokens=9), other):
            with pytest.raises(EngineDead):
                await asked
        assert time.monotonic() - began < 10


async def test_a_slow_background_keeps_each_steps_rows_and_their_order(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are preempted, reused and hit while the rows of earlier steps still wait."""
    build = vars(mixin)["build"]

    def slowly(taken: Any, request_ids: Any) -> Any:
        time.sleep(random.random() * 0.02)
        return build(taken, request_ids)

    monkeypatch.setitem(vars(mixin), "build", slowly)  # in the worker: it is forked
    config = stage(models, "OmniPostprocess", prefix_rows=True)
    async with running(config, "async", "mp") as (pipeline, reader):
        shared = prompt(50, 64)
        asked = [[*shared[: 32 * (i % 3)], *prompt(i, 30 + i)] for i in range(8)]
        await asyncio.gather(*(run(pipeline, reader, p, max_tokens=40) for p in asked))
        (worker,) = await workers_of(pipeline)
        assert worker.threads == ["WorkerAsyncOutputCopy"]
        await check_nothing_left(pipeline)


async def test_64_requests_of_two_priorities_and_one_external_id(models: Path) -> None:
    config = stage(models, "OmniPostprocess", omni_pooler_payload_include_hidden=True)
    crowded = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}
    async with running(config, "async", "mp", scheduling_policy="priority", **crowded) as (
        pipeline,
        reader,
    ):
        asked = [prompt(i % 7, 30 + i) if i % 9 else [68 + i] for i in range(64)]
        streams = [
            pipeline.submit(
                p,
                sampling={**GREEDY, "max_tokens": 1 + i % 40},
                subscribers=["rows"],
                priority=i % 2,
                request_id="same",
            )
            for i, p in enumerate(asked)
        ]
        await asyncio.gather(*(stream.finished() for stream in streams))
        for p, stream in zip(asked, streams, strict=True):
            name = stream.request_id
            async with asyncio.timeout(20):
                await reader.end(name).wait()
            check(p, reader.ids[name], reader.rows(name))
            reader.check_codes(name, p)
            given = [*p, *reader.ids[name][:-1]]
            assert numbers(reader, name, "sums") == [
                (q, [[q, sum(given[: q + 1])]]) for q in range(len(p) - 1, len(given))
            ]
        await check_nothing_left(pipeline)


async def test_a_prompt_of_embeddings_has_the_rows_of_its_ids(models: Path) -> None:
    """Preempted, and with cached prefixes."""
    config = stage(
        models, "OmniTokensOnly", omni_pooler_payload_include_hidden=True, prefix_rows=True
    )
    async with running(config, "async", "mp", enable_prompt_embeds=True) as (pipeline, reader):
        asked = [prompt(i % 3, 60 + 10 * (i % 3)) for i in range(6)]
        alone = [
            await run(
                pipeline, reader, p, has_codes=False, max_tokens=40, skip_reading_prefix_cache=True
            )
            for p in asked[:3]
        ]
        given: list[Any] = [*asked, *map(embeddings, asked)]
        done = await asyncio.gather(
            *(run(pipeline, reader, p, has_codes=False, max_tokens=40) for p in given)
        )
        for (ids, rows), reference in zip(done, 4 * alone, strict=True):
            assert ids == reference[0]
            assert close(rows, reference[1])
        await check_nothing_left(pipeline)


async def test_two_engine_cores_give_each_row_once(models: Path) -> None:
    config = stage(models, "OmniRows", prefix_rows=True)
    async with running(config, "async", "mp", data_parallel_size=2) as (pipeline, reader):
        asked = [prompt(i % 5, 40 + 10 * (i % 5)) for i in range(12)]
        done = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=30) for p in asked))
        for p, (ids, rows) in zip(asked, done, strict=True):
            check(p, ids, rows)


@pytest.mark.mode("start method `spawn`", "ids and rows")
async def test_a_spawned_engine_gives_rows_and_keeps_what_the_user_configured(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # or it would spawn a worker as well
    theirs = {"theirs": 1, "omnistage_payload": {"include_hidden": False}}
    args = {**CRAMPED, "additional_config": theirs, "distributed_executor_backend": "uni"}
    config = ARStageConfig(
        model=checkpoint(models, "OmniRows"),
        processor=HiddenStates(),
        engine_args=args,
        start_method="spawn",
    )
    async with (
        asyncio.timeout(58),
        Pipeline(ar=config, decoder=None) as pipeline,
        reading(pipeline) as reader,
    ):
        asked = [prompt(i, 40 + 10 * i) for i in range(4)]
        done = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=30) for p in asked))
        for p, (ids, rows) in zip(asked, done, strict=True):
            check(p, ids, rows)

"""Payloads on real vLLM in the modes that need an engine of their own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import generate_latest
from vllm.sampling_params import StructuredOutputsParams

from omnistage import ARStageConfig, HiddenStates, Pipeline, TokenUpdates
from omnistage.errors import ConfigError, PayloadError
from tests.e2e.conftest import CHECKPOINT, PROMPT, generate, wait_until_idle
from tests.e2e.engines import WAYS
from tests.e2e.inside import llm_of
from tests.e2e.rows import (
    GREEDY,
    Reader,
    check,
    check_nothing_left,
    close,
    prompt,
    run,
    running,
    worker_of,
    workers_of,
)
from tests.omni_models.checkpoint import checkpoint, draft_checkpoint
from tests.omni_models.connector import COLLECTIVES, watched

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

# `make test` runs the two that differ most.
ALL = pytest.mark.parametrize(
    ("scheduling", "executor"),
    [
        pytest.param(*way, marks=() if name in {"sync-uni", "async-mp"} else pytest.mark.slow)
        for name, way in WAYS.items()
    ],
    ids=list(WAYS),
)
TWO = pytest.mark.parametrize(
    ("scheduling", "executor"), [("sync", "uni"), ("async", "mp")], ids=["inline", "background"]
)
TWO_OF_MP = pytest.mark.parametrize(
    ("scheduling", "executor"), [("sync", "mp"), ("async", "mp")], ids=["inline", "background"]
)
REPEATS = [1, 4, *[70, 80, 90] * 6, 3]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def stage(models: Path, name: str, **changes: Any) -> ARStageConfig:
    return ARStageConfig(
        **{"model": checkpoint(models, name), "processor": HiddenStates(), **changes}
    )


def numbers(reader: Reader, request_id: str, key: str) -> list[tuple[int, list[list[int]]]]:
    """A key's tensors: the position of each one's first row, and its rows."""
    tensors = reader.others.get(request_id, {}).get(key, [])
    assert {t.dtype for t in tensors} <= {"int64"}
    return [
        (t.first_row, np.frombuffer(t.data, np.int64).reshape(t.shape).tolist()) for t in tensors
    ]


# vLLM's ngram proposer, in the engine, which is forked with the filters of this test.
@pytest.mark.mode(
    "speculative decoding",
    "ids and rows; ngram, and a draft model also under asynchronous scheduling",
)
@pytest.mark.filterwarnings("ignore:(?s).*type 'reflected list' found")
@pytest.mark.parametrize(
    ("scheduling", "executor", "method"),
    [
        ("sync", "uni", "ngram"),
        pytest.param("sync", "mp", "ngram", marks=pytest.mark.slow),
        pytest.param("sync", "mp", "draft_model", marks=pytest.mark.slow),
        pytest.param("async", "uni", "draft_model", marks=pytest.mark.slow),
        ("async", "mp", "draft_model"),
    ],
)
async def test_drafts_that_were_rejected_have_no_rows(
    scheduling: str, executor: str, method: str, models: Path
) -> None:
    drafts: Any = NGRAM
    if method == "draft_model":
        drafts = {"method": method, "model": draft_checkpoint(models), "num_speculative_tokens": 3}
    config = stage(models, "OmniRows")
    async with running(
        config, scheduling, executor, speculative_config=drafts, num_gpu_blocks_override=12
    ) as (pipeline, reader):
        asked = [REPEATS, prompt(1), prompt(2, 100), prompt(3, 90)]
        done = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=80) for p in asked))
        for p, (ids, rows) in zip(asked, done, strict=True):
            check(p, ids, rows)
            reference = await generate(pipeline, p, max_tokens=80, **GREEDY)
            assert ids == list(reference.token_ids)
        # Some drafts were accepted, and some were not.
        assert 4 * 80 / 4 < sum(reader.steps.values()) < 4 * 80
        await check_nothing_left(pipeline)


async def test_an_engine_that_cannot_give_rows_does_not_start(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = stage(models, "OmniPostprocess")
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=r"OmniPostprocess .* loads blocks"):
        async with running(config, "async", "mp", kv_transfer_config=transfer):
            pass
    assert not list(tmp_path.glob("omni-*"))


@pytest.mark.mode("structured output", "ids and rows")
@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated")  # how vLLM calls xgrammar
@ALL
async def test_rows_of_structured_output_are_those_of_the_ids(
    scheduling: str, executor: str, models: Path
) -> None:
    model = checkpoint(models, "OmniRows", bytewise=True)
    config = ARStageConfig(model=model, processor=HiddenStates())
    async with running(config, scheduling, executor, skip_tokenizer_init=False) as (
        pipeline,
        reader,
    ):
        grammar = StructuredOutputsParams(regex="[0-9]{19}x")
        (ids, rows), (free, free_rows) = await asyncio.gather(
            run(pipeline, reader, PROMPT, max_tokens=20, structured_outputs=grammar),
            run(pipeline, reader, prompt(4), max_tokens=40),
        )
        tokenizer: Any = llm_of(pipeline).get_tokenizer()
        assert re.fullmatch("[0-9]{19}x", tokenizer.decode(ids))
        assert len(rows) == len(PROMPT) + len(ids) - 1
        check(prompt(4), free, free_rows)
        await check_nothing_left(pipeline)


@TWO
async def test_a_model_that_keeps_hidden_states_sends_its_other_outputs(
    scheduling: str, executor: str, models: Path
) -> None:
    async with running(stage(models, "OmniTokensOnly"), scheduling, executor) as (
        pipeline,
        reader,
    ):
        asked = [prompt(i, 40 + 20 * i) for i in range(5)]
        done = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=45) for p in asked))
        assert [len(rows) for _, rows in done] == [0] * 5
        threads = (await worker_of(pipeline)).threads
        assert threads == ["WorkerAsyncOutputCopy" if scheduling == "async" else "MainThread"]
        await check_nothing_left(pipeline)


@TWO
async def test_rows_of_a_prompt_cross_once_and_whole_whatever_the_chunks(
    scheduling: str, executor: str, models: Path
) -> None:
    async with running(stage(models, "OmniPrefill"), scheduling, executor) as (pipeline, reader):
        lengths = [1, 47, 48, 49, 120, 60]  # chunks of 48; and they do not all fit at once
        asked = [prompt(i, length) if length > 3 else [7] for i, length in enumerate(lengths)]
        streams = [
            pipeline.submit(p, sampling={**GREEDY, "max_tokens": 60}, subscribers=["rows"])
            for p in asked
        ]
        await asyncio.gather(*(stream.finished() for stream in streams))
        for p, stream in zip(asked, streams, strict=True):
            async with asyncio.timeout(20):
                await reader.end(stream.request_id).wait()
            assert numbers(reader, stream.request_id, "prompt") == [
                (0, [list(pair) for pair in enumerate(p)])
            ]
            assert len(reader.ids[stream.request_id]) == 60  # of steps that had no payload
        await check_nothing_left(pipeline)
        # Behind its prompt a request has nothing to send, and nothing is made for it.
        before = len((await worker_of(pipeline)).built)
        await pipeline.submit(
            PROMPT, sampling={**GREEDY, "max_tokens": 30}, subscribers=["rows"]
        ).finished()
        assert len((await worker_of(pipeline)).built) == before + 1


@TWO
async def test_a_models_own_state_goes_from_step_to_step_also_for_those_who_want_nothing(
    scheduling: str, executor: str, models: Path
) -> None:
    """Preempted requests begin anew; a request's values are those of its own ids and no other's."""
    async with running(stage(models, "OmniPostprocess"), scheduling, executor) as (
        pipeline,
        reader,
    ):
        asked = [prompt(i, 40 + 5 * i) for i in range(5)]
        streams = [
            pipeline.submit(p, sampling={**GREEDY, "max_tokens": 60}, subscribers=["rows"])
            for p in asked
        ]
        others = [generate(pipeline, prompt(40), max_tokens=30, **GREEDY)]
        await asyncio.gather(*(stream.finished() for stream in streams), *others)
        for p, stream in zip(asked, streams, strict=True):
            async with asyncio.timeout(20):
                await reader.end(stream.request_id).wait()
            given = [*p, *reader.ids[stream.request_id]]
            sums = [
                (position, [[position, sum(given[: position + 1])]])
                for position in range(len(p) - 1, len(given) - 1)
            ]
            assert numbers(reader, stream.request_id, "sums") == sums
        await check_nothing_left(pipeline)
        # Nobody wants anything: nothing is taken, and the model's work goes on.
        before = await worker_of(pipeline)
        await generate(pipeline, prompt(41), max_tokens=20, **GREEDY)
        assert (await worker_of(pipeline)).looked == before.looked
        await check_nothing_left(pipeline)


@TWO
async def test_outputs_that_are_not_what_is_declared_fail_their_step_alone(
    scheduling: str, executor: str, models: Path
) -> None:
    async with running(stage(models, "OmniBroken"), scheduling, executor) as (pipeline, reader):
        for first, complaint in [
            (1000, "OutputError: OmniBroken returned 'surprise', which its omni_outputs does not"),
            (1001, "OutputError: OmniBroken declares 'codes' and returned NoneType"),
            (1002, r"OutputError: OmniBroken returned 'codes' of shape \[47, 2\]"),
        ]:
            stream = pipeline.submit(
                [first, *prompt(3)[1:]],
                sampling={**GREEDY, "max_tokens": 190},
                subscribers=["rows"],
            )
            with pytest.raises(PayloadError, match=complaint):
                await stream.finished()
            async with asyncio.timeout(10):
                await reader.end(stream.request_id).wait()
            assert complaint[:20] in (reader.errors[stream.request_id] or "")
        # One that ends by itself before ours arrives; the subscriber knows.
        stream = pipeline.submit(
            [1000, *PROMPT], sampling={**GREEDY, "max_tokens": 1}, subscribers=["rows"]
        )
        with contextlib.suppress(PayloadError):
            await stream.finished()
        async with asyncio.timeout(10):
            await reader.end(stream.request_id).wait()
        assert reader.errors[stream.request_id]
        check(PROMPT, *await run(pipeline, reader, PROMPT, max_tokens=20))
        await check_nothing_left(pipeline)


@TWO
async def test_rows_cross_as_they_were_whatever_the_model_does_with_their_memory(
    scheduling: str, executor: str, models: Path
) -> None:
    async with running(stage(models, "OmniViews"), scheduling, executor) as (pipeline, reader):
        asked = [prompt(i, 40 + 20 * i) for i in range(5)]
        streams = [
            pipeline.submit(p, sampling={**GREEDY, "max_tokens": 45}, subscribers=["rows"])
            for p in asked
        ]
        await asyncio.gather(*(stream.finished() for stream in streams))
        for p, stream in zip(asked, streams, strict=True):
            async with asyncio.timeout(20):
                await reader.end(stream.request_id).wait()
            given = list(enumerate([*p, *reader.ids[stream.request_id][:-1]]))
            got = reader.others[stream.request_id]
            assert sum(tensor.shape[0] for tensor in got.pop("none")) == len(given)
            for key, tensors in got.items():
                exact = key not in ("static", "old", "strided")
                assert {tensor.dtype for tensor in tensors} == {key if exact else "int64"}
                rows = [
                    torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
                    for tensor in tensors
                ]
                expected = [n % 2 if exact else n for pair in given for n in pair]
                assert torch.cat([row.long() for row in rows]).tolist() == expected
        await check_nothing_left(pipeline)


@TWO
async def test_a_reset_of_the_prefix_cache_amid_running_requests_costs_no_row(
    scheduling: str, executor: str, models: Path
) -> None:
    """It preempts all, and drops what is in flight; some are aborted meanwhile."""
    config = stage(models, "OmniRows", prefix_rows=True)
    async with running(config, scheduling, executor, num_gpu_blocks_override=20) as (
        pipeline,
        reader,
    ):
        llm = llm_of(pipeline)
        shared = prompt(50, 64)
        asked = [[*shared[: 32 * (i % 3)], *prompt(i, 30 + i)] for i in range(8)]
        streams = [
            pipeline.submit(p, sampling={**GREEDY, "max_tokens": 150}, subscribers=["rows"])
            for p in asked[:4]
        ]
        ended = [asyncio.ensure_future(stream.finished()) for stream in streams]
        runs = [asyncio.ensure_future(run(pipeline, reader, p, max_tokens=60)) for p in asked]
        for stream in streams:
            async with asyncio.timeout(20):
                while stream.request_id not in reader.ids:
                    await asyncio.sleep(0.005)
            await llm.reset_prefix_cache(reset_running_requests=True)
            await asyncio.sleep(0.03)
            await stream.abort()
            await llm.reset_prefix_cache(reset_running_requests=True)
        for p, (ids, rows) in zip(asked, await asyncio.gather(*runs), strict=True):
            check(p, ids, rows)
        await asyncio.gather(*ended, return_exceptions=True)
        await check_nothing_left(pipeline)


@pytest.mark.mode("prefix cache", "")
@ALL
async def test_rows_of_cached_prefixes_are_those_that_were_computed(
    scheduling: str, executor: str, models: Path
) -> None:
    """Each prompt first with the prefix cache passed over, which is the answer to compare with."""
    config = stage(models, "OmniRows", prefix_rows=True)
    async with running(config, scheduling, executor, num_gpu_blocks_override=40) as (
        pipeline,
        reader,
    ):
        llm = llm_of(pipeline)

        async def hits() -> int:
            text = generate_latest().decode()
            counts = re.findall(r"vllm:prefix_cache_hits_total\{[^}]*\} ([0-9.e+]+)", text)
            return int(sum(map(float, counts)))

        asked = prompt(77, 130)
        ids, computed = await run(
            pipeline, reader, asked, max_tokens=40, skip_reading_prefix_cache=True
        )
        check(asked, ids, computed)

        # It has stored them for who comes next: the same bits.
        before = await hits()
        again, rows = await run(pipeline, reader, asked, max_tokens=40)
        assert await hits() == before + 128
        assert again == ids
        assert rows[:128].tobytes() == computed[:128].tobytes()
        assert close(rows, computed)

        # A longer prompt, that goes on with what was sampled: rows of decode steps.
        longer = [*asked, *ids[:35], *prompt(5, 20)]
        reference = await run(
            pipeline, reader, longer, max_tokens=20, skip_reading_prefix_cache=True
        )
        before = await hits()
        once = await run(pipeline, reader, longer, max_tokens=20, skip_reading_prefix_cache=False)
        assert await hits() > before
        assert once[0] == reference[0]
        assert close(once[1], reference[1])

        # Of a request that nobody consumed, and of one that is computed in the same step.
        texts = [prompt(9, 100), prompt(10, 100)]
        await asyncio.gather(*(generate(pipeline, p, max_tokens=4, **GREEDY) for p in texts))
        fresh = prompt(11, 100)
        before = await hits()
        done = await asyncio.gather(
            *(run(pipeline, reader, p, max_tokens=10) for p in (*texts, fresh, fresh, fresh))
        )
        assert await hits() >= before + 2 * 96
        for p, (got, own) in zip((*texts, fresh, fresh, fresh), done, strict=True):
            check(p, got, own)
        assert len({own[:96].tobytes() for _, own in done[2:]}) == 1

        # After a reset nothing is hit, and what is stored then is another's.
        async with asyncio.timeout(5):
            while not await llm.reset_prefix_cache():
                await asyncio.sleep(0.02)
        before = await hits()
        for p in (asked, prompt(12, 120), asked):
            check(p, *await run(pipeline, reader, p, max_tokens=30))
        assert await hits() == before + 128
        await check_nothing_left(pipeline)


@TWO
async def test_rows_of_cached_prefixes_with_blocks_for_two_and_a_half_requests(
    scheduling: str, executor: str, models: Path
) -> None:
    """Blocks are freed, preempted, hit and handed to others all the time."""
    config = stage(models, "OmniRows", prefix_rows=True)
    async with running(config, scheduling, executor) as (pipeline, reader):
        shared = prompt(50, 64)
        asked = [[*shared[: 32 * (i % 3)], *prompt(i, 40 + i)] for i in range(12)]
        done = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=60) for p in asked))
        for p, (ids, rows) in zip(asked, done, strict=True):
            check(p, ids, rows)
        for i in range(3):
            alone = await run(pipeline, reader, asked[i], max_tokens=60)
            assert alone[0] == done[i][0]
            assert close(alone[1], done[i][1])
        await check_nothing_left(pipeline)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        ({"scheduling_policy": "priority"}, "priority policy"),
        ({"speculative_config": NGRAM}, "with speculation"),
    ],
)
async def test_an_engine_whose_cached_prefixes_cannot_be_followed_is_refused(
    changes: Any, words: str, models: Path
) -> None:
    config = stage(models, "OmniRows", prefix_rows=True)
    with pytest.raises(ConfigError, match=f"prefix_rows=True, and .*{words}"):
        async with running(config, "sync", "uni", **changes):
            pass


async def test_bfloat16_rows_of_a_mixed_batch_are_those_of_each_request_alone(
    models: Path,
) -> None:
    """Prefills in chunks beside decodes; codes, which are integers, are equal."""
    config = stage(models, "OmniRows")
    async with running(config, "sync", "uni", dtype="bfloat16") as (pipeline, reader):
        reader.dtype = "bfloat16"
        asked = [prompt(i, length) for i, length in enumerate([120, 20, 75, 33, 50, 90])]
        alone = [await run(pipeline, reader, p, max_tokens=12) for p in asked]
        together = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=12) for p in asked))
        for p, one, other in zip(asked, alone, together, strict=True):
            # Up to where another batch has rounded to another id.
            same = next(
                (i for i, (a, b) in enumerate(zip(one[0], other[0], strict=True)) if a != b), 12
            )
            rows = len(p) + max(same - 1, 0)
            scale = np.abs(one[1][:rows]).max()
            assert np.abs(one[1][:rows] - other[1][:rows]).max() <= 1e-2 * scale
        await check_nothing_left(pipeline)


async def test_hidden_states_that_are_kept_leave_the_stock_worker_and_the_ids() -> None:
    config = ARStageConfig(
        model=str(CHECKPOINT),
        processor=HiddenStates(),
        omni_pooler_payload_include_hidden=False,
    )
    from tests.e2e.rows import make_llm, reading

    llm = make_llm(config, "sync", "uni")
    try:
        parallel = llm.vllm_config.parallel_config
        assert parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
        async with (
            Pipeline(ar=config, decoder=None, llm=llm) as pipeline,
            reading(pipeline) as reader,
        ):
            ids, rows = await run(pipeline, reader, PROMPT, has_codes=False, max_tokens=20)
            assert len(ids) == 20
            assert rows.size == 0
    finally:
        llm.shutdown()


@pytest.mark.mode("tensor parallelism", "two ranks; ids and rows")
@pytest.mark.mode("KV connector", "`kv_producer` where rows are wanted")
@TWO_OF_MP
async def test_of_two_tensor_parallel_ranks_one_gives_each_row_once(
    scheduling: str, executor: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a KV connector, of which vLLM collects something from every rank.

    A collective in another thread than the main one would meet the other rank's next one, and one
    of the two would wait for ever.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers may have one core
    for owner, name in COLLECTIVES:  # in the workers too: they are forked
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    transfer = {
        "kv_connector": "NothingConnector",
        "kv_connector_module_path": "tests.omni_models.connector",
        "kv_role": "kv_producer",
    }
    config = stage(models, "OmniPostprocess", omni_pooler_payload_include_hidden=True)
    async with (
        asyncio.timeout(60),
        running(
            config, scheduling, executor, tensor_parallel_size=2, kv_transfer_config=transfer
        ) as (pipeline, reader),
    ):
        asked = [prompt(i, 40 + 30 * i) for i in range(4)]
        done = await asyncio.gather(*(run(pipeline, reader, p, max_tokens=30) for p in asked))
        for p, (ids, rows) in zip(asked, done, strict=True):
            check(p, ids, rows)
        first, second = await workers_of(pipeline)
        assert (bool(first.built), bool(second.built)) == (True, False)
        for worker in (first, second):
            assert worker.called == {"collective": ["MainThread"], "connector": ["MainThread"]}
        assert first.threads == ["WorkerAsyncOutputCopy" if scheduling == "async" else "MainThread"]
        await check_nothing_left(pipeline)


@pytest.mark.mode("pipeline parallelism", "two ranks; ids and rows")
@pytest.mark.parametrize(
    ("name", "scheduling"), [("OmniRows", "sync"), ("Talker", "sync"), ("OmniPostprocess", "async")]
)
async def test_the_last_pipeline_stage_gives_each_row_once(
    name: str, scheduling: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if name == "Talker":  # ids alone: vLLM's own model, and a worker that can run it so
        config = ARStageConfig(model=str(CHECKPOINT), processor=TokenUpdates())
    else:
        config = stage(models, name, omni_pooler_payload_include_hidden=True)
    async with (
        asyncio.timeout(50),
        running(config, scheduling, "mp", pipeline_parallel_size=2) as (pipeline, reader),
    ):
        asked = [prompt(i, 40 + 30 * i) for i in range(3)]
        codes = name != "Talker"
        done = await asyncio.gather(
            *(run(pipeline, reader, p, has_codes=codes, max_tokens=30) for p in asked)
        )
        for p, (ids, rows) in zip(asked, done, strict=True):
            if codes:
                check(p, ids, rows)
            reference = await generate(pipeline, p, max_tokens=30, **GREEDY)
            assert ids == list(reference.token_ids)
        assert [bool(worker.built) for worker in await workers_of(pipeline)] == [False, codes]
        await wait_until_idle(pipeline)

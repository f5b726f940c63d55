"""Rows of hidden states at a subscriber, on real vLLM, in every way that it runs a step.

Each engine has a KV cache for two and a half requests and prefills in chunks of 48 ids. The model's
embeddings are its head too, so that a row says itself which id a greedy request sampled from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from vllm.v1.engine.core import EngineCore

import omnistage
from omnistage import ARStageConfig, HiddenStates, Pipeline, subscribe
from omnistage.errors import ConfigError, InvalidRequest, UpdatesLost
from omnistage.request import TokenUpdate
from omnistage.worker import mixin
from omnistage.worker.build import build_payload
from tests.e2e.conftest import CHECKPOINT, PROMPT, ar_config, generate, wait_until_idle
from tests.e2e.inside import llm_of, report
from tests.e2e.test_cramped import CRAMPED

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SIZE = 256
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
WAYS = {f"{s}-{e}": (s, e) for s in ("sync", "async") for e in ("uni", "mp")}


class Workers(NamedTuple):
    """What an engine's worker says of itself.

    Args:
        kinds: Its classes.
        wanted: The requests whose rows it still thinks are wanted.
        built: Whose rows it has taken, a name for each step.
        looked: How often it looked whether there are any.
        overlaps: Whether its outputs come later, in another thread where it is another process.
    """

    kinds: list[str]
    wanted: list[str]
    built: list[str]
    looked: int
    overlaps: bool


_built: list[str] = []
_looks: list[int] = []


def _build_and_note(executed: Any, wanted: Any) -> Any:
    if any(name.startswith("breaks-") for name in executed.request_ids):
        raise RuntimeError("on purpose")
    payload = build_payload(executed, wanted)
    _looks.append(1)
    _built.extend(() if payload is None else payload.request_ids)
    return payload


def _describe(worker: Any) -> tuple[Any, ...]:
    worker = getattr(worker, "worker", None) or worker
    kinds = [kind.__qualname__ for kind in type(worker).__mro__]
    overlaps = worker.model_runner.use_async_scheduling
    return kinds, sorted(worker._omni_wanted), list(_built), len(_looks), overlaps


def _ask_workers(self: Any) -> Any:
    return self.model_executor.collective_rpc(_describe)


# Engines that are forked after this module was imported have it, and so have their workers.
vars(mixin)["build_payload"] = _build_and_note
EngineCore.omnistage_workers = _ask_workers  # type: ignore[attr-defined]


async def worker_of(pipeline: Pipeline) -> Workers:
    """The engine's only worker."""
    (answer,) = await llm_of(pipeline).engine_core.call_utility_async("omnistage_workers")
    return Workers(*answer)


def make_llm(config: ARStageConfig, scheduling: str, executor: str, **changes: Any) -> Any:
    """An engine attached to a stage; vLLM's CPU platform offers neither way by itself."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with pytest.MonkeyPatch.context() as patch:
        if executor == "uni":
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        args = {**CRAMPED, "distributed_executor_backend": executor, **changes}
        vllm_config = AsyncEngineArgs(model=str(CHECKPOINT), **args).create_engine_config()
        vllm_config.scheduler_config.async_scheduling = scheduling == "async"
        omnistage.attach(vllm_config, config)
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        # vLLM's ngram proposer is numba's, whose default threads hang in a forked worker.
        patch.setenv("NUMBA_THREADING_LAYER", "workqueue")
        patch.setenv("NUMBA_NUM_THREADS", "1")
        return AsyncLLM.from_vllm_config(vllm_config)


@pytest_asyncio.fixture(loop_scope="session", scope="module", params=WAYS)
async def rows(request: pytest.FixtureRequest) -> AsyncIterator[Pipeline]:
    """A pipeline whose consumers get rows."""
    config = ARStageConfig(model=str(CHECKPOINT), processor=HiddenStates())
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


class Reader:
    """What a subscriber received, request by request, checked as it comes."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self._rows: dict[str, list[np.ndarray]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.errors: dict[str, str | None] = {}

    def take(self, update: TokenUpdate) -> None:
        ids = self.ids.setdefault(update.request_id, [])
        assert update.position == len(ids)
        ids.extend(update.ids)
        for name, tensor in update.tensors.items():
            assert (name, tensor.dtype, tensor.shape[1:]) == ("hidden", "float32", (SIZE,))
            taken = self._rows.setdefault(update.request_id, [])
            assert tensor.first_row == sum(map(len, taken))
            taken.append(np.frombuffer(tensor.data, np.float32).reshape(tensor.shape))
        if update.terminal is not None:
            self.errors[update.request_id] = update.terminal.kind
            self.end(update.request_id).set()

    def end(self, request_id: str) -> asyncio.Event:
        return self.ended.setdefault(request_id, asyncio.Event())

    def rows(self, request_id: str) -> np.ndarray:
        """All of a request's rows, [rows, hidden size]."""
        return np.concatenate(self._rows.get(request_id, [np.zeros((0, SIZE), np.float32)]))


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def reader(rows: Pipeline) -> AsyncIterator[Reader]:
    taken = Reader()

    async def read() -> None:
        async for update in subscription:
            taken.take(update)

    async with subscribe(rows.endpoints, subscriber="rows") as subscription:
        reading = asyncio.create_task(read())
        yield taken
        await subscription.aclose()
        await reading


async def run(
    pipeline: Pipeline, reader: Reader, prompt: Sequence[int], **sampling: Any
) -> tuple[list[int], np.ndarray]:
    """A request's ids and rows."""
    stream = pipeline.submit(prompt, sampling={**GREEDY, **sampling}, subscribers=["rows"])
    await stream.finished()
    async with asyncio.timeout(20):
        await reader.end(stream.request_id).wait()
    return reader.ids[stream.request_id], reader.rows(stream.request_id)


def prompt(i: int, length: int = 54) -> list[int]:
    return [1, 4, *(68 + (i * 11 + k) % 100 for k in range(length - 3)), 3]


def head() -> np.ndarray:
    """The model's embeddings, which are its head, [vocabulary, hidden size]."""
    (file,) = CHECKPOINT.glob("*.safetensors")
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    info = json.loads(raw[8:start])["model.embed_tokens.weight"]
    assert info["dtype"] == "BF16"
    begin, end = info["data_offsets"]
    halves = np.frombuffer(raw[start + begin : start + end], np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(info["shape"])


def check(prompt: Sequence[int], ids: Sequence[int], rows: np.ndarray) -> None:
    """There is a row for every position but the last id's, and each leads to the id behind it."""
    assert len(rows) == len(prompt) + len(ids) - 1
    assert (rows[len(prompt) - 1 :] @ head().T).argmax(axis=1).tolist() == list(ids)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether rows are those of the same computation, in batches of another shape."""
    return one.shape == other.shape and np.abs(one - other).max() <= 1e-4 * np.abs(other).max()


async def check_nothing_left(pipeline: Pipeline) -> None:
    await wait_until_idle(pipeline)
    counts = await report(pipeline)
    assert not {k: counts[k] for k in ("requests", "records", "names", "open") if counts[k]}
    # vLLM tells its workers of ends with the next step: this one's is the end of the one before.
    async with asyncio.timeout(5):
        while True:
            if not (await worker_of(pipeline)).wanted:
                return
            await asyncio.sleep(0.02)


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


async def test_rows_that_cannot_be_taken_fail_their_requests_and_the_engine_lives(
    rows: Pipeline, reader: Reader
) -> None:
    for tokens in (1, 190):
        stream = rows.submit(
            prompt(3),
            sampling={**GREEDY, "max_tokens": tokens},
            subscribers=["rows"],
            request_id="breaks",
        )
        if tokens == 1:  # vLLM's own end may come before ours; the subscriber knows
            with contextlib.suppress(UpdatesLost):
                await stream.finished()
        else:
            with pytest.raises(UpdatesLost, match=r"rows 0 to 53 .* vLLM's worker"):
                await stream.finished()
        async with asyncio.timeout(10):
            await reader.end(stream.request_id).wait()
        assert reader.errors[stream.request_id] == "UpdatesLost"
        assert reader.rows(stream.request_id).size == 0
    check(PROMPT, *await run(rows, reader, PROMPT, max_tokens=20))
    await check_nothing_left(rows)


async def test_hidden_states_that_are_kept_leave_the_stock_worker_and_the_ids() -> None:
    pipeline = Pipeline(
        ar=ar_config(processor=HiddenStates(), omni_pooler_payload_include_hidden=False),
        decoder=None,
    )
    async with pipeline, subscribe(pipeline.endpoints, subscriber="rows") as subscription:
        parallel = llm_of(pipeline).vllm_config.parallel_config
        assert parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
        stream = pipeline.submit(
            PROMPT, sampling={**GREEDY, "max_tokens": 20}, subscribers=["rows"]
        )
        await stream.finished()
        taken = Reader()
        async for update in subscription:
            taken.take(update)
            if update.terminal is not None:
                break
        assert len(taken.ids[stream.request_id]) == 20
        assert taken.rows(stream.request_id).size == 0


# vLLM's ngram proposer, in the engine, which is forked with the filters of this test.
@pytest.mark.filterwarnings("ignore:(?s).*type 'reflected list' found")
async def test_drafts_that_were_rejected_have_no_rows() -> None:
    config = ARStageConfig(model=str(CHECKPOINT), processor=HiddenStates())
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    llm = make_llm(config, "sync", "mp", speculative_config=drafts, num_gpu_blocks_override=40)
    try:
        async with (
            Pipeline(ar=config, decoder=None, llm=llm) as pipeline,
            subscribe(pipeline.endpoints, subscriber="rows") as subscription,
        ):
            again = [1, 4, *[70, 80, 90] * 6, 3]
            streams = [
                pipeline.submit(p, sampling={**GREEDY, "max_tokens": 80}, subscribers=["rows"])
                for p in (again, prompt(1))
            ]
            running = [asyncio.ensure_future(stream.finished()) for stream in streams]
            taken, steps = Reader(), 0
            async for update in subscription:
                taken.take(update)
                steps += bool(update.ids)
                if all(taken.end(stream.request_id).is_set() for stream in streams):
                    break
            await asyncio.gather(*running)
            for p, stream in zip((again, prompt(1)), streams, strict=True):
                ids = taken.ids[stream.request_id]
                check(p, ids, taken.rows(stream.request_id))
                reference = await generate(pipeline, p, max_tokens=80, **GREEDY)
                assert ids == list(reference.token_ids)
            assert steps < 160  # some drafts were accepted
            await check_nothing_left(pipeline)
    finally:
        llm.shutdown()


async def test_an_engine_that_cannot_give_rows_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ARStageConfig(model=str(CHECKPOINT), processor=HiddenStates())
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="speculation under async scheduling"):
        make_llm(config, "async", "mp", speculative_config=drafts)
    assert not list(tmp_path.glob("omni-*"))


async def test_of_two_tensor_parallel_ranks_one_gives_each_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers may have one core
    config = ARStageConfig(model=str(CHECKPOINT), processor=HiddenStates())
    llm = make_llm(config, "sync", "mp", tensor_parallel_size=2)
    try:
        async with (
            Pipeline(ar=config, decoder=None, llm=llm) as pipeline,
            subscribe(pipeline.endpoints, subscriber="rows") as subscription,
        ):
            asked = [prompt(i, 40 + 30 * i) for i in range(3)]
            streams = [
                pipeline.submit(p, sampling={**GREEDY, "max_tokens": 30}, subscribers=["rows"])
                for p in asked
            ]
            running = [asyncio.ensure_future(stream.finished()) for stream in streams]
            taken = Reader()
            async for update in subscription:
                taken.take(update)
                if all(taken.end(stream.request_id).is_set() for stream in streams):
                    break
            await asyncio.gather(*running)
            for p, stream in zip(asked, streams, strict=True):
                check(p, taken.ids[stream.request_id], taken.rows(stream.request_id))
            answers = await llm_of(pipeline).engine_core.call_utility_async("omnistage_workers")
            assert [bool(Workers(*answer).built) for answer in answers] == [True, False]
    finally:
        llm.shutdown()

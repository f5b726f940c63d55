"""Engines whose workers give rows, in every way that vLLM runs a step, and what arrives of them.

Each has a KV cache for two and a half requests and prefills in chunks of 48 ids. The model's
embeddings are its head too, so that a row of hidden states says itself which id a greedy request
sampled from it; the test models give ``codes`` beside it, rows of the position and the id there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.engine.core import EngineCore

from omnistage import ARStageConfig, Pipeline, subscribe
from omnistage.core.processes import Processes
from omnistage.payload import Payload, numbers
from omnistage.request import TokenUpdate
from omnistage.worker import mixin
from omnistage.worker.build import build, take
from tests.e2e import engines
from tests.e2e.conftest import CHECKPOINT, ar_of, wait_until_idle
from tests.e2e.inside import llm_of, report
from tests.e2e.test_cramped import CRAMPED
from tests.omni_models import connector

SIZE = 256
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Workers(NamedTuple):
    """What an engine's worker says of itself.

    Args:
        kinds: Its classes.
        known: How many requests it still knows.
        built: Whose rows it has taken, a name for each step.
        looked: How often it looked whether there are any.
        threads: The threads in which it brought them to the host.
        overlaps: Whether its outputs come later, in another thread where it is another process.
        called: The threads that ran a collective, or asked a KV connector.
    """

    kinds: list[str]
    known: int
    built: list[str]
    looked: int
    threads: list[str]
    overlaps: bool
    called: dict[str, list[str]]


_built: list[str] = []
_looks: list[int] = []
_threads: set[str] = set()


def _take_and_note(executed: Any, *rest: Any, **options: Any) -> Any:
    taken = take(executed, *rest, **options)
    _looks.append(1)
    _built.extend(executed.request_ids[place] for place in taken.places) if taken else None
    return taken


def _build_and_note(taken: Any, request_ids: Any) -> Any:
    _threads.add(threading.current_thread().name.partition("-")[0])
    return build(taken, request_ids)


def _describe(worker: Any) -> tuple[Any, ...]:
    worker = getattr(worker, "worker", None) or worker
    kinds = [kind.__qualname__ for kind in type(worker).__mro__]
    overlaps = worker.model_runner.use_async_scheduling
    known = len(worker._omni_requests)
    called = {what: sorted(names) for what, names in connector.THREADS.items()}
    return kinds, known, list(_built), len(_looks), sorted(_threads), overlaps, called


def _ask_workers(self: Any) -> Any:
    return self.model_executor.collective_rpc(_describe)


# Engines that are forked after this module was imported have it, and so have their workers.
vars(mixin)["take"] = _take_and_note
vars(mixin)["build"] = _build_and_note
EngineCore.omnistage_workers = _ask_workers  # type: ignore[attr-defined]


async def workers_of(pipeline: Pipeline) -> list[Workers]:
    """The engine's workers."""
    answers = await llm_of(pipeline).engine_core.call_utility_async("omnistage_workers")
    return [Workers(*answer) for answer in answers]


async def worker_of(pipeline: Pipeline) -> Workers:
    """The engine's only worker."""
    (worker,) = await workers_of(pipeline)
    return worker


def make_llm(config: ARStageConfig, scheduling: str, executor: str, **changes: Any) -> Any:
    """An engine attached to a stage, with blocks for two and a half requests."""
    return engines.make_llm(config, scheduling, executor, **{**CRAMPED, **changes})


class Reader:
    """What a subscriber received, request by request, checked as it comes."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self._rows: dict[str, list[np.ndarray]] = {}
        self._codes: dict[str, list[list[int]]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.errors: dict[str, str | None] = {}
        self.steps: dict[str, int] = {}
        self.dtype = "float32"  # of hidden states
        self.others: dict[str, dict[str, list[Payload]]] = {}  # tensors of other keys

    def take(self, update: TokenUpdate) -> None:
        ids = self.ids.setdefault(update.request_id, [])
        assert update.position == len(ids)
        ids.extend(update.ids)
        self.steps[update.request_id] = self.steps.get(update.request_id, 0) + bool(update.ids)
        for name in update.tensors.keys() - {"hidden", "codes"}:
            others = self.others.setdefault(update.request_id, {})
            others.setdefault(name, []).append(update.tensors[name])
        if tensor := update.tensors.get("hidden"):
            assert (tensor.dtype, tensor.shape[1:]) == (self.dtype, (SIZE,))
            taken = self._rows.setdefault(update.request_id, [])
            assert tensor.first_row == sum(map(len, taken))
            taken.append(numbers(tensor))
        if tensor := update.tensors.get("codes"):
            assert (tensor.dtype, tensor.shape[1:]) == ("int64", (2,))
            codes = self._codes.setdefault(update.request_id, [])
            assert tensor.first_row == len(codes)
            codes += np.frombuffer(tensor.data, np.int64).reshape(tensor.shape).tolist()
        if update.terminal is not None:
            self.errors[update.request_id] = update.terminal.error
            self.end(update.request_id).set()

    def end(self, request_id: str) -> asyncio.Event:
        return self.ended.setdefault(request_id, asyncio.Event())

    def check_codes(self, request_id: str, prompt: Sequence[int]) -> None:
        """Each row of codes says its own position, and the id that stands there."""
        codes = self._codes.pop(request_id, [])
        given = [*prompt, *self.ids[request_id][:-1]]
        assert codes == [list(pair) for pair in enumerate(given)]

    def rows(self, request_id: str) -> np.ndarray:
        """All of a request's rows of hidden states, [rows, hidden size]."""
        return np.concatenate(self._rows.get(request_id, [np.zeros((0, SIZE), np.float32)]))


async def run(
    pipeline: Pipeline,
    reader: Reader,
    prompt: Sequence[int],
    *,
    has_codes: bool = True,
    **sampling: Any,
) -> tuple[list[int], np.ndarray]:
    """A request's ids and rows."""
    stream = pipeline.submit(prompt, sampling={**GREEDY, **sampling}, subscribers=["rows"])
    await stream.finished()
    async with asyncio.timeout(20):
        await reader.end(stream.request_id).wait()
    if has_codes:
        reader.check_codes(stream.request_id, prompt)
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
            if not any(worker.known for worker in await workers_of(pipeline)):
                return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(
    config: ARStageConfig, scheduling: str, executor: str, **changes: Any
) -> AsyncIterator[tuple[Pipeline, Reader]]:
    """An engine of its own, and what a subscriber receives of it."""
    processes = None
    llm = make_llm(config, scheduling, executor, **changes)
    try:
        async with (
            Pipeline(ar=config, decoder=None, llm=llm) as pipeline,
            reading(pipeline) as reader,
        ):
            assert (await workers_of(pipeline))[0].overlaps == (scheduling == "async")
            control = ar_of(pipeline)._control
            assert control is not None
            cores = [hello.pid for hello in control.hellos.values()]
            processes = await asyncio.to_thread(Processes, cores)
            yield pipeline, reader
    finally:
        llm.shutdown(15)  # by default vLLM kills its engine before that has ended its workers
        if processes is not None:
            await asyncio.to_thread(processes.end)


@contextlib.asynccontextmanager
async def reading(pipeline: Pipeline) -> AsyncIterator[Reader]:
    """A subscriber, and what it has received so far."""
    taken = Reader()

    async def read() -> None:
        async for update in subscription:
            taken.take(update)

    async with subscribe(pipeline.endpoints, subscriber="rows") as subscription:
        task = asyncio.create_task(read())
        try:
            yield taken
        finally:
            await subscription.aclose()
            await task

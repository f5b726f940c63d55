"""A look inside vLLM's engine process, and ways to end requests there that no client has.

Engines that are forked after this module was imported answer vLLM's own utility call with what
they hold, and end requests whose id asks for it on paths of vLLM's own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

from omnistage.pipeline import Pipeline
from tests.e2e.conftest import PROMPT, ar_of
from tests.parts import branches_of

PREPROCESSING_FAILS = "preprocessing-fails"
ADDED_IN_SHUTDOWN = "added-in-shutdown"


def _report(self: Any) -> dict[str, int]:
    """Everything a request may leave behind in an engine process."""
    scheduler: Any = self.scheduler
    collector, publisher = scheduler._omni_collector, scheduler._omni_publisher
    adapter = publisher._source
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler.requests),
        "queued": len(scheduler.running) + sum(scheduler.get_request_counts()),
        "records": len(collector),
        "names": len(collector._names),
        "paused": len(collector._paused),
        "steps waiting": len(collector.steps),
        "open": len(adapter),
        "failures": len(adapter._failures) + len(adapter._ended),
        "topics": len(publisher._ledger.topics),
        "blocks": pool.num_gpu_blocks - pool.get_num_free_blocks(),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "sockets": len(psutil.Process().net_connections("all")),
    }


def _count_alive(self: Any, name: str) -> int:
    """How many objects of a class are alive."""
    gc.collect()
    return sum(type(one).__name__ == name for one in gc.get_objects())


_preprocess = EngineCore.preprocess_add_request
_reject = EngineCoreProc._reject_add_in_shutdown


def _added(self: Any) -> int:
    """How many requests have reached this engine."""
    return int(vars(self).get("_omnistage_added", 0))


def _preprocess_or_fail(self: Any, request: Any) -> Any:
    self._omnistage_added = _added(self) + 1
    if request.request_id.startswith(PREPROCESSING_FAILS):
        raise RuntimeError("on purpose")
    return _preprocess(self, request)


def _reject_if_asked(self: Any, request: Any) -> Any:
    if not request.request_id.startswith(ADDED_IN_SHUTDOWN):
        return _reject(self, request)
    state, self.shutdown_state = self.shutdown_state, EngineShutdownState.SHUTTING_DOWN
    try:
        return _reject(self, request)
    finally:
        self.shutdown_state = state


EngineCore.omnistage_report = _report  # type: ignore[attr-defined]
EngineCore.omnistage_added = _added  # type: ignore[attr-defined]
EngineCore.omnistage_count = _count_alive  # type: ignore[attr-defined]
EngineCore.preprocess_add_request = _preprocess_or_fail  # type: ignore[method-assign]
EngineCoreProc._reject_add_in_shutdown = _reject_if_asked


def llm_of(pipeline: Pipeline) -> Any:
    """The pipeline's ``AsyncLLM``."""
    engine = ar_of(pipeline)._engine
    assert engine is not None
    return engine._llm


async def report(pipeline: Pipeline) -> dict[str, int]:
    """What the engine process holds now."""
    counts = await llm_of(pipeline).engine_core.call_utility_async("omnistage_report")
    assert isinstance(counts, dict)
    return counts


async def added(llm: Any) -> int:
    """How many requests have reached an ``AsyncLLM``'s engine process."""
    return int(await llm.engine_core.call_utility_async("omnistage_added"))


async def count_alive(pipeline: Pipeline, name: str) -> int:
    """How many objects of a class are alive in the engine process."""
    count = await llm_of(pipeline).engine_core.call_utility_async("omnistage_count", name)
    assert isinstance(count, int)
    return count


def held_here(pipeline: Pipeline) -> dict[str, int]:
    """Everything a request may leave behind in this process."""
    ar, llm = ar_of(pipeline), llm_of(pipeline)
    control = ar._control
    assert control is not None
    counts = {
        "submissions": len(pipeline._running),
        "ar": len(ar),
        "releases": len(control._releases),
        "vLLM's front-end": len(llm.output_processor.request_states),
        "vLLM's external ids": len(llm.output_processor.external_req_ids),
        "vLLM's utility calls": len(llm.engine_core.utility_results),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "sockets": len(psutil.Process().net_connections("all")),
    }
    for branch in branches_of(pipeline):
        decoder = branch.decoder
        counts[branch.name] = len(decoder) + len(decoder._due)
    return counts


class Published:
    """How often each request was started and ended on the data socket, from now on."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.starts: dict[str, int] = {}
        self.terminals: dict[str, list[str]] = {}
        self.ids = 0
        self._decoders = [branch.decoder for branch in branches_of(pipeline)]

    def __enter__(self) -> Published:
        for decoder in self._decoders:
            self._spy(decoder)
        return self

    def __exit__(self, *_: object) -> None:
        for decoder in self._decoders:
            del decoder.on_update

    def _spy(self, decoder: Any) -> None:
        on_update = decoder.on_update

        def note(update: Any, buffers: Any, stamp: int) -> None:
            if update.start is not None:
                self.starts[update.request_id] = self.starts.get(update.request_id, 0) + 1
            self.ids += len(update.ids)
            if update.terminal is not None:
                reasons = self.terminals.setdefault(update.request_id, [])
                reasons.append(str(update.terminal.reason))
            on_update(update, buffers, stamp)

        decoder.on_update = note


@asynccontextmanager
async def nothing_left(pipeline: Pipeline, within: float = 1.0) -> AsyncIterator[None]:
    """Check that a second after the block neither process holds more than before it."""
    # Once, so that what a first request makes for good is there: threads, a loop's own sockets.
    async with pipeline.submit(PROMPT, sampling={"max_tokens": 8, "ignore_eos": True}) as stream:
        async for _ in stream:
            pass
    await asyncio.sleep(0.02)
    before = await held(pipeline)
    yield
    try:
        async with asyncio.timeout(within):
            while more_than(before, await held(pipeline)):
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"still held: {more_than(before, await held(pipeline))}") from None


async def held(pipeline: Pipeline) -> dict[str, int]:
    """What both processes hold."""
    there = {f"engine: {name}": count for name, count in (await report(pipeline)).items()}
    return {**there, **held_here(pipeline)}


def more_than(before: dict[str, int], now: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of; an idle worker thread may have gone meanwhile."""
    return {name: (count, now[name]) for name, count in before.items() if now[name] > count}

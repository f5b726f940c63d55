"""Engines of the test models, in each way that vLLM runs a step, and what their workers hold."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from vllm.v1.engine.core import EngineCore

import omnistage
from omnistage.config import ARStageConfig
from omnistage.pipeline import Pipeline
from tests.e2e.conftest import ENGINE_ARGS
from tests.e2e.inside import llm_of

WAYS: Final = {f"{s}-{e}": (s, e) for s in ("sync", "async") for e in ("uni", "mp")}
"""Scheduling and executor; vLLM's CPU platform offers only one of these by itself."""


def make_llm(config: ARStageConfig, scheduling: str, executor: str, **changes: Any) -> Any:
    """An ``AsyncLLM`` that is attached to a stage, and forked."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with pytest.MonkeyPatch.context() as patch:
        if executor == "uni":
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        args = {**ENGINE_ARGS, "distributed_executor_backend": executor, **changes}
        vllm_config = AsyncEngineArgs(model=config.model, **args).create_engine_config()
        vllm_config.scheduler_config.async_scheduling = scheduling == "async"
        omnistage.attach(vllm_config, config)
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        # vLLM's ngram proposer is numba's, whose default threads hang in a forked worker.
        patch.setenv("NUMBA_THREADING_LAYER", "workqueue")
        patch.setenv("NUMBA_NUM_THREADS", "1")
        return AsyncLLM.from_vllm_config(vllm_config)


def _known(worker: Any) -> int:
    worker = getattr(worker, "worker", None) or worker
    return len(worker._omni_requests)


def _ask(self: Any) -> Any:
    return self.model_executor.collective_rpc(_known)


EngineCore.omnistage_known = _ask  # type: ignore[attr-defined]


async def workers_have_forgotten(pipeline: Pipeline, within: float = 5.0) -> None:
    """Return when no worker knows a request; vLLM tells them of an end with its next step."""
    async with asyncio.timeout(within):
        while any(await llm_of(pipeline).engine_core.call_utility_async("omnistage_known")):
            await asyncio.sleep(0.02)

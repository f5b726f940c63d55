"""What runs in vLLM's worker processes: vLLM, and nothing of ours."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from omnistage.pipeline import Pipeline
from tests.e2e.inside import llm_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


def _classes(worker: Any) -> list[str]:
    """In the worker: the classes of what runs the model, and of what is hooked to it."""
    model = worker.model_runner.model
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    kinds = [*type(worker).__mro__, *type(worker.model_runner).__mro__, *type(model).__mro__]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in [*kinds, *map(type, hooks)]]


def _ask_workers(self: Any) -> list[list[str]]:
    answers: list[list[str]] = self.model_executor.collective_rpc(_classes)
    return answers


# Engines that are forked after this module was imported have it.
EngineCore.omnistage_worker_classes = _ask_workers  # type: ignore[attr-defined]


async def test_the_worker_the_runner_and_the_model_are_vllms_own(pipeline: Pipeline) -> None:
    llm = llm_of(pipeline)
    parallel = llm.vllm_config.parallel_config
    assert parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert not parallel.worker_extension_cls
    (names,) = await llm.engine_core.call_utility_async("omnistage_worker_classes")
    assert "vllm.v1.worker.cpu_model_runner.CPUModelRunner" in names
    strangers = {name.partition(".")[0] for name in names} - {"vllm", "torch", "builtins", "typing"}
    assert strangers == set()

"""What vLLM runs before it serves: it asks no hook for anything, and leaves nothing behind."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

from omnistage.worker.block_tables import BlockTables
from omnistage.worker.cpu import OmniCPUWorker
from omnistage.worker.hooks import ModelHooks
from omnistage.worker.requests import WorkerRequests


class Model(nn.Module):
    """Has outputs and hooks, and notes what it is asked."""

    omni_outputs = {"codes": "token"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def forward(self, rows: torch.Tensor) -> Any:
        return rows, {"codes": rows}

    def omni_preprocess(self, spans: Any) -> None:
        self.asked.append("preprocess")

    def omni_postprocess(self, spans: Any, hidden: Any, outputs: Any) -> None:
        self.asked.append("postprocess")


@pytest.fixture
def worker() -> Any:
    """One of ours, of which only what is ours was made."""
    made: Any = object.__new__(OmniCPUWorker)
    made.model_runner = SimpleNamespace(execute_model_state=None)
    made._omni_hooks = ModelHooks(Model(), None)
    made._omni_hooks.before_forward(made._preprocess)
    made._omni_requests = WorkerRequests(all_of_them=True)
    return made


def test_a_forward_pass_outside_a_step_calls_no_hook_and_sends_nothing(worker: Any) -> None:
    model = worker._omni_hooks._model
    rows = torch.zeros(8, 2)
    assert model(rows) is rows  # as vLLM's runner expects
    assert worker._take() is None
    assert model.asked == []
    assert not worker._omni_hooks.take_outputs()
    assert len(worker._omni_requests) == 0


def test_requests_that_vllms_warm_up_makes_up_are_gone_behind_it() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)])
    runner: Any = SimpleNamespace(
        is_pooling_model=False,
        max_num_reqs=8,
        kv_cache_config=cache,
        num_speculative_steps=0,
        kv_connector=SimpleNamespace(set_disabled=lambda _: None),
        vllm_config=SimpleNamespace(num_lookahead_tokens=0),
        max_model_len=512,
        model_state=None,
    )
    requests, tables = WorkerRequests(all_of_them=True), BlockTables(16)
    seen: list[int] = []

    def execute(scheduled: Any) -> None:
        requests.note(scheduled)
        tables.update(scheduled)
        seen.append(len(requests))

    assert run_mixed_prefill_decode_warmup(
        runner, execute, lambda _: None, 40, mixed_step_context=contextlib.nullcontext()
    )
    assert seen == [1, 2, 0]
    assert requests.wanted == {}
    assert len(tables) == 0

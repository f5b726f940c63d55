"""Which engines give rows, and which are refused with a sentence before they start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omnistage.adapters.processor import (
    CodecFrames,
    HiddenStates,
    PayloadProcessor,
    TokenUpdates,
    wants_payload,
)
from omnistage.config import ARStageConfig
from omnistage.core.row_source import WORKERS, give_rows, with_rows
from omnistage.errors import ConfigError, InvalidRequest

CPU = "vllm.v1.worker.cpu_worker.CPUWorker"


def vllm_config(**changes: Any) -> Any:
    """What is read of vLLM's configuration, by the names that its own has."""
    parallel = {"worker_cls": CPU, "prefill_context_parallel_size": 1, "use_ubatching": False}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in parallel.items()}),
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=changes.pop("kv_sharing_fast_prefill", False)
        ),
        scheduler_config=SimpleNamespace(async_scheduling=changes.pop("async_scheduling", False)),
        speculative_config=SimpleNamespace(method=changes.pop("method"))
        if "method" in changes
        else None,
    )


def config(processor: Any = None, **changes: Any) -> ARStageConfig:
    return ARStageConfig(model="m", processor=processor or HiddenStates(), **changes)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_processor_that_wants_rows_has_workers_that_give_them(
    worker: str, asynchronous: bool
) -> None:
    ours = vllm_config(worker_cls=worker, async_scheduling=asynchronous)
    assert give_rows(ours, config()) == ("audio",)
    assert ours.parallel_config.worker_cls == WORKERS[worker]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "stage",
    [
        config(TokenUpdates()),
        config(CodecFrames(first_id=4, codebook_size=8)),
        config(omni_pooler_payload_include_hidden=False),
    ],
    ids=["ids", "frames", "kept"],
)
def test_a_stage_that_wants_none_has_vllms_own_workers(
    stage: ARStageConfig, asynchronous: bool
) -> None:
    # Not even what could not give any is looked at.
    theirs = vllm_config(kv_sharing_fast_prefill=True, async_scheduling=asynchronous)
    assert give_rows(theirs, stage) == ()
    assert theirs.parallel_config.worker_cls == CPU


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_cls": "elsewhere.Worker"}, r"worker class elsewhere\.Worker"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"use_ubatching": True}, "micro-batches"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"method": "eagle3"}, "'eagle3' is unproven"),
        ({"method": "ngram", "async_scheduling": True}, "speculation under async scheduling"),
    ],
)
def test_an_engine_whose_rows_would_be_wrong_is_refused(changes: Any, words: str) -> None:
    theirs = vllm_config(**changes)
    before = theirs.parallel_config.worker_cls
    with pytest.raises(ConfigError, match=words) as refused:
        give_rows(theirs, config())
    assert "omni_pooler_payload_include_hidden=False" in str(refused.value)
    assert refused.value.stage == "ar"
    assert theirs.parallel_config.worker_cls == before


def test_what_is_read_of_vllms_configuration_is_there() -> None:
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig

    parallel = ParallelConfig()
    assert (parallel.prefill_context_parallel_size, parallel.use_ubatching) == (1, False)
    assert {"kv_sharing_fast_prefill"} <= set(CacheConfig.__dataclass_fields__)
    assert {"async_scheduling"} <= set(SchedulerConfig.__dataclass_fields__)


@pytest.mark.parametrize(("name", "ours"), WORKERS.items())
def test_each_of_our_workers_is_the_platforms_own_with_three_methods_extended(
    name: str, ours: str
) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    stock, extended = resolve_obj_by_qualname(name), resolve_obj_by_qualname(ours)
    first, mixin, base = extended.__mro__[:3]
    assert base is stock
    assert {n for n in vars(first) if not n.startswith("__")} == set()
    own = {n for n, value in vars(mixin).items() if callable(value) and hasattr(stock, n)}
    assert own == {"__init__", "execute_model", "sample_tokens"}


def test_a_processor_declares_that_it_wants_rows() -> None:
    assert wants_payload(HiddenStates())
    assert isinstance(HiddenStates(), PayloadProcessor)
    assert not wants_payload(TokenUpdates())
    assert not isinstance(TokenUpdates(), PayloadProcessor)


def test_a_request_with_rows_computes_its_whole_prompt() -> None:
    given = {"temperature": 0.0}
    assert with_rows(given) == {"temperature": 0.0, "skip_reading_prefix_cache": True}
    assert given == {"temperature": 0.0}
    with pytest.raises(InvalidRequest, match="not computed again"):
        with_rows({"skip_reading_prefix_cache": False})

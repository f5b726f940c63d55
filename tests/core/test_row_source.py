"""Which engines give rows, and which are refused with a sentence before they start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.model_executor.model_loader import utils

from omnistage.adapters.processor import (
    CodecFrames,
    HiddenStates,
    PayloadProcessor,
    TokenUpdates,
    wants_payload,
)
from omnistage.config import ARStageConfig
from omnistage.core.row_source import WORKERS, give_payloads, with_rows
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.worker.contract import ModelContract, Occurrence

CPU = "vllm.v1.worker.cpu_worker.CPUWorker"


def vllm_config(**changes: Any) -> Any:
    """What is read of vLLM's configuration, by the names that its own has."""
    parallel = {
        "worker_cls": CPU,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
        "pipeline_parallel_size": 1,
    }
    given: dict[str, Any] = {
        "model": ModelForTests,
        "graphs": CUDAGraphMode.PIECEWISE,
        "v2": False,
        "role": None,
    }
    given |= {k: changes.pop(k) for k in given if k in changes}
    role = given["role"]
    return SimpleNamespace(
        model_config=SimpleNamespace(architecture="M", registry=Registry(given["model"])),
        compilation_config=SimpleNamespace(cudagraph_mode=given["graphs"]),
        use_v2_model_runner=given["v2"],
        kv_transfer_config=role and KVTransferConfig(kv_connector="C", kv_role=role),
        additional_config={"theirs": 1},
        parallel_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in parallel.items()}),
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=changes.pop("kv_sharing_fast_prefill", False)
        ),
        scheduler_config=SimpleNamespace(async_scheduling=changes.pop("async_scheduling", False)),
        speculative_config=SimpleNamespace(method=changes.pop("method"))
        if "method" in changes
        else None,
    )


class ModelForTests:
    """A model that declares nothing."""


class Registry:
    """VLLM's, with one model in it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.models = {"M": SimpleNamespace(module_name=model.__module__)}


@pytest.fixture(autouse=True)
def _resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "get_model_cls", lambda config: config.registry.model)


def config(processor: Any = None, **changes: Any) -> ARStageConfig:
    return ARStageConfig(model="m", processor=processor or HiddenStates(), **changes)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_processor_that_wants_rows_has_workers_that_give_them(
    worker: str, asynchronous: bool
) -> None:
    ours = vllm_config(worker_cls=worker, async_scheduling=asynchronous)
    contract, channels = give_payloads(ours, config())
    assert channels == ("audio",)
    assert contract == ModelContract(model="ModelForTests")
    assert ours.additional_config == {"theirs": 1, "omnistage_payload": {"include_hidden": True}}
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
    assert give_payloads(theirs, stage)[1] == ()
    assert theirs.additional_config == {"theirs": 1}
    assert theirs.parallel_config.worker_cls == CPU


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_cls": "elsewhere.Worker"}, r"worker class elsewhere\.Worker"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"use_ubatching": True}, "micro-batches"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"method": "eagle3"}, "'eagle3' is unproven"),
        (
            {"method": "draft_model", "async_scheduling": True, "v2": True},
            "V2 is unproven with speculation under async scheduling",
        ),
        ({"role": "kv_consumer"}, "loads blocks whose rows are not computed"),
        ({"role": "kv_both"}, "loads blocks whose rows are not computed"),
    ],
)
def test_an_engine_whose_rows_would_be_wrong_is_refused(changes: Any, words: str) -> None:
    theirs = vllm_config(**changes)
    before = theirs.parallel_config.worker_cls
    with pytest.raises(ConfigError, match=words) as refused:
        give_payloads(theirs, config())
    assert "omni_pooler_payload_include_hidden=False" in str(refused.value)
    assert refused.value.stage == "ar"
    assert theirs.parallel_config.worker_cls == before


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "ngram"},
        {"method": "draft_model", "async_scheduling": True},
        {"graphs": CUDAGraphMode.FULL_AND_PIECEWISE, "v2": True},
        {"role": "kv_producer"},
    ],
)
def test_what_gives_every_row_is_not_refused(changes: Any) -> None:
    assert give_payloads(vllm_config(**changes), config())[1] == ("audio",)


class Extended:
    """A model with outputs and hooks of its own."""

    omni_pooler_payload_include_hidden = False
    omni_outputs = {"codes": "token", "voice": "request"}  # noqa: RUF012

    def omni_preprocess(self, spans: Any) -> None: ...

    def omni_postprocess(self, spans: Any, hidden: Any, outputs: Any) -> None: ...


def test_a_model_that_extends_vllms_interface_has_our_worker_whoever_wants_its_outputs() -> None:
    for processor, channels in [(TokenUpdates(), ()), (HiddenStates(), ("audio",))]:
        ours = vllm_config(model=Extended)
        contract, wanted = give_payloads(ours, config(processor))
        assert wanted == channels
        assert ours.parallel_config.worker_cls == WORKERS[CPU]
        assert contract == ModelContract(
            model="Extended",
            include_hidden=False,
            outputs={"codes": Occurrence.TOKEN, "voice": Occurrence.REQUEST},
            preprocesses=True,
            postprocesses=True,
        )


def test_a_row_a_request_is_refused_where_its_position_may_be_rejected() -> None:
    with pytest.raises(ConfigError, match="that of its last draft, which may be rejected"):
        give_payloads(vllm_config(model=Extended, method="ngram"), config())
    assert (
        give_payloads(vllm_config(model=Extended, method="ngram"), config(TokenUpdates()))[1] == ()
    )


def test_the_stages_configuration_overrides_the_models_word_on_hidden_states() -> None:
    for asked, included in [(None, False), (True, True), (False, False)]:
        stage = config(omni_pooler_payload_include_hidden=asked)
        contract, channels = give_payloads(vllm_config(model=Extended), stage)
        assert (contract.include_hidden, channels) == (included, ("audio",))


def test_one_of_vllms_own_models_is_not_imported_to_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(config: Any) -> None:
        raise AssertionError(config)

    monkeypatch.setattr(utils, "get_model_cls", never)
    monkeypatch.setattr(ModelForTests, "__module__", "vllm.model_executor.models.llama")
    for asked, channels in [(None, ("audio",)), (False, ())]:
        stage = config(omni_pooler_payload_include_hidden=asked)
        assert give_payloads(vllm_config(), stage)[1] == channels


@pytest.mark.parametrize("processor", [TokenUpdates(), HiddenStates()], ids=["ids", "rows"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graphs": CUDAGraphMode.FULL}, "full CUDA graphs do not run a model's hooks"),
        ({"graphs": CUDAGraphMode.FULL_AND_PIECEWISE}, "'cudagraph_mode': 'PIECEWISE'"),
        ({"v2": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"use_ubatching": True}, "micro-batches"),
    ],
)
def test_an_engine_on_which_a_models_hooks_would_lie_is_refused(
    processor: Any, changes: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        give_payloads(vllm_config(model=Extended, **changes), config(processor))
    assert "Extended extends vLLM's model interface" in str(refused.value)


def test_a_pipeline_parallel_stage_on_cpu_has_the_worker_that_can_run_it() -> None:
    theirs = vllm_config(pipeline_parallel_size=2)
    assert give_payloads(theirs, config(TokenUpdates()))[1] == ()
    assert theirs.parallel_config.worker_cls == WORKERS[CPU]
    gpu = next(name for name in WORKERS if name != CPU)
    theirs = vllm_config(pipeline_parallel_size=2, worker_cls=gpu)
    give_payloads(theirs, config(TokenUpdates()))
    assert theirs.parallel_config.worker_cls == gpu


def test_what_is_read_of_vllms_configuration_is_there() -> None:
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig

    parallel = ParallelConfig()
    assert (parallel.prefill_context_parallel_size, parallel.use_ubatching) == (1, False)
    assert {"kv_sharing_fast_prefill"} <= set(CacheConfig.__dataclass_fields__)
    assert {"async_scheduling"} <= set(SchedulerConfig.__dataclass_fields__)


@pytest.mark.parametrize(("name", "ours"), WORKERS.items())
def test_each_of_our_workers_is_the_platforms_own_with_four_methods_extended(
    name: str, ours: str
) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    stock, extended = resolve_obj_by_qualname(name), resolve_obj_by_qualname(ours)
    first, mixin, base = extended.__mro__[:3]
    assert base is stock
    more = {"compile_or_warm_up_model"} if name == CPU else set()
    assert {n for n in vars(first) if not n.startswith("__")} == more
    own = {n for n, value in vars(mixin).items() if callable(value) and hasattr(stock, n)}
    assert own == {
        "load_model",
        "initialize_from_config",
        "execute_model",
        "sample_tokens",
    }


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

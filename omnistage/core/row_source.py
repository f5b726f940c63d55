"""Payloads from vLLM's workers: what a model declares, which engines can give it, how it is asked.

A stage whose model declares nothing and whose processor wants nothing has vLLM's own workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from omnistage.adapters.processor import wants_payload
from omnistage.config import AUDIO
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.worker.contract import PAYLOAD_OPTIONS, ModelContract, Occurrence, contract_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omnistage.config import ARStageConfig

_CPU: Final = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKERS: Final = {
    _CPU: "omnistage.worker.cpu.OmniCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "omnistage.worker.gpu.OmniGPUWorker",
}
"""vLLM's worker classes, which a platform chooses, and ours over each."""

PROVEN_SPECULATION: Final = ("ngram", "draft_model")


def give_payloads(vllm_config: Any, config: ARStageConfig) -> tuple[ModelContract, tuple[str, ...]]:
    """Have an engine's workers give payloads, and serve its model's hooks, where there are any.

    Returns:
        What the model declares, and the channels that get payloads.

    Raises:
        ConfigError: The model declares what cannot be; or an engine of this configuration has not
            what the processor wants, not all of it, or would call a hook with wrong positions.
    """
    contract, parallel = _contract(vllm_config.model_config, config), vllm_config.parallel_config
    wanted = wants_payload(config.processor) and contract.has_payload
    if wanted or contract.extends_vllm:
        _check(vllm_config, config, contract, wanted=wanted)
    elif parallel.pipeline_parallel_size == 1 or parallel.worker_cls != _CPU:
        return contract, ()
    parallel.worker_cls = WORKERS[parallel.worker_cls]
    # Plain values, the same at every start: they go into vLLM's compile-cache key.
    options = {"include_hidden": contract.include_hidden}
    if wanted and config.prefix_rows:
        options["prefix_rows"] = True
    vllm_config.additional_config = {
        **(vllm_config.additional_config or {}),
        PAYLOAD_OPTIONS: options,
    }
    return contract, (AUDIO,) if wanted else ()


def _contract(model_config: Any, config: ARStageConfig) -> ModelContract:
    registered = model_config.registry.models.get(model_config.architecture)
    if getattr(registered, "module_name", "").startswith("vllm."):
        # One of vLLM's own, which declares nothing: not imported here, which takes a while and may
        # initialize a device.
        included = config.omni_pooler_payload_include_hidden is not False
        return ModelContract(model=model_config.architecture, include_hidden=included)
    from vllm.model_executor.model_loader.utils import get_model_cls

    return contract_of(get_model_cls(model_config), config.omni_pooler_payload_include_hidden)


def _check(
    vllm_config: Any, config: ARStageConfig, contract: ModelContract, *, wanted: bool
) -> None:
    if wanted and config.prefix_rows:
        from omnistage.worker.cache_group import prefix_rows_obstacle

        if obstacle := prefix_rows_obstacle(vllm_config):
            raise ConfigError(f"prefix_rows=True, and {obstacle}; leave it out", stage=config.name)
    asks = f"{type(config.processor).__name__} wants payloads"
    advice = "change that, or set omni_pooler_payload_include_hidden=False"
    if contract.extends_vllm:
        asks, advice = f"{contract.model} extends vLLM's model interface", "change that"
    for reason in _obstacles(vllm_config, contract, wanted=wanted):
        raise ConfigError(f"{asks}, and {reason}; {advice}", stage=config.name)


def _obstacles(vllm_config: Any, contract: ModelContract, *, wanted: bool) -> Iterator[str]:
    """What of a configuration would leave rows out, or give them wrong positions."""
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if parallel.worker_cls not in WORKERS:
        yield f"the worker class {parallel.worker_cls} is neither vLLM's CPU nor its GPU worker"
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallelism spreads a prompt's rows over ranks"
    if parallel.use_ubatching:
        yield "micro-batches (enable_dbo, ubatch_size) leave only the last one's"
    graphs = vllm_config.compilation_config.cudagraph_mode
    if contract.extends_vllm and graphs.has_full_cudagraphs():
        yield (
            "full CUDA graphs do not run a model's hooks when they are replayed; set "
            "compilation_config={'cudagraph_mode': 'PIECEWISE'}"
        )
    if contract.preprocesses and vllm_config.use_v2_model_runner:
        yield (
            "Model Runner V2 does not show its batch before a forward pass; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if not wanted:
        return
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill does not compute a prompt's rows"
    if speculation is not None and speculation.method not in PROVEN_SPECULATION:
        proven = " and ".join(PROVEN_SPECULATION)
        yield f"speculation by {speculation.method!r} is unproven with them; {proven} work"
    if speculation is not None and Occurrence.REQUEST in contract.outputs.values():
        yield "with speculation a row a request is that of its last draft, which may be rejected"
    if speculation is not None and asynchronous and vllm_config.use_v2_model_runner:
        yield "Model Runner V2 is unproven with speculation under async scheduling"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.is_kv_consumer:
        yield "a KV connector loads blocks whose rows are not computed; use a kv_producer"


def with_rows(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a request whose rows are wanted: it computes its whole prompt.

    Raises:
        InvalidRequest: It insists on cached prefixes, whose rows are not computed again.
    """
    if sampling.get("skip_reading_prefix_cache") is False:
        raise InvalidRequest(
            "the rows of a cached prefix are not computed again; leave skip_reading_prefix_cache "
            "out, or set it to True",
            parameter="skip_reading_prefix_cache",
        )
    return {**sampling, "skip_reading_prefix_cache": True}

"""Rows of hidden states from vLLM's workers: which engines can give them, and how they are asked.

A stage whose processor wants none, or whose configuration keeps them, has vLLM's own workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from omnistage.adapters.processor import wants_payload
from omnistage.config import AUDIO
from omnistage.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omnistage.config import ARStageConfig

WORKERS: Final = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "omnistage.worker.cpu.OmniCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "omnistage.worker.gpu.OmniGPUWorker",
}
"""vLLM's worker classes, which a platform chooses, and ours over each."""


def give_rows(vllm_config: Any, config: ARStageConfig) -> tuple[str, ...]:
    """Have an engine's workers give rows, where the stage's processor wants them.

    Returns:
        The channels that get rows.

    Raises:
        ConfigError: The processor wants rows and an engine of this configuration has none to give,
            or not all.
    """
    if not (config.omni_pooler_payload_include_hidden and wants_payload(config.processor)):
        return ()
    parallel = vllm_config.parallel_config
    for reason in _obstacles(vllm_config):
        raise ConfigError(
            f"{type(config.processor).__name__} wants hidden states, and {reason}; change that, or "
            "set omni_pooler_payload_include_hidden=False",
            stage=config.name,
        )
    parallel.worker_cls = WORKERS[parallel.worker_cls]
    return (AUDIO,)


def _obstacles(vllm_config: Any) -> Iterator[str]:
    """What of a configuration would leave rows out, or give them wrong positions."""
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    if parallel.worker_cls not in WORKERS:
        yield f"the worker class {parallel.worker_cls} is neither vLLM's CPU nor its GPU worker"
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallelism spreads a prompt's rows over ranks"
    if parallel.use_ubatching:
        yield "micro-batches (enable_dbo, ubatch_size) leave only the last one's"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill does not compute a prompt's rows"
    if speculation is not None and speculation.method != "ngram":
        yield f"speculation by {speculation.method!r} is unproven with them; 'ngram' works"
    if speculation is not None and vllm_config.scheduler_config.async_scheduling:
        yield "with speculation under async scheduling a worker does not know its rows' positions"


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

"""Watches the names of vLLM's that omnistage overrides, calls and reads, and says what has changed.

Functions are watched by signature and by a digest of their code, comments and docstrings aside;
fields by being there. What they were when their code was read stands in ``watched.json``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

WATCHED: Final = Path(__file__).with_name("watched.json")

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
_CPU_WORKER: Final = "vllm.v1.worker.cpu_worker:CPUWorker"
_LLM: Final = "vllm.v1.engine.async_llm:AsyncLLM"
_REQUEST: Final = "vllm.v1.request:Request"
_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"

FUNCTIONS: Final[dict[str, tuple[str, ...]]] = {
    # Overridden, through super().
    _SCHEDULER: (
        *("__init__", "add_request", "update_from_output", "finish_requests", "shutdown"),
        # What a step's output says of blocks, which the rows of cached prefixes follow.
        *("schedule", "_make_cached_request_data", "reset_prefix_cache", "_preempt_request"),
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (
        *("_update_after_schedule", "_update_request_with_output"),
    ),
    _WORKER: (
        *("load_model", "get_model", "initialize_from_config", "execute_model", "sample_tokens"),
    ),
    _CPU_WORKER: ("load_model", "init_device", "compile_or_warm_up_model"),
    "vllm.v1.outputs:AsyncModelRunnerOutput": ("get_output",),
    "vllm.v1.sample.logits_processor:LogitsProcessor": (
        *("__init__", "validate_params", "apply", "is_argmax_invariant", "update_state"),
    ),
    # Called.
    _LLM: ("from_vllm_config", "generate", "abort", "is_sleeping", "shutdown", "add_request"),
    "vllm.engine.arg_utils:AsyncEngineArgs": ("create_engine_config",),
    "vllm.renderers.inputs.preprocess": ("parse_model_prompt",),
    "vllm.renderers.base:BaseRenderer": ("render_cmpl_async",),
    "vllm.model_executor.model_loader.utils": ("get_model_cls",),
    "vllm.v1.serial_utils:MsgpackEncoder": ("encode",),
    "vllm.v1.serial_utils:MsgpackDecoder": ("decode",),
    "vllm.distributed.parallel_state": ("get_pp_group", "get_tp_group"),
    _REQUEST: ("is_finished", "get_finished_reason"),
    "vllm.config:ModelConfig": (
        *("get_vocab_size", "get_inputs_embeds_size", "get_hidden_size"),
        "try_get_generation_config",
    ),
    "vllm.config:CUDAGraphMode": ("has_full_cudagraphs",),
    # Relied on: what a runner keeps between a forward pass and its sampling, who waits for an
    # output and in which thread, and how a large buffer gets from a worker to its scheduler.
    f"{_V1}:GPUModelRunner": (
        *("execute_model", "sample_tokens", "get_model", "_update_states", "_model_forward"),
    ),
    f"{_V2}:GPUModelRunner": ("execute_model", "sample_tokens", "get_model"),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": (
        *("execute_model", "sample_tokens", "_get_output_rank"),
    ),
    "vllm.v1.executor.multiproc_executor:WorkerProc": ("enqueue_output", "handle_output"),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": ("collective_rpc", "sample_tokens"),
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue": ("enqueue", "dequeue"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("get_computed_blocks", "allocate_slots"),
}
"""Functions, by the module or class that has them."""

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    _SCHEDULER: ("requests", "vllm_config", "log_stats"),
    _LLM: ("vllm_config", "renderer", "model_config", "output_handler"),
    "vllm.renderers.base:BaseRenderer": ("tokenizer",),
    _REQUEST: (
        *("request_id", "sampling_params", "num_prompt_tokens", "resumable", "status"),
        "num_computed_tokens",
    ),
    "vllm.v1.request:RequestStatus": ("PREEMPTED", "FINISHED_ABORTED", "FINISHED_ERROR"),
    "vllm.sampling_params:SamplingParams": (
        *("extra_args", "output_kind", "detokenize", "logprobs", "prompt_logprobs", "max_tokens"),
        *("min_tokens", "ignore_eos", "stop_token_ids", "skip_reading_prefix_cache"),
    ),
    "vllm.sampling_params:RequestOutputKind": (
        "DELTA",
        "FINAL_ONLY",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        *("request_id", "new_token_ids", "finish_reason", "num_nans_in_logits"),
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs", "finished_requests", "scheduler_stats"),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_ids",),
    "vllm.v1.outputs": ("EMPTY_MODEL_RUNNER_OUTPUT",),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("finished_req_ids", "preempted_req_ids"),
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        *("req_id", "prompt_token_ids", "prompt_embeds", "sampling_params", "block_ids"),
        "num_computed_tokens",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    "vllm.v1.core.sched.output:GrammarOutput": (),
    "vllm.outputs:RequestOutput": ("outputs", "prompt_token_ids"),
    "vllm.outputs:CompletionOutput": ("token_ids", "text", "finish_reason"),
    "vllm.config:VllmConfig": (
        *("additional_config", "parallel_config", "scheduler_config", "cache_config"),
        *("model_config", "speculative_config", "compilation_config", "kv_transfer_config"),
        "use_v2_model_runner",
    ),
    "vllm.config:ParallelConfig": (
        *("worker_cls", "data_parallel_size", "data_parallel_index", "use_ubatching"),
        *("pipeline_parallel_size", "prefill_context_parallel_size"),
        *("decode_context_parallel_size", "distributed_executor_backend"),
    ),
    "vllm.config:SchedulerConfig": (
        *("scheduler_cls", "async_scheduling", "enable_chunked_prefill", "policy"),
    ),
    "vllm.config:CacheConfig": ("kv_sharing_fast_prefill", "enable_prefix_caching"),
    "vllm.config:ModelConfig": (
        *("architecture", "registry", "dtype", "max_model_len", "enable_prompt_embeds"),
    ),
    "vllm.config:CompilationConfig": ("cudagraph_mode",),
    "vllm.config:SpeculativeConfig": ("method",),
    "vllm.config:KVTransferConfig": ("is_kv_consumer",),
    "vllm.engine.arg_utils:AsyncEngineArgs": ("enable_log_requests", "disable_log_stats"),
    "vllm.model_executor.models.registry:_LazyRegisteredModel": ("module_name",),
    "vllm.model_executor.models.registry:_ModelRegistry": ("models",),
    "vllm.exceptions:VLLMClientError": (),
    "vllm.exceptions:VLLMValidationError": ("parameter",),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    "vllm.platforms": ("current_platform",),
    "vllm.platforms.interface:Platform": ("is_cpu",),
    "vllm.v1.worker.worker_base:WorkerBase": ("vllm_config", "model_runner"),
    "vllm.v1.worker.worker_base:CompilationTimes": (),
    "vllm.model_executor.models.interfaces:SupportsPP": ("make_empty_intermediate_tensors",),
    "vllm.distributed.parallel_state:GroupCoordinator": ("is_first_rank", "is_last_rank"),
    f"{_V1}:GPUModelRunner": (
        *("execute_model_state", "input_batch", "use_async_spec_decode", "num_computed_tokens"),
        *("intermediate_tensors", "max_num_tokens", "device", "model_config", "model"),
    ),
    f"{_V1}:ExecuteModelState": ("scheduler_output", "hidden_states"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("req_ids", "num_reqs", "num_computed_tokens_cpu"),
    f"{_V2}:GPUModelRunner": ("execute_model_state",),
    f"{_V2}:ExecuteModelState": ("input_batch", "hidden_states"),
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        *("req_ids", "num_reqs", "num_scheduled_tokens", "num_computed_tokens_np"),
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
    "vllm.v1.kv_cache_interface:KVCacheSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": (),
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "vllm.v1.sample.logits_processor:BatchUpdate": ("added", "removed", "moved"),
    "vllm.v1.sample.logits_processor:MoveDirectionality": ("SWAP",),
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor": (),
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsContext": ("expanded_idx_mapping", "pos"),
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcRequestState": (
        *("all_token_ids", "prompt_len"),
    ),
    "vllm.envs": ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_RPC_BASE_PATH"),
}
"""Fields, attributes and properties, by the class or module that has them."""


class Change(NamedTuple):
    """A name that is not what it was.

    Args:
        name: Where it stands.
        what: What has become of it, a clause.
    """

    name: str
    what: str


def look() -> dict[str, dict[str, str]]:
    """What the installed vLLM has of each watched name; without an entry, it has none."""
    found: dict[str, dict[str, str]] = {}
    for owner, names in FUNCTIONS.items():
        holder = _resolve(owner)
        for name in names:
            function = inspect.getattr_static(holder, name, None) if holder else None
            function = getattr(function, "__func__", function)
            if callable(function):
                found[f"{owner}.{name}"] = _read(function)
    for owner, names in FIELDS.items():
        holder = _resolve(owner)
        if holder is not None:
            found.setdefault(owner, {})
            found |= {f"{owner}.{name}": {} for name in names if _has(holder, name)}
    return found


def names() -> list[str]:
    """Every name that is watched."""
    watched = [f"{owner}.{name}" for owner, names in FUNCTIONS.items() for name in names]
    for owner, fields in FIELDS.items():
        watched += [owner, *(f"{owner}.{name}" for name in fields)]
    return list(dict.fromkeys(watched))


def changes(found: dict[str, dict[str, str]], known: dict[str, dict[str, str]]) -> list[Change]:
    """What is not as it was."""
    noted = []
    for name in names():
        if name not in known:
            noted.append(Change(name, "has not been accepted yet"))
        elif name not in found:
            noted.append(Change(name, "is gone"))
        elif found[name].get("signature") != known[name].get("signature"):
            was, now = known[name].get("signature"), found[name].get("signature")
            noted.append(Change(name, f"had the signature {was}, and has {now}"))
        elif found[name].get("code") != known[name].get("code"):
            noted.append(Change(name, "has other code"))
    return noted


def main() -> int:
    """Prints what has changed; 0 only if nothing has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accept", action="store_true", help="what is installed has been read")
    arguments = parser.parse_args()
    import vllm

    found = look()
    if arguments.accept:
        missing = [name for name in names() if name not in found]
        if missing:
            print(f"watch: vLLM {vllm.__version__} has no {', '.join(missing)}", file=sys.stderr)
            return 1
        known = {"version": vllm.__version__, "names": dict(sorted(found.items()))}
        WATCHED.write_text(json.dumps(known, indent=1) + "\n")
    known = json.loads(WATCHED.read_text())
    noted = changes(found, known["names"])
    for change in noted:
        print(f"watch: {change.name} {change.what}")
    print(
        f"watch: {len(names())} names of vLLM {vllm.__version__}, {len(noted)} changed since "
        f"{known['version']}"
    )
    if noted:
        print("watch: read them, adapt, and then: python -m tools.watch --accept")
    return 1 if noted else 0


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        holder = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(holder, name, None) if name else holder


def _has(holder: Any, name: str) -> bool:
    """Whether a class, or its objects once they are made, or a module has a name."""
    if inspect.ismodule(holder):
        return hasattr(holder, name)
    for kind in holder.__mro__:
        if name in vars(kind) or name in vars(kind).get("__annotations__", {}):
            return True
        if kind.__module__.startswith("vllm") and name in _set_on_self(kind):
            return True
    return False


@cache
def _set_on_self(kind: type) -> frozenset[str]:
    """The attributes that a class's code sets on ``self``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _read(function: Any) -> dict[str, str]:
    """A function's signature as it is written, and a digest of its code, without comments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    (whole,) = tree.body
    if not isinstance(whole, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"{function} is no function")
    returns = f" -> {ast.unparse(whole.returns)}" if whole.returns else ""
    return {
        "signature": f"({ast.unparse(whole.args)}){returns}",
        "code": hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16],
    }


if __name__ == "__main__":
    sys.exit(main())

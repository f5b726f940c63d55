"""Which engines' KV caches rows can be kept beside: those of one group of full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def prefix_rows_obstacle(
    vllm_config: Any, kv_cache_config: KVCacheConfig | None = None
) -> str | None:
    """Why an engine cannot serve the rows of cached prefixes, as a clause.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: What a worker's ``initialize_from_config`` gets; without it, what only it
            can tell is left out.

    Returns:
        None if it can: its one group, index 0, is what :class:`BlockTables` follows, with that
        group's ``kv_cache_spec.block_size`` and the configuration's ``num_blocks``.
    """
    return next(_obstacles(vllm_config, kv_cache_config), None)


def _obstacles(vllm_config: Any, kv_cache_config: KVCacheConfig | None) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        yield "prefix caching is off, so no request has a cached prefix"
    if vllm_config.kv_transfer_config is not None:
        yield "a KV connector may load a prefix whose rows were never computed here"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism spreads a block's positions over ranks"
    if vllm_config.speculative_config is not None:
        # A session's segment that ends among accepted drafts leaves the KV cache of those behind
        # its end where the next input's first ids are, and these are not computed.
        yield "with speculation vLLM may hit positions of a session that it has not computed"
    if vllm_config.scheduler_config.policy == "priority":
        # A request that is scheduled, and preempted later in the same step, leaves blocks that
        # were handed out without a word to the worker, and that may be hit without having been
        # computed: https://github.com/vllm-project/vllm/issues/57580.
        yield "under the priority policy vLLM may hit positions that it has not computed"
    if kv_cache_config is not None:
        yield from _group_obstacles(kv_cache_config)


def _group_obstacles(kv_cache_config: KVCacheConfig) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield f"its KV cache has {len(groups)} groups instead of one of full attention"
        return
    for spec in _layers(groups[0].kv_cache_spec):
        # Exactly: some of their subclasses give up blocks of a live request.
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            yield f"its KV cache is a {type(spec).__name__}, not one of full attention"


def _layers(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """A group's specifications: its own, or one a layer where layers differ in size only."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]

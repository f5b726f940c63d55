"""A worker's rows of cached prefixes: what each step adds to the store, and what it reads there."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.worker.block_tables import BlockTables, StepBlocks
from omnistage.worker.cache_group import prefix_rows_obstacle
from omnistage.worker.contract import Occurrence
from omnistage.worker.payload import Rows, StepPayload
from omnistage.worker.prefix_rows import AbsentRows, PrefixRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from omnistage.worker.block_tables import Span


class Prefixes:
    """Rows of what vLLM's prefix cache holds, on the rank that gives payloads.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's ``KVCacheConfig``.

    Raises:
        RuntimeError: This engine's KV cache cannot be followed.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        if obstacle := prefix_rows_obstacle(vllm_config, kv_cache_config):
            raise RuntimeError(f"the stage has prefix_rows=True, and {obstacle}; leave it out")
        (group,) = kv_cache_config.kv_cache_groups
        size = group.kv_cache_spec.block_size
        self._tables = BlockTables(size)
        self._rows = PrefixRows(kv_cache_config.num_blocks, size)
        self._step = StepBlocks([], {}, {})

    def __len__(self) -> int:
        return len(self._tables)

    def follow(self, scheduled: Any) -> None:
        """See every step before it is executed; its ``SchedulerOutput``."""
        self._step = self._tables.update(scheduled)

    def step(self, request_ids: Sequence[str]) -> PrefixStep:
        """What the step that was followed last has to do, for a batch in this order."""
        return PrefixStep(self._rows, self._step, list(request_ids))


class PrefixStep:
    """One step's share: to be completed once, in the order of the steps, in whatever thread.

    Args:
        rows: The store.
        blocks: What the step does to vLLM's blocks.
        request_ids: The requests of the batch, in its order.
    """

    def __init__(self, rows: PrefixRows, blocks: StepBlocks, request_ids: list[str]) -> None:
        self._rows = rows
        self._blocks = blocks
        self._spans = [blocks.computed[name] for name in request_ids]
        self._cached = [blocks.cached.get(name) for name in request_ids]

    def complete(self, payload: StepPayload, prompts: Sequence[int]) -> StepPayload:
        """Store a step's rows, and put those of cached prefixes before them.

        Args:
            payload: Its rows of a position are those of the whole batch.
            prompts: The length of each of its requests' prompts.

        Returns:
            The rows of the payload's requests alone, from where their prefix begins.
        """
        self._rows.begin(self._blocks)
        kept = {k: r for k, r in payload.keys.items() if r.occurrence is not Occurrence.REQUEST}
        for key, rows in kept.items():
            self._rows.store(key, self._spans, _matrix(rows))
        prefixes = [self._cached[place] for place in payload.places]
        for i, prefix in enumerate(prefixes):
            if prefix is not None:
                payload.first_rows[i] = 0
                payload.counts[i] += prefix.end
        for key, rows in kept.items():
            payload.keys[key] = self._joined(key, rows, payload, prefixes, prompts)
        return payload

    def _joined(
        self,
        key: str,
        rows: Rows,
        payload: StepPayload,
        prefixes: Sequence[Span | None],
        prompts: Sequence[int],
    ) -> Rows:
        matrix, counts, pieces = _matrix(rows), [], []
        for i, (place, prefix) in enumerate(zip(payload.places, prefixes, strict=True)):
            own = [matrix[rows.ends[place - 1] if place else 0 : rows.ends[place]]]
            if prefix is not None:
                try:
                    own.insert(0, self._rows.load(key, prefix))
                except AbsentRows as error:
                    payload.errors.setdefault(i, f"{type(error).__name__}: {error}")
            if rows.occurrence is Occurrence.PREFILL:
                own = _until(own, prompts[i] - payload.first_rows[i])
            counts.append(sum(map(len, own)))
            pieces += own
        data = np.concatenate([matrix[:0], *pieces]).reshape(-1)
        return Rows(rows.occurrence, rows.dtype, rows.shape, list(accumulate(counts)), data)


def _matrix(rows: Rows) -> NDArray[np.uint8]:
    """Rows as [rows, bytes of a row]."""
    matrix: NDArray[np.uint8] = rows.data.reshape(rows.ends[-1], -1)
    return matrix


def _until(pieces: list[NDArray[np.uint8]], count: int) -> list[NDArray[np.uint8]]:
    """The first ``count`` rows of pieces that follow one another."""
    kept, left = [], max(count, 0)
    for piece in pieces:
        kept.append(piece[:left])
        left -= len(kept[-1])
    return kept

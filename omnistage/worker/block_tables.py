"""Which KV cache blocks vLLM's requests hold, learnt from the steps that it schedules.

It reads nothing but the public fields of ``SchedulerOutput``, and does no input or output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Span(NamedTuple):
    """Positions of a request and the blocks that hold them.

    Args:
        first: The first position, counted from the prompt's first token.
        end: The position behind the last.
        blocks: Ids of the blocks that these positions touch, the first one's first.
    """

    first: int
    end: int
    blocks: Sequence[int]


class StepBlocks(NamedTuple):
    """What one step does to the blocks of one KV cache group.

    Args:
        fresh: Ids of the blocks that were handed out for it: nothing in them is its request's.
        computed: What each scheduled request computes, by its id.
        cached: The prefix that a request which begins, or begins anew, found in the prefix cache,
            by its id; only where there is one. It may lie in what another request computes in this
            very step.
    """

    fresh: list[int]
    computed: dict[str, Span]
    cached: dict[str, Span]


class BlockTables:
    """The blocks of every live request in one KV cache group.

    It must see every step, in the order of the steps. What it returns is a value of its own, to be
    used whenever.

    Its group is one of full attention and the only one, without a connector (see
    ``cache_group.py``), because it counts on these of vLLM's ways:

    - A table only grows, until its request is preempted or over.
    - Every block is handed out in the step of the request that gets it: alone, as the tail of an
      appended list, or behind the cached prefix in a whole new table.
    - A cached prefix is whole blocks. vLLM copies a block of which only a part is hit
      (``kv_cache_block_copies``), and computes a part of a prefix again (``replay_start``), only
      where other groups stand beside full attention. Were one copied, it would count as fresh.

    Args:
        block_size: Tokens of a block.
        group: Index of the group in vLLM's block ids.
    """

    def __init__(self, block_size: int, group: int = 0) -> None:
        self._block_size = block_size
        self._group = group
        self._tables: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def update(self, scheduled: Any) -> StepBlocks:
        """Follow a step.

        Args:
            scheduled: vLLM's ``SchedulerOutput``.

        Raises:
            KeyError: It goes on with a request that no earlier step began.
        """
        # First: an id may be over, or preempted by a reset of the prefix cache, and begin again in
        # the same step.
        for request_id in scheduled.finished_req_ids:
            self._tables.pop(request_id, None)
        for request_id in scheduled.preempted_req_ids or ():
            self._tables.pop(request_id, None)
        step = StepBlocks([], {}, {})
        starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self._begin(step, new.req_id, new.block_ids[self._group], new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for request_id, start, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            starts[request_id] = start
            blocks = () if block_ids is None else block_ids[self._group]
            if request_id in cached.resumed_req_ids:
                self._tables.pop(request_id, None)
                self._begin(step, request_id, blocks, start)
            else:
                self._tables[request_id].extend(blocks)
                step.fresh.extend(blocks)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            start = starts[request_id]
            step.computed[request_id] = self._span(request_id, start, start + count)
        return step

    def _begin(
        self, step: StepBlocks, request_id: str, blocks: Sequence[int], computed: int
    ) -> None:
        """Take a whole table: a new request's, a resumed one's, or a session's next input's."""
        held = self._tables.get(request_id)
        self._tables[request_id] = list(blocks)
        if held is not None:
            # A session keeps its blocks between two inputs, and what is computed is its own.
            step.fresh.extend(blocks[len(held) :])
            return
        step.fresh.extend(blocks[computed // self._block_size :])
        if computed:
            step.cached[request_id] = self._span(request_id, 0, computed)

    def _span(self, request_id: str, first: int, end: int) -> Span:
        size = self._block_size
        return Span(first, end, self._tables[request_id][first // size : -(-end // size)])

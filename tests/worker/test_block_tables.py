"""Which blocks vLLM's requests hold, step by step, and which engines the row store can serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from omnistage.worker.block_tables import BlockTables, Span
from omnistage.worker.cache_group import prefix_rows_obstacle
from tests.core.factories import make_scheduler


def new(request_id: str, blocks: list[int], computed: int = 0) -> NewRequestData:
    """A request that is scheduled for the first time, or a session's next input."""
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=[],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=computed,
        lora_request=None,
    )


def step(
    *begun: NewRequestData,
    goes_on: dict[str, tuple[int, list[int] | None]] | None = None,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
    **counts: int,
) -> SchedulerOutput:
    """A step of vLLM's.

    Args:
        begun: The requests that begin.
        goes_on: For each one that goes on, what is computed and the blocks that it gets.
        resumed: Those of them that begin anew, with all their blocks.
        finished: Requests that are over.
        preempted: Requests that have lost their blocks.
        counts: Tokens of each request.
    """
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_new_reqs = list(begun)
    goes_on = goes_on or {}
    scheduled.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(goes_on),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks in goes_on.values()],
        num_computed_tokens=[computed for computed, _ in goes_on.values()],
        num_output_tokens=[0] * len(goes_on),
    )
    scheduled.finished_req_ids = set(finished)
    scheduled.preempted_req_ids = set(preempted)
    scheduled.num_scheduled_tokens = counts
    return scheduled


class TestTables:
    def test_a_new_request_gets_all_its_blocks_afresh(self) -> None:
        blocks = BlockTables(4).update(step(new("a", [7, 3, 9]), a=10))
        assert blocks.fresh == [7, 3, 9]
        assert blocks.computed == {"a": Span(0, 10, [7, 3, 9])}
        assert not blocks.cached

    def test_a_cached_prefix_is_not_fresh(self) -> None:
        blocks = BlockTables(4).update(step(new("a", [7, 3, 9], 8), a=2))
        assert blocks.fresh == [9]
        assert blocks.computed == {"a": Span(8, 10, [9])}
        assert blocks.cached == {"a": Span(0, 8, [7, 3])}

    def test_a_request_that_goes_on_gets_the_blocks_that_are_appended(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7]), a=3))
        blocks = tables.update(step(goes_on={"a": (3, None)}, a=1))
        assert (blocks.fresh, blocks.computed) == ([], {"a": Span(3, 4, [7])})
        blocks = tables.update(step(goes_on={"a": (4, [5])}, a=1))
        assert (blocks.fresh, blocks.computed) == ([5], {"a": Span(4, 5, [5])})

    def test_a_span_has_only_the_blocks_that_it_touches(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7, 3, 9, 2]), a=6))
        assert tables.update(step(goes_on={"a": (6, None)}, a=7)).computed == {
            "a": Span(6, 13, [3, 9, 2])
        }

    def test_blocks_that_are_held_ahead_of_the_tokens_are_fresh_when_they_are_handed_out(
        self,
    ) -> None:
        """As with speculation, which has blocks ready for drafts."""
        tables = BlockTables(4)
        assert tables.update(step(new("a", [7, 3]), a=3)).fresh == [7, 3]
        assert tables.update(step(goes_on={"a": (3, None)}, a=3)).fresh == []

    def test_a_resumed_request_begins_anew_in_runner_v1(self) -> None:
        """Which vLLM need not tell of preemptions: its field of those is for V2."""
        tables = BlockTables(4)
        tables.update(step(new("a", [7, 3]), a=6))
        blocks = tables.update(
            step(goes_on={"a": (4, [7, 8])}, resumed=("a",), a=3),
        )
        assert blocks.fresh == [8]
        assert blocks.cached == {"a": Span(0, 4, [7])}
        assert tables.update(step(goes_on={"a": (7, [1])}, a=2)).computed == {
            "a": Span(7, 9, [8, 1])
        }

    def test_a_resumed_request_begins_anew_in_runner_v2(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7, 3]), a=6))
        tables.update(step(preempted=("a",)))
        blocks = tables.update(step(new("a", [7, 8], 4), a=3))
        assert blocks.fresh == [8]
        assert blocks.cached == {"a": Span(0, 4, [7])}

    def test_a_request_preempted_by_a_reset_begins_anew_in_the_same_step(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7, 3]), a=6))
        blocks = tables.update(step(new("a", [3, 7]), preempted=("a",), a=7))
        assert blocks.fresh == [3, 7]
        assert not blocks.cached

    def test_an_id_that_is_used_again_begins_anew(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7, 3]), a=6))
        blocks = tables.update(step(new("a", [3, 7, 1], 4), finished=("a",), a=7))
        assert blocks.fresh == [7, 1]
        assert blocks.cached == {"a": Span(0, 4, [3])}

    def test_a_sessions_next_input_keeps_its_blocks(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7, 3]), a=6))
        blocks = tables.update(step(new("a", [7, 3, 5], 6), a=4))
        assert blocks.fresh == [5]
        assert blocks.computed == {"a": Span(6, 10, [3, 5])}
        assert not blocks.cached, "what it has computed is not a prefix that it found"

    def test_a_request_that_is_over_or_preempted_holds_nothing(self) -> None:
        tables = BlockTables(4)
        tables.update(step(new("a", [7]), new("b", [8]), a=1, b=1))
        assert len(tables) == 2
        tables.update(step(finished=("a", "never scheduled"), preempted=("b",)))
        assert not len(tables)

    def test_what_a_step_said_stays_as_it_was(self) -> None:
        tables = BlockTables(4)
        first = tables.update(step(new("a", [7]), a=3))
        tables.update(step(goes_on={"a": (3, [9])}, a=4))
        assert first.computed == {"a": Span(0, 3, [7])}
        assert first.fresh == [7]

    def test_a_block_hit_in_part_counts_as_fresh(self) -> None:
        """vLLM copies it, where other groups stand beside full attention."""
        blocks = BlockTables(4).update(step(new("a", [7, 3, 9], 6), a=4))
        assert blocks.fresh == [3, 9]

    def test_only_one_group_is_followed(self) -> None:
        both = new("a", [7])
        both.block_ids = ([1, 2], [7])
        assert BlockTables(4, group=1).update(step(both, a=2)).fresh == [7]

    def test_a_request_that_never_began_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            BlockTables(4).update(step(goes_on={"a": (3, [1])}, a=1))


SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.float32,
}


def group(spec: KVCacheSpec) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(["layer"], spec)


def cache_config(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(100, [], [group(spec) for spec in specs])


def full(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**SIZES, **fields})


def vllm_config(**fields: Any) -> Any:
    """The fields that decide, each as it is by default."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=fields.get("prefix_caching", True)),
        kv_transfer_config=fields.get("connector"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=fields.get("dcp", 1),
            prefill_context_parallel_size=fields.get("pcp", 1),
        ),
        speculative_config=fields.get("speculation"),
        scheduler_config=SimpleNamespace(policy=fields.get("policy", "fcfs")),
    )


class TestObstacles:
    def test_a_plain_engine_has_none(self) -> None:
        scheduler = make_scheduler(prefix_cache=True)
        assert prefix_rows_obstacle(scheduler.vllm_config, scheduler.kv_cache_config) is None
        assert prefix_rows_obstacle(scheduler.vllm_config) is None

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"prefix_cache": False}, "prefix caching is off"),
            ({"policy": "priority"}, "priority policy"),
            ({"drafts": 3}, "speculation"),
        ],
    )
    def test_vllms_own_configuration_is_read(self, fields: dict[str, Any], words: str) -> None:
        scheduler = make_scheduler(**{"prefix_cache": True, **fields})
        assert words in str(prefix_rows_obstacle(scheduler.vllm_config))

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"prefix_caching": False}, "prefix caching is off"),
            ({"connector": object()}, "connector"),
            ({"dcp": 2}, "context parallelism"),
            ({"pcp": 2}, "context parallelism"),
            ({"policy": "priority"}, "priority policy"),
            ({"speculation": object()}, "speculation"),
        ],
    )
    def test_a_configuration_in_the_way_is_named(self, fields: dict[str, Any], words: str) -> None:
        for known in (None, cache_config(full())):
            obstacle = prefix_rows_obstacle(vllm_config(**fields), known)
            assert obstacle is not None
            assert words in obstacle

    @pytest.mark.parametrize(
        "spec",
        [
            full(),
            # A model of both kinds, without the hybrid manager: full attention to the KV cache.
            full(sliding_window=128),
            MLAAttentionSpec(**SIZES),
            UniformTypeKVCacheSpecs(
                block_size=16, kv_cache_specs={"a": full(), "b": full(head_size=128)}
            ),
        ],
        ids=lambda spec: type(spec).__name__,
    )
    def test_one_group_of_full_attention_is_served(self, spec: KVCacheSpec) -> None:
        assert prefix_rows_obstacle(vllm_config(), cache_config(spec)) is None

    @pytest.mark.parametrize(
        ("specs", "words"),
        [
            ((), "0 groups"),
            ((full(), full()), "2 groups"),
            ((full(), SlidingWindowSpec(**SIZES, sliding_window=128)), "2 groups"),
            ((SlidingWindowSpec(**SIZES, sliding_window=128),), "SlidingWindowSpec"),
            ((RSWASpec(**SIZES, rswa_window=128),), "RSWASpec"),
            (
                (
                    UniformTypeKVCacheSpecs(
                        block_size=16,
                        kv_cache_specs={
                            "a": full(),
                            "b": RSWASpec(**SIZES, rswa_window=128),
                        },
                    ),
                ),
                "RSWASpec",
            ),
        ],
    )
    def test_other_kv_caches_are_named(self, specs: tuple[KVCacheSpec, ...], words: str) -> None:
        obstacle = prefix_rows_obstacle(vllm_config(), cache_config(*specs))
        assert obstacle is not None
        assert words in obstacle

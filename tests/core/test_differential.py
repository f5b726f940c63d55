"""vLLM's schedulers and ours in lock-step through random schedules: equal after every step.

What each step schedules and returns, each request's state, the queues, the block tables and the
prefix cache are compared; nothing is excepted here, because the one difference in outputs that we
intend (withheld ids, see test_scheduler.py) is off while the engine keeps statistics.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

from omnistage.adapters.processor import HiddenStates, TokenUpdates
from omnistage.request import FinishReason
from tests.core.factories import (
    CHANNEL,
    Driver,
    Harness,
    Published,
    make_request,
    make_scheduler,
)

# Clocks, and what differs only as an object: the requests of the two sides are not the same ones.
SKIPPED = {"arrival_time", "timestamp", "sampling_params", "_block_hasher", "events"}


def snapshot(value: Any) -> Any:
    """A value as plain, comparable data."""
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum):
        return value
    if isinstance(value, Request):
        return fields(vars(value))
    if dataclasses.is_dataclass(value):
        return fields({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, msgspec.Struct):
        return fields({name: getattr(value, name) for name in value.__struct_fields__})
    if isinstance(value, dict):
        return {snapshot(k): snapshot(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(snapshot, value))
    if isinstance(value, list | tuple | deque | ConstantList):
        return [snapshot(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value).__name__


def fields(named: dict[str, Any]) -> dict[str, Any]:
    return {name: snapshot(value) for name, value in named.items() if name not in SKIPPED}


def state(scheduler: Scheduler) -> dict[str, Any]:
    """All that vLLM decides from, of a scheduler."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "requests": {name: snapshot(request) for name, request in scheduler.requests.items()},
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "holding": [request.request_id for request in scheduler.kv_holding_waiting],
        "finished": snapshot(scheduler.finished_req_ids),
        "blocks": {name: snapshot(manager.get_block_ids(name)) for name in scheduler.requests},
        "free": pool.get_num_free_blocks(),
        "cached": [(b.block_hash, b.ref_cnt) for b in pool.blocks],
        "counts": scheduler.get_request_counts(),
        "streaming": scheduler.num_waiting_for_streaming_input,
    }


class Pair:
    """The same operations on vLLM's scheduler and on ours."""

    def __init__(self, *, run_ahead: int, rows: bool = False, **options: Any) -> None:
        ours = make_scheduler(**options)
        self.stock_outputs: list[Any] = []
        self.our_outputs: list[Any] = []
        processor = HiddenStates() if rows else TokenUpdates()
        self.ours = Harness(ours, {CHANNEL: processor}, run_ahead=run_ahead)
        self.ours.rows_of = lambda _: rows
        self.stock = Driver(make_scheduler(stock=True, **options), run_ahead=run_ahead)
        self.committed: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        # As the AR stage asks for rows: the prefix cache is passed over.
        self.options = {"skip_reading_prefix_cache": True} if rows else {}
        self._spy(self.stock, self.stock_outputs)
        self._spy(self.ours, self.our_outputs)

    def add(self, name: str, **options: Any) -> None:
        prompt = options.get("prompt", 0)
        self.prompts[name] = prompt if isinstance(prompt, int) else len(prompt)
        for driver in (self.stock, self.ours):
            options |= self.options
            driver.add(make_request(name, **options))
        self.ours.publish()  # adding can end a session
        self.compare()

    def finish(self, name: str | None, status: RequestStatus) -> None:
        finished = [
            [request.request_id for request in driver.scheduler.finish_requests(name, status)]
            for driver in (self.stock, self.ours)
        ]
        assert finished[0] == finished[1]
        self.ours.publish()
        self.compare()

    def reset(self) -> None:
        """Preempt what runs; under async scheduling, ids in flight of it are dropped."""
        done = [
            driver.scheduler.reset_prefix_cache(reset_running_requests=True)
            for driver in (self.stock, self.ours)
        ]
        assert done[0] == done[1]
        self.compare()

    def step(self) -> bool:
        busy = [driver.step() for driver in (self.stock, self.ours)]
        assert busy[0] == busy[1]
        assert snapshot(self.stock.last_scheduled) == snapshot(self.ours.last_scheduled)
        self.compare()
        return busy[0]

    def drain(self) -> None:
        for _ in range(3000):
            if not self.step() and not self.ours.scheduler.has_unfinished_requests():
                return
        raise AssertionError("the schedulers do not come to an end")

    def compare(self) -> None:
        assert state(self.stock.scheduler) == state(self.ours.scheduler)
        assert snapshot(self.stock_outputs) == snapshot(self.our_outputs)
        for outputs in self.stock_outputs:
            for engine_outputs in outputs.values():
                for output in engine_outputs.outputs:
                    self.committed.setdefault(output.request_id, []).extend(output.new_token_ids)
        self.stock_outputs.clear()
        self.our_outputs.clear()

    @staticmethod
    def _spy(driver: Driver, outputs: list[Any]) -> None:
        updated = driver.updated

        def note(returned: Any) -> None:
            # Copied: vLLM goes on with some of these lists.
            outputs.append(returned)
            updated(returned)

        driver.updated = note  # type: ignore[method-assign, assignment]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 25), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("error"), st.integers(0, 40), st.just(0), st.just(0)),
        st.tuples(st.just("session"), st.integers(1, 30), st.integers(1, 8), st.just(0)),
        st.tuples(st.just("more"), st.integers(0, 40), st.integers(1, 8), st.integers(0, 1)),
        # Together more than the smaller pools hold, so that some are preempted.
        st.tuples(st.just("burst"), st.integers(20, 60), st.integers(20, 60), st.integers(2, 5)),
        st.tuples(st.just("reset"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 30), st.just(0), st.just(0)),
    ),
    min_size=4,
    max_size=30,
)


SCHEDULES = given(
    operations=OPERATIONS,
    asynchronous=st.booleans(),
    run_ahead=st.integers(1, 3),
    prefix_cache=st.booleans(),
    blocks=st.sampled_from([10, 16, 200]),
    budget=st.sampled_from([16, 48, 512]),
    drafts=st.sampled_from([0, 0, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    rows=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@example(  # what is in flight at the reset is dropped
    operations=[("add", 20, 20, 0), ("step", 6, 0, 0), ("reset", 0, 0, 0)],
    asynchronous=True,
    run_ahead=2,
    prefix_cache=True,
    blocks=200,
    budget=512,
    drafts=0,
    policy="fcfs",
    rows=True,
)
@SCHEDULES
def test_every_step_of_ours_equals_vllms(**schedule: Any) -> None:
    lock_step(**schedule)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@SCHEDULES
def test_every_step_equals_vllms_in_thousands_of_schedules(**schedule: Any) -> None:
    lock_step(**schedule)


def lock_step(
    operations: list[tuple[str, int, int, int]],
    asynchronous: bool,
    run_ahead: int,
    prefix_cache: bool,
    blocks: int,
    budget: int,
    drafts: int,
    policy: str,
    rows: bool,
) -> None:
    pair = Pair(
        rows=rows,
        run_ahead=run_ahead if asynchronous and not drafts else 1,
        asynchronous=asynchronous and not drafts,
        prefix_cache=prefix_cache,
        blocks=blocks,
        budget=budget,
        drafts=drafts,
        policy=policy,
    )
    names: list[str] = []
    sessions: list[str] = []
    for kind, a, b, c in operations:
        if kind == "add":
            names.append(f"r{len(names)}")
            # A third starts with the same tokens as another, so that the prefix cache has hits.
            prompt = [100 + (a % 3) * 1000 + i for i in range(a)]
            pair.add(names[-1], prompt=prompt, max_tokens=b, priority=c)
        elif kind == "burst":
            for i in range(c):
                names.append(f"r{len(names)}")
                pair.add(names[-1], prompt=a, max_tokens=b, priority=i % 3)
        elif kind == "session" and not rows:  # refused together
            names.append(f"s{len(names)}")
            sessions.append(names[-1])
            pair.add(names[-1], prompt=a, max_tokens=b, resumable=True)
        elif kind == "more" and sessions:
            name = sessions[a % len(sessions)]
            # Only a live session takes more; what ends it is a request that is not resumable.
            if name in pair.ours.scheduler.requests:
                pair.add(name, prompt=5, max_tokens=b, resumable=bool(c))
        elif kind in {"abort", "error"} and names:
            error = kind == "error"
            status = RequestStatus.FINISHED_ERROR if error else RequestStatus.FINISHED_ABORTED
            pair.finish(names[a % len(names)], status)
        elif kind == "reset" and not any(n in pair.ours.scheduler.requests for n in sessions):
            # A session that waits for input keeps its blocks, and vLLM raises for that.
            pair.reset()
        elif kind == "step":
            for _ in range(a):
                pair.step()
    # Sessions wait for input without end: end them as a closing client would.
    for _ in range(60):
        if not pair.step():
            break
    for name in sessions:
        if name in pair.ours.scheduler.requests:
            pair.finish(name, RequestStatus.FINISHED_ABORTED)
    pair.drain()
    check_published(pair, names)
    if rows:
        check_rows(pair, names)


def check_published(pair: Pair, names: list[str]) -> None:
    """Beside it: exactly what vLLM committed was published, with one terminal a request."""
    published: Published = pair.ours.published
    assert sorted(published.terminals) == sorted(names)
    assert all(len(terminals) == 1 for terminals in published.terminals.values())
    for name in names:
        assert published.ids[name] == pair.committed.get(name, [])
    assert not len(pair.ours.collector)
    assert not len(pair.ours.adapter)
    assert not pair.ours.collector._paused


def check_rows(pair: Pair, names: list[str]) -> None:
    """Each position's row came once, in order; of one that ended by itself none is missing."""
    published = pair.ours.published
    for name in names:
        (terminal,) = published.terminals[name]
        got = published.rows.get(name, [])
        assert got == list(range(len(got)))
        if terminal.reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert len(got) == pair.prompts[name] + terminal.tokens - 1

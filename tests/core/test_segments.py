"""Sessions whose input comes in segments: boundaries, late tokens, early input."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from omnistage.adapters.processor import TokenUpdates
from omnistage.request import FinishReason
from tests.core.factories import CHANNEL, Harness, make_request, make_scheduler

CLOSING: dict[str, Any] = {"prompt": 1, "resumable": False}


def session(*, run_ahead: int, **options: Any) -> Harness:
    scheduler = make_scheduler(asynchronous=run_ahead > 1, **options)
    return Harness(scheduler, {CHANNEL: TokenUpdates()}, run_ahead=run_ahead)


def settle(run: Harness) -> None:
    # Twice idle: an update that leaves nothing in flight may have started the next segment.
    while run.step() or run.step():
        pass


def segments(run: Harness, request_id: str) -> list[list[int]]:
    """The published ids, segment by segment; positions and marks are checked on the way."""
    out: list[list[int]] = [[]]
    ended = False
    for update in run.published.updates:
        if update.request_id != request_id:
            continue
        if ended and update.terminal is None:
            out.append([])
            ended = False
        assert update.terminal is not None or update.segment == len(out) - 1
        assert update.terminal is not None or update.position == len(out[-1])
        out[-1] += update.ids
        ended = ended or update.segment_end
    return out


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_a_segment_that_starts_before_its_predecessors_end_was_published_is_not_stale(
    run_ahead: int,
) -> None:
    run = session(run_ahead=run_ahead)
    publish, run.publish = run.publish, lambda: None  # type: ignore[method-assign]
    run.add(make_request("r", max_tokens=6, resumable=True))
    settle(run)
    for _ in range(2):
        run.add(make_request("r", prompt=4, max_tokens=3, resumable=True))
        settle(run)
    publish()  # the publisher thread has its first turn now
    assert [len(ids) for ids in segments(run, "r")] == [6, 3, 3]
    assert list(chain(*segments(run, "r"))) == run.returned["r"]
    assert sum(update.segment_end for update in run.published.updates) == 3


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_input_that_comes_twice_while_a_segment_runs_waits_its_turn(
    run_ahead: int, prefix_cache: bool
) -> None:
    run = session(run_ahead=run_ahead, prefix_cache=prefix_cache)
    run.add(make_request("r", prompt=40, max_tokens=5, resumable=True))
    run.add(make_request("other", prompt=40, max_tokens=9))
    run.step()
    run.add(make_request("r", prompt=4, max_tokens=2, resumable=True))
    run.add(make_request("r", prompt=7, max_tokens=4, resumable=True))
    settle(run)
    assert [len(ids) for ids in segments(run, "r")] == [5, 2, 4]
    assert run.published.ids["r"] == run.returned["r"]
    assert run.published.ids["other"] == run.returned["other"]
    run.add(make_request("r", **CLOSING))
    run.publish()
    assert [t.tokens for t in run.published.terminals["r"]] == [11]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    early=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    run_ahead=st.integers(1, 3),
)
def test_whenever_input_comes_the_token_in_flight_is_in_no_segment_but_its_own(
    lengths: list[int], early: list[int], run_ahead: int
) -> None:
    run = session(run_ahead=run_ahead)
    run.add(make_request("r", max_tokens=lengths[0], resumable=True))
    for length, steps in zip(lengths[1:], early, strict=False):
        for _ in range(steps):
            run.step()
        run.add(make_request("r", prompt=3, max_tokens=length, resumable=True))
    settle(run)
    assert [len(ids) for ids in segments(run, "r")] == lengths
    assert run.published.ids["r"] == run.returned["r"]
    assert run.scheduler.requests["r"].num_output_placeholders == 0


@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting for input"])
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_an_error_of_the_engines_ends_the_whole_session_not_a_segment(
    waiting: bool, run_ahead: int
) -> None:
    run = session(run_ahead=run_ahead)
    run.add(make_request("r", max_tokens=3 if waiting else 50, resumable=True))
    for _ in range(8):
        run.step()
    run.scheduler.finish_requests("r", RequestStatus.FINISHED_ERROR)
    run.publish()
    assert [t.reason for t in run.published.terminals["r"]] == [FinishReason.ERROR]
    assert not run.published.updates[-1].segment_end
    run.run()
    assert not run.scheduler.requests
    assert len(run.collector) == len(run.adapter) == 0


def test_while_the_scheduler_is_paused_a_sessions_later_input_waits_too() -> None:
    run = session(run_ahead=1)
    run.add(make_request("r", max_tokens=3, resumable=True))
    settle(run)
    before = len(run.published.updates)
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    run.add(make_request("r", prompt=4, max_tokens=2, resumable=True))
    run.add(make_request("r", prompt=4, max_tokens=1, resumable=True))
    for _ in range(5):
        run.step()
    assert len(run.published.updates) == before
    run.scheduler.set_pause_state(PauseState.UNPAUSED)
    settle(run)
    assert [len(ids) for ids in segments(run, "r")] == [3, 2, 1]

"""Rows that reach the scheduler, on vLLM's real schedulers: each position once, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from omnistage.adapters.codec_rows import CodecRows
from omnistage.adapters.processor import Emission, HiddenStates, Step
from omnistage.core.rows import FailedRows, MissingRows, RowCount
from omnistage.request import FinishReason
from omnistage.worker.contract import HIDDEN, Occurrence
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE, Rows, StepPayload
from tests.core.factories import CHANNEL, EOS, Harness, make_request, make_scheduler


def harness(asynchronous: bool, *, run_ahead: int = 2, **options: Any) -> Harness:
    run = Harness(
        make_scheduler(asynchronous=asynchronous, **options),
        {CHANNEL: HiddenStates()},
        run_ahead=run_ahead if asynchronous else 1,
    )
    run.rows_of = lambda _: True
    run.prompts_and_lasts = True
    return run


def check_rows(run: Harness, prompts: dict[str, int]) -> None:
    """Every request that ended by itself has its rows; all have ids and one terminal; no error."""
    assert not run.failed
    published = run.published
    assert sorted(published.terminals) == sorted(prompts)
    for request_id, (terminal,) in published.terminals.items():
        rows = published.rows.get(request_id, [])
        assert rows == list(range(len(rows)))
        due = prompts[request_id] + terminal.tokens - 1 if terminal.tokens else 0
        if terminal.reason is FinishReason.ABORT:
            assert len(rows) <= due or not terminal.tokens
        else:
            assert len(rows) == due
            assert published.ids[request_id] == run.returned[request_id]
            assert published.others[request_id, "prompt"] == [list(range(prompts[request_id]))]
    check_steps(run, prompts)
    assert not len(run.collector)
    assert not len(run.adapter)


def check_steps(run: Harness, prompts: dict[str, int]) -> None:
    """Each id comes with the row that it was sampled from, and each step that samples with one."""
    sampled = dict.fromkeys(prompts, 0)
    rows = dict.fromkeys(prompts, 0)
    lasts: dict[str, list[list[int]]] = {name: [] for name in prompts}
    for update in run.published.updates:
        name = update.request_id
        sampled[name] += len(update.ids)
        rows[name] += sum(info.shape[0] for info in update.tensors if info.name == HIDDEN)
        ends = prompts[name] + sampled[name] - 1
        assert rows[name] == ends if update.ids else rows[name] <= ends
        if update.ids:
            lasts[name].append([ends - 1])
    for name, due in lasts.items():
        assert run.published.others.get((name, "last"), []) == due


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_preempted_requests_rows_are_passed_on_once(asynchronous: bool) -> None:
    # 8 blocks of 16 for 4 requests of 40 + 30: they cannot all stay.
    run = harness(asynchronous, blocks=11, budget=48)
    prompts = {f"r{i}": 40 for i in range(4)}
    run.add(*(make_request(name, prompt=40, max_tokens=30) for name in prompts))
    preempted = 0
    while run.step() or run.scheduler.has_unfinished_requests():
        assert run.last_scheduled is not None
        preempted += len(run.last_scheduled.preempted_req_ids or ())
    assert preempted
    check_rows(run, prompts)


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 30)),
            st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
            st.tuples(st.just("reset"), st.just(0), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        ),
        max_size=40,
    ),
    asynchronous=st.booleans(),
    run_ahead=st.integers(1, 3),
    drafts=st.sampled_from([0, 0, 3]),
    blocks=st.sampled_from([9, 14, 200]),
    budget=st.sampled_from([16, 48, 512]),
)
def test_any_schedule_passes_each_row_on_once_and_in_order(
    operations: list[tuple[str, int, int]],
    asynchronous: bool,
    run_ahead: int,
    drafts: int,
    blocks: int,
    budget: int,
) -> None:
    run = harness(
        asynchronous and not drafts,  # refused together
        run_ahead=run_ahead,
        blocks=blocks,
        budget=budget,
        drafts=drafts,
    )
    prompts: dict[str, int] = {}
    for kind, a, b in operations:
        if kind == "add":
            name = f"r{len(prompts)}"
            prompts[name] = a
            run.add(make_request(name, prompt=a, max_tokens=b))
        elif kind == "abort" and prompts:
            name = f"r{a % len(prompts)}"
            run.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            run.publish()
        elif kind == "reset":
            # Preempts what runs, and drops what is in flight of it.
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif kind == "step":
            for _ in range(a):
                run.step()
    run.run()
    check_rows(run, prompts)


@pytest.mark.parametrize("end_ids", [frozenset(), frozenset({EOS})], ids=["waiting", "knowing"])
def test_a_step_that_a_reset_drops_leaves_its_row_to_the_one_that_counts(
    end_ids: frozenset[int],
) -> None:
    run = Harness(
        make_scheduler(asynchronous=True),
        {CHANNEL: CodecRows(codebooks=2, codebook_size=99, key=HIDDEN, end_ids=end_ids)},
        run_ahead=2,
    )
    run.rows_of = lambda _: True
    run.add(make_request("r", prompt=10, max_tokens=9, ignore_eos=True))
    for _ in range(4):
        run.step()
        run.scheduler.reset_prefix_cache(reset_running_requests=True)
        run.step()
    run.run()
    assert not run.failed
    frames = [i for position in range(9, 18) for i in (position, 0)]
    assert run.published.ids["r"] == frames


class Late:
    """Sends ids 25 by 25, and what a prompt brought with the first of them."""

    requires_token_updates = True
    wants_payload = True

    def open(self, request_id: str, start: Any) -> dict[str, Any]:
        return {"ids": [], "rows": {}}

    def update(self, state: dict[str, Any], step: Step) -> Emission | None:
        state["ids"] += step.ids
        state["rows"] |= {k: v for k, v in step.tensors.items() if k == "prompt"}
        if len(state["ids"]) < 25:
            return None
        made = Emission(tuple(state["ids"]), state["rows"])
        state |= {"ids": [], "rows": {}}
        return made

    def finish(self, state: dict[str, Any], reason: FinishReason) -> None: ...


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("budget", [16, 1024])
def test_what_a_prompt_brought_waits_with_its_request_for_the_first_chunk(
    asynchronous: bool, budget: int
) -> None:
    """Each request's has its own length, whatever its neighbours' are."""
    run = Harness(
        make_scheduler(asynchronous=asynchronous, budget=budget),
        {CHANNEL: Late()},
        run_ahead=2 if asynchronous else 1,
    )
    run.rows_of = lambda _: True
    run.prompts_and_lasts = True
    prompts = {"a": 174, "b": 450, "c": 1}
    run.add(*(make_request(name, prompt=n, max_tokens=50) for name, n in prompts.items()))
    run.run()
    assert not run.failed
    for name, length in prompts.items():
        assert run.published.others[name, "prompt"] == [list(range(length))]
        updates = [u for u in run.published.updates if u.request_id == name and u.ids]
        assert [len(u.ids) for u in updates] == [25, 25]
        assert [[info.name for info in u.tensors] for u in updates] == [["prompt"], []]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_behind_a_prompt_a_step_carries_no_more_than_its_own_rows(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r", prompt=400, max_tokens=100))
    for _ in range(10):
        run.step()
    (record,) = run.collector._records.values()
    assert record.rows is not None
    assert not record.rows._held
    run.run()
    first, *rest = [update for update in run.published.updates if update.ids]
    assert {i.name: i.shape for i in first.tensors} == {
        "hidden": (400, 2),
        "prompt": (400, 2),
        "last": (1, 2),
    }
    assert len(rest) == 99
    for update in rest:
        assert {i.name: i.shape for i in update.tensors} == {"hidden": (1, 2), "last": (1, 2)}


def test_a_step_that_sampled_nothing_brings_no_row_a_request() -> None:
    run = Harness(make_scheduler(budget=16), {CHANNEL: HiddenStates()})
    run.rows_of = lambda _: True
    run.prompts_and_lasts = True
    run.keys = ("last",)
    run.add(make_request("r", prompt=70, max_tokens=3))
    run.run()
    assert [len(update.ids) for update in run.published.updates] == [1, 1, 1]
    assert run.published.others["r", "last"] == [[69], [70], [71]]


def test_a_full_queue_fails_a_request_whose_rows_it_lost() -> None:
    run = Harness(make_scheduler(), {CHANNEL: HiddenStates()}, limit=3)
    run.rows_of = lambda _: True
    publish = run.publish
    run.publish = lambda: None  # type: ignore[method-assign]
    run.add(make_request("early", max_tokens=2), make_request("r", max_tokens=20))
    for _ in range(8):
        run.step()
    run.publish = publish  # type: ignore[method-assign]
    run.publish()
    run.add(make_request("late", max_tokens=3))
    run.run()
    assert [t.kind for t in run.published.terminals["r"]] == ["SubscriberStalled"]
    assert [failure.request_id for failure in run.failed] == ["r"]
    assert run.published.rows["r"] == list(range(12))  # as many as have ids: three steps'
    assert run.published.rows["early"] == list(range(11))
    assert run.published.rows["late"] == list(range(12))


@pytest.mark.parametrize("lost", [0, 1, 2, 5])
def test_a_step_whose_rows_are_lost_fails_its_request_alone(lost: int) -> None:
    """The first, one in the middle, or the last, behind which there is no other."""
    run = harness(False)
    steps = iter(range(100))
    run.rows_of = lambda name: name == "whole" or next(steps) != lost
    run.add(*(make_request(name, prompt=10, max_tokens=6) for name in ("lacking", "whole")))
    run.run()
    (terminal,) = run.published.terminals["lacking"]
    assert (terminal.reason, terminal.kind) == (FinishReason.ERROR, "UpdatesLost")
    assert "did not come from vLLM's worker" in (terminal.error or "")
    assert [failure.request_id for failure in run.failed] == ["lacking"]
    assert run.published.rows["whole"] == list(range(15))
    assert not len(run.collector)


def test_a_request_whose_input_comes_in_pieces_is_refused() -> None:
    run = harness(False)
    run.add(make_request("pieces", resumable=True), make_request("whole"))
    run.step()
    run.publish()
    assert [failure.request_id for failure in run.failed] == ["pieces"]
    assert "pieces cannot have rows" in run.failed[0].error
    assert list(run.published.ids) == ["whole"]


def test_a_cut_keeps_the_bytes_and_positions_of_the_rows_that_are_new() -> None:
    data = bytes(range(40))  # 5 rows of 2 float32
    rows = Rows(Occurrence.TOKEN, "float32", (2,), [5], np.frombuffer(data, np.uint8))
    payload = StepPayload(["r"], [0], [7], [5], {HIDDEN: rows})
    count = RowCount(10)
    count.next = 9
    # 12 is committed after this step: of three drafts one was accepted.
    tensors = count.take(payload, 0, committed=1, sampled=1)
    assert tensors is not None
    hidden = tensors[HIDDEN]
    assert (hidden.first_row, hidden.shape, hidden.data) == (9, (2, 2), data[16:32])
    assert count.next == 11
    assert count.take(payload, 0, committed=1, sampled=1) is None
    more = count.take(payload, 0, committed=1, sampled=2)
    assert more is not None
    assert (more[HIDDEN].first_row, more[HIDDEN].data) == (11, data[32:])
    with pytest.raises(MissingRows, match="rows 12 to 19"):
        count.take(StepPayload(["r"], [0], [20], [1], payload.keys), 0, committed=50, sampled=1)


def test_a_prompts_rows_are_of_one_kind_or_an_error() -> None:
    """Those of the second chunk have as many bytes, and mean something else."""

    def chunk(first: int, dtype: str) -> StepPayload:
        rows = Rows(Occurrence.PREFILL, dtype, (2,), [4], np.zeros(4 * 8, np.uint8))
        return StepPayload(["r"], [0], [first], [4], {"prompt": rows})

    for dtype in ("float32", "int32"):
        count = RowCount(8)
        assert count.take(chunk(0, "float32"), 0, committed=0, sampled=0) is None
        if dtype == "float32":
            tensors = count.take(chunk(4, dtype), 0, committed=0, sampled=1)
            assert tensors is not None
            assert (tensors["prompt"].dtype, tensors["prompt"].shape) == (dtype, (8, 2))
        else:
            with pytest.raises(FailedRows, match="'prompt' are of several kinds"):
                count.take(chunk(4, dtype), 0, committed=0, sampled=1)


def test_without_rows_wanted_a_payload_is_taken_off_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from omnistage.adapters.processor import TokenUpdates

    made: list[Any] = []
    monkeypatch.setattr(RowCount, "__init__", lambda self, prompt, **_: made.append(self))
    run = Harness(make_scheduler(), {CHANNEL: TokenUpdates()})
    run.rows_of = lambda _: True
    run.add(make_request("r", max_tokens=4))
    scheduled = run.scheduler.schedule()
    output = run._execute(scheduled)
    run.updated(run.scheduler.update_from_output(scheduled, output))
    run.run()
    assert PAYLOAD_ATTRIBUTE not in vars(output)
    assert made == []
    assert not run.published.rows
    assert len(run.published.ids["r"]) == 4

"""The contract's own judgement: it must fail what it is there to fail."""

from __future__ import annotations

import pytest

from omnistage.request import FinishReason, Terminal
from omnistage.wire import Update
from tests.contract.stand_in import Outcomes, judge

END = Terminal(FinishReason.STOP)


def complaints(*updates: Update, committed: list[int], over: bool = True) -> list[str]:
    return list(judge("r", list(updates), committed, over=over))


def test_ids_in_order_with_one_terminal_at_the_end_are_accepted() -> None:
    updates = (Update("r", ids=(1, 2)), Update("r", position=2, ids=(3,), terminal=END))
    assert not complaints(*updates, committed=[1, 2, 3])


def test_a_request_that_goes_on_has_no_terminal_yet() -> None:
    assert not complaints(Update("r", ids=(1,)), committed=[1], over=False)


@pytest.mark.parametrize(
    ("updates", "committed"),
    [
        pytest.param([Update("r", ids=(1, 3), terminal=END)], [1, 2, 3], id="an id is missing"),
        pytest.param(
            [Update("r", ids=(1,)), Update("r", position=2, ids=(2,), terminal=END)],
            [1, 2],
            id="a position is skipped",
        ),
        pytest.param([Update("r", ids=(1,))], [1], id="no terminal"),
        pytest.param(
            [Update("r", ids=(1,), terminal=END), Update("r", position=1, terminal=END)],
            [1],
            id="two terminals",
        ),
        pytest.param(
            [Update("r", terminal=END), Update("r", ids=(1,))], [1], id="data after the terminal"
        ),
        pytest.param([], [], id="nothing at all"),
    ],
)
def test_a_finished_request_heard_wrongly_is_reported(
    updates: list[Update], committed: list[int]
) -> None:
    assert complaints(*updates, committed=committed)


def test_a_terminal_before_the_end_is_reported() -> None:
    assert complaints(Update("r", ids=(1,), terminal=END), committed=[1], over=False)


def test_ids_of_earlier_segments_may_have_moved_into_the_prompt() -> None:
    updates = (
        Update("r", ids=(1, 2), segment_end=True),
        Update("r", segment=1, ids=(3,), terminal=END),
    )
    assert not complaints(*updates, committed=[3])
    assert complaints(*updates, committed=[4])


def report(when: str, outcome: str) -> pytest.TestReport:
    return pytest.TestReport("a", ("a", 0, "a"), {}, outcome, None, when)  # type: ignore[arg-type]


def test_a_test_that_fails_in_teardown_has_failed() -> None:
    outcomes = Outcomes()
    for phase, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed")):
        outcomes.add(report(phase, outcome))
    assert outcomes.by_test == {"a": "failed"}


def test_a_skipped_test_has_not_passed() -> None:
    outcomes = Outcomes()
    for phase, outcome in (("setup", "skipped"), ("teardown", "passed")):
        outcomes.add(report(phase, outcome))
    assert outcomes.by_test == {"a": "skipped"}

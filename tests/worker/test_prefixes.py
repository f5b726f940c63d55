"""A step's payload with the rows of cached prefixes before it, on blocks of four positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omnistage.worker import build as build_module
from omnistage.worker.block_tables import Span, StepBlocks
from omnistage.worker.build import build, take
from omnistage.worker.contract import ModelContract, Occurrence
from omnistage.worker.payload import Rows, StepPayload
from omnistage.worker.prefix_rows import PrefixRows
from omnistage.worker.prefixes import PrefixStep
from omnistage.worker.reader import Executed

CONTRACT = ModelContract(
    model="Extended",
    include_hidden=False,
    outputs={
        "codes": Occurrence.TOKEN,
        "voice": Occurrence.REQUEST,
        "prompt": Occurrence.PREFILL,
    },
)


def run_step(
    rows: PrefixRows,
    blocks: StepBlocks,
    first: int,
    wanted: dict[str, int],
    **changes: Any,
) -> StepPayload:
    """A step whose rows are numbered from ``first`` on, of every request that it computes."""
    names = list(blocks.computed)
    counts = [span.end - span.first for span in blocks.computed.values()]
    tokens = torch.arange(first, first + sum(counts))
    outputs = {
        "codes": tokens,
        "prompt": tokens + 1000,
        "voice": torch.arange(len(names)),
        **changes,
    }
    executed = Executed(
        names, counts, [span.first for span in blocks.computed.values()], torch.zeros(0)
    )
    taken = take(executed, outputs, CONTRACT, wanted, prefixes=PrefixStep(rows, blocks, names))
    assert taken is not None
    return build(taken, names)


def values(rows: Rows) -> list[list[int]]:
    numbers = np.frombuffer(rows.data, np.int64).tolist()
    starts = [0, *rows.ends[:-1]]
    return [numbers[start:end] for start, end in zip(starts, rows.ends, strict=True)]


def first_step(rows: PrefixRows) -> StepPayload:
    """Nobody wants anything of ``text``, which computes blocks 3 and 5: rows 0 to 7."""
    return run_step(rows, StepBlocks([3, 5], {"text": Span(0, 8, [3, 5])}, {}), 0, {})


def test_what_a_request_that_wants_nothing_computes_is_there_for_one_that_hits_it() -> None:
    rows = PrefixRows(10, 4)
    payload = first_step(rows)
    assert payload.places == []
    hit = StepBlocks(
        [7], {"other": Span(0, 2, [8]), "r": Span(8, 11, [7])}, {"r": Span(0, 8, [3, 5])}
    )
    payload = run_step(rows, hit, 100, {"r": 10})
    assert [payload.request_ids[place] for place in payload.places] == ["r"]
    assert (payload.first_rows, payload.counts, payload.errors) == ([0], [11], {})
    assert values(payload.keys["codes"]) == [[*range(8), 102, 103, 104]]
    # Ten positions are the prompt's.
    assert values(payload.keys["prompt"]) == [[*range(1000, 1008), 1102, 1103]]
    assert values(payload.keys["voice"]) == [[1]]


def test_a_step_behind_a_cached_prefix_has_its_own_rows_alone() -> None:
    rows = PrefixRows(10, 4)
    first_step(rows)
    hit = StepBlocks([7], {"r": Span(8, 10, [7])}, {"r": Span(0, 8, [3, 5])})
    assert run_step(rows, hit, 100, {"r": 10}).counts == [10]
    for position in (10, 11):
        step = StepBlocks([], {"r": Span(position, position + 1, [7])}, {})
        payload = run_step(rows, step, 100 + position, {"r": 10})
        assert (payload.first_rows, payload.counts) == ([position], [1])
        assert values(payload.keys["codes"]) == [[100 + position]]
        assert values(payload.keys["prompt"]) == [[]]


def test_rows_of_the_same_step_are_there_before_they_are_read() -> None:
    rows = PrefixRows(10, 4)
    both = StepBlocks(
        [3, 4, 6],
        {"late": Span(4, 6, [6]), "early": Span(0, 6, [3, 4])},
        {"late": Span(0, 4, [3])},
    )
    payload = run_step(rows, both, 50, {"late": 6, "early": 6})
    assert (payload.first_rows, payload.counts) == ([0, 0], [6, 6])
    assert values(payload.keys["codes"]) == [[52, 53, 54, 55, 50, 51], [52, 53, 54, 55, 56, 57]]


def test_rows_that_no_step_has_stored_are_an_error_of_who_needs_them() -> None:
    rows = PrefixRows(10, 4)
    first_step(rows)
    hit = StepBlocks(
        [6, 7],
        {"lacks": Span(4, 5, [6]), "r": Span(8, 9, [7])},
        {"lacks": Span(0, 4, [9]), "r": Span(0, 8, [3, 5])},
    )
    payload = run_step(rows, hit, 100, {"lacks": 5, "r": 9})
    assert list(payload.errors) == [0]
    assert payload.errors[0].startswith("AbsentRows: no rows of 'codes' were stored for positions")
    assert values(payload.keys["codes"])[1] == [*range(8), 101]
    assert values(payload.keys["prompt"])[1] == [*range(1000, 1008), 1101]


@pytest.mark.parametrize("where", ["model", "thread"])
def test_a_step_that_could_not_be_taken_leaves_no_former_owners_rows(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PrefixRows(10, 4)
    first_step(rows)
    again = StepBlocks([3, 5], {"new": Span(0, 8, [3, 5])}, {})
    with monkeypatch.context() as patch:
        if where == "thread":
            patch.setattr(build_module, "_to_host", None)
        broken = {"codes": None} if where == "model" else {}
        payload = run_step(rows, again, 100, {"new": 8}, **broken)
    assert set(payload.errors) == {0}
    hit = StepBlocks([7], {"r": Span(8, 9, [7])}, {"r": Span(0, 8, [3, 5])})
    payload = run_step(rows, hit, 200, {"r": 9})
    assert "AbsentRows: no rows of" in payload.errors[0]
    assert "positions 0-7" in payload.errors[0]


def test_rows_of_prompts_must_come_with_every_step_where_they_are_kept() -> None:
    rows = PrefixRows(10, 4)
    payload = run_step(rows, StepBlocks([3], {"r": Span(0, 2, [3])}, {}), 0, {"r": 1}, prompt=None)
    assert "no 'prompt' for a step whose rows of it are due" in payload.errors[0]

"""Rows of one AR stage on their way into the next one's prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage import EngineInput, InputAdapter, RequestRows, RowsInput, StageInput
from omnistage.errors import EngineDead, InvalidRequest, ProtocolError, UpdatesLost
from omnistage.payload import embeddings_of
from omnistage.request import FinishReason, Payload, Terminal, TokenUpdate


def update(
    terminal: Terminal | None = None, request_id: str = "r", **tensors: Payload
) -> TokenUpdate:
    return TokenUpdate(
        request_id=request_id,
        position=0,
        ids=(),
        tensors=tensors,
        start=None,
        terminal=terminal,
        segment=0,
        segment_end=False,
        stamp=0,
    )


def payload(rows: np.ndarray, first: int = 0) -> Payload:
    return Payload(str(rows.dtype), rows.shape, first, memoryview(rows.tobytes()))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 40), st.integers(0, 9))
def test_rows_are_joined_however_they_came(sizes: list[int], first: int, begin: int) -> None:
    rows = np.arange(sum(sizes) * 3, dtype=np.float32).reshape(-1, 3)
    taken, at = RequestRows(), 0
    for size in sizes:
        assert not taken.take(update(hidden=payload(rows[at : at + size], begin + at)))
        at += size
    assert taken.take(update(Terminal(FinishReason.STOP)))
    assert len(taken) == len(rows)
    if first < begin + len(rows):
        left = rows[max(first - begin, 0) :]
        expected = Payload("float32", left.shape, max(first, begin), left.tobytes())
        assert taken.joined(first) == expected
    else:
        with pytest.raises(ProtocolError, match=f"no row of 'hidden' from {first} on"):
            taken.joined(first)


def test_a_gap_another_kind_and_an_error_are_refused() -> None:
    rows = np.zeros((2, 3), np.float32)
    taken = RequestRows("mel")
    assert not taken.take(update(hidden=payload(rows, 9)))  # another key's
    taken.take(update(mel=payload(rows)))
    for first in (0, 1, 3):
        with pytest.raises(UpdatesLost, match=f"from {first} came where 2 was due"):
            taken.take(update(mel=payload(rows, first)))
    for other in (rows.astype(np.float16), np.zeros((2, 4), np.float32)):
        with pytest.raises(ProtocolError, match="became"):
            taken.take(update(mel=payload(other, 2)))
    with pytest.raises(EngineDead, match="why") as raised:
        taken.take(update(Terminal(FinishReason.ERROR, 0, 0, "why", "EngineDead")))
    assert raised.value.request_id == "r"
    with pytest.raises(ProtocolError, match="no row of 'hidden' from 0 on"):
        RequestRows().joined()


def test_an_update_of_another_request_is_refused_and_leaves_the_rows_as_they_were() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    taken = RequestRows()
    taken.take(update(hidden=payload(rows)))
    for terminal in (None, Terminal(FinishReason.STOP), Terminal(FinishReason.ERROR, error="no")):
        with pytest.raises(ProtocolError, match="an update of other came among those of r"):
            taken.take(update(terminal, "other", hidden=payload(rows, 2)))
    assert taken.joined() == Payload("float32", (2, 3), 0, rows.tobytes())


async def test_an_adapter_projects_rows_to_embeddings() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    asked = StageInput(prompt=rows, sampling={"top_k": 5}, seed=3)
    plain = RowsInput(sampling={"temperature": 0.5})
    assert isinstance(plain, InputAdapter)
    sampling = {"temperature": 0.5, "top_k": 5, "seed": 3}
    assert await plain.adapt(asked) == EngineInput(prompt=embeddings_of(rows), sampling=sampling)
    weights = np.ones((3, 2), np.float32)
    made = await RowsInput(lambda given: given @ weights).adapt(asked)
    assert made.prompt == embeddings_of(rows @ weights)


@pytest.mark.parametrize(
    ("adapter", "prompt", "message"),
    [
        (RowsInput(), "text", "are rows of embeddings, got str"),
        (RowsInput(), [1, 2], "are rows of embeddings, got list"),
        (
            RowsInput(lambda rows: rows @ np.zeros((4, 2))),
            np.zeros((2, 3), np.float32),
            r"shape \[2, 3\] cannot be projected: ValueError",
        ),
        (RowsInput(lambda rows: rows[0]), np.zeros((2, 3), np.float32), "got float32"),
    ],
)
async def test_what_is_no_rows_is_refused(adapter: RowsInput, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        await adapter.adapt(StageInput(prompt=prompt))
    assert raised.value.parameter == "prompt"

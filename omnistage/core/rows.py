"""A request's rows as they reach the scheduler: each position once, in order, none missing.

vLLM computes positions again after a preemption, and may compute ahead of ids that it then drops;
what is passed on are the rows of ids that it has committed, from where the last ones ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.request import Payload
from omnistage.worker.contract import Occurrence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omnistage.worker.payload import Rows, StepPayload


class MissingRows(Exception):
    """Rows that were computed did not come; the message names their positions."""


class FailedRows(Exception):
    """The worker could not build them; the message is its own."""


class RowCount:
    """How far a request's rows have been passed on.

    Args:
        prompt: Positions of its prompt.
        only_prefill: Whether none are due behind it.
    """

    __slots__ = ("_held", "_only_prefill", "_prompt", "next")

    def __init__(self, prompt: int, *, only_prefill: bool = False) -> None:
        self._prompt = prompt
        self._only_prefill = only_prefill
        self._held: dict[str, list[Payload]] = {}  # rows of a prompt that is not complete
        self.next = 0  # position of the next row

    def take(
        self, payload: StepPayload, index: int, *, committed: int, sampled: int
    ) -> Mapping[str, Payload] | None:
        """What of a step is new.

        Args:
            payload: The step's payload.
            index: The request's place among those that have one.
            committed: Ids sampled before this step.
            sampled: Ids that this step brought; with speculation, what was accepted and one more.

        Returns:
            Tensors [rows, ...] by key. Those of a row each position have the same rows; one of a
            row each request has one, of the last position; one of a prompt has all of its rows, in
            the step that completes it. None if nothing is new.

        Raises:
            MissingRows: It starts behind the rows that are due.
            FailedRows: There is an error in their place.
        """
        if index in payload.errors:
            raise FailedRows(payload.errors[index])
        first, count = payload.first_rows[index], payload.counts[index]
        # A row comes with the id that was sampled from it. One whose id vLLM dropped, as a reset of
        # the prefix cache does with what is in flight, is computed again; so is one of a draft.
        end = min(first + count, self._prompt + committed + sampled - 1)
        if end <= self.next:
            return None
        if first > self.next:
            raise MissingRows(_missing(self.next, first))
        start, self.next = self.next, end
        tensors = {}
        for key, rows in payload.keys.items():
            if rows.occurrence is Occurrence.TOKEN:
                tensors[key] = _cut(rows, index, start, start - first, end - first)
            elif rows.occurrence is Occurrence.REQUEST:
                if sampled:
                    tensors[key] = _cut(rows, index, end - 1, 0, 1)
            elif start < self._prompt:
                stop = min(end, self._prompt)
                held = self._held.setdefault(key, [])
                held.append(_cut(rows, index, start, start - first, stop - first))
                if stop == self._prompt:
                    tensors[key] = _joined(key, self._held.pop(key))
        return tensors or None

    def check_complete(self, total: int) -> None:
        """Check that the row which the newest id was sampled from has come, and all before it.

        Args:
            total: Ids sampled so far, at least one.

        Raises:
            MissingRows: It has not.
        """
        due = self._prompt if self._only_prefill else self._prompt + total - 1
        if self.next < due:
            raise MissingRows(_missing(self.next, due))


def _cut(rows: Rows, index: int, first: int, start: int, stop: int) -> Payload:
    """Rows ``start`` to ``stop`` of a request's, without a copy."""
    size = len(rows.data) // rows.ends[-1]
    offset = rows.ends[index - 1] if index else 0
    data = memoryview(rows.data)[(offset + start) * size : (offset + stop) * size]
    return Payload(rows.dtype, (stop - start, *rows.shape), first, data)


def _joined(key: str, pieces: list[Payload]) -> Payload:
    kinds = {(piece.dtype, piece.shape[1:]) for piece in pieces}
    if len(kinds) > 1:
        raise FailedRows(f"rows of {key!r} are of several kinds in one prompt: {sorted(kinds)}")
    ((dtype, shape),) = kinds
    count = sum(piece.shape[0] for piece in pieces)
    return Payload(dtype, (count, *shape), 0, b"".join(piece.data for piece in pieces))


def _missing(start: int, end: int) -> str:
    return (
        f"rows {start} to {end - 1} of the request did not come from vLLM's worker; "
        "its log says why"
    )

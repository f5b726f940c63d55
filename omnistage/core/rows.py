"""A request's rows as they reach the scheduler: each position once, in order, none missing.

vLLM computes positions again after a preemption, and may compute ahead of ids that it then drops;
what is passed on are the rows of ids that it has committed, from where the last ones ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.request import Payload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omnistage.worker.payload import StepPayload


class MissingRows(Exception):
    """Rows that were computed did not come; the message names their positions."""


class RowCount:
    """How far a request's rows have been passed on.

    Args:
        prompt: Tokens of its prompt.
    """

    __slots__ = ("_prompt", "next")

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self.next = 0  # position of the next row

    def take(
        self, payload: StepPayload, index: int, *, committed: int, sampled: int
    ) -> Mapping[str, Payload] | None:
        """The new rows of a step.

        Args:
            payload: The step's payload.
            index: The request's place in it.
            committed: Ids sampled before this step.
            sampled: Ids that this step brought; with speculation, what was accepted and one more.

        Returns:
            Tensors [rows, ...] by key, all of the same rows; None if none of them is new.

        Raises:
            MissingRows: It starts behind the rows that are due.
        """
        first, count = payload.first_rows[index], payload.counts[index]
        if first > self.next:
            raise MissingRows(_missing(self.next, first))
        # A row stands for the id at its position, which must be committed: the last sampled one's
        # is not computed yet, and one computed for a rejected or dropped id is none.
        end = min(first + count, self._prompt + committed + max(sampled - 1, 0))
        if end <= self.next:
            return None
        start, self.next = self.next, end
        tensors = {}
        for key, rows in payload.keys.items():
            data = rows.data[index]
            size = len(data) // count
            if end - start < count:
                data = data[(start - first) * size : (end - first) * size]
            tensors[key] = Payload(rows.dtype, (end - start, *rows.shape), start, data)
        return tensors

    def check_complete(self, total: int) -> None:
        """Check that the row which the newest id was sampled from has come, and all before it.

        Args:
            total: Ids sampled so far, at least one.

        Raises:
            MissingRows: It has not.
        """
        due = self._prompt + total - 1
        if self.next < due:
            raise MissingRows(_missing(self.next, due))


def _missing(start: int, end: int) -> str:
    return (
        f"rows {start} to {end - 1} of the request did not come from vLLM's worker; "
        "its log says why"
    )

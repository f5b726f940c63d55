"""What a step's payload is between vLLM's worker and its scheduler: plain bytes with positions.

It rides on the runner's own output as one attribute; neither side's vLLM reads it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omnistage.worker.contract import Occurrence

PAYLOAD_ATTRIBUTE: Final = "omnistage_payload"
"""Where a step's payload stands on vLLM's ``ModelRunnerOutput``."""

WANTS_PAYLOAD: Final = "omnistage_wants_payload"
"""In a request's ``extra_args``: True if its rows are to leave the worker. All a worker knows."""


class Rows(msgspec.Struct, frozen=True):
    """One key's rows of one step.

    Args:
        occurrence: What a row stands for.
        dtype: Name of their dtype, as torch spells it.
        shape: The shape of one row.
        ends: For each of the payload's requests, in its order, the row behind its last.
        data: All of them behind one another, C order: a numpy array of uint8, [bytes]. vLLM's
            queue between its processes carries a large one beside what it pickles.
    """

    occurrence: Occurrence
    dtype: str
    shape: tuple[int, ...]
    ends: list[int]
    data: Any


class StepPayload(msgspec.Struct, frozen=True):
    """What one step computed, of the requests that want it.

    Args:
        request_ids: The very list of ids that vLLM returns with the step.
        places: Which of them want it.
        first_rows: Absolute position of each one's first row: how many tokens were computed before.
        counts: How many positions each one has computed.
        keys: The rows, by key.
        errors: Of those whose rows could not be taken, by their index in ``places``: why.
    """

    request_ids: list[str]
    places: list[int]
    first_rows: list[int]
    counts: list[int]
    keys: dict[str, Rows]
    errors: dict[int, str] = {}

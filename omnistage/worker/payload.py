"""What a step's payload is between vLLM's worker and its scheduler: plain bytes with positions.

It rides on the runner's own output as one attribute; neither side's vLLM reads it.
"""

from __future__ import annotations

from typing import Final

import msgspec

PAYLOAD_ATTRIBUTE: Final = "omnistage_payload"
"""Where a step's payload stands on vLLM's ``ModelRunnerOutput``."""

WANTS_PAYLOAD: Final = "omnistage_wants_payload"
"""In a request's ``extra_args``: True if its rows are to leave the worker. All a worker knows."""

HIDDEN: Final = "hidden"
"""The key of the rows of hidden states, [rows, hidden size] in the model's dtype."""


class Rows(msgspec.Struct, frozen=True):
    """One key's rows of one step.

    Args:
        dtype: Name of their dtype, as torch spells it.
        shape: The shape of one row.
        data: Each request's rows, C order; the requests are those of the payload, in its order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: list[bytes]


class StepPayload(msgspec.Struct, frozen=True):
    """The rows that one step computed, of the requests that want them.

    Args:
        request_ids: vLLM's own ids of these requests.
        first_rows: Absolute position of each one's first row: how many tokens were computed before.
        counts: How many rows each one has.
        keys: The rows, by key.
    """

    request_ids: list[str]
    first_rows: list[int]
    counts: list[int]
    keys: dict[str, Rows]

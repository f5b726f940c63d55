"""What the scheduler thread hands to the publisher thread: the events of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from omnistage.request import FinishReason, Payload

if TYPE_CHECKING:
    from omnistage.core.rows import RowCount
    from omnistage.wire import Admission


class Record:
    """A live request with a consumer; the publisher thread keys its state by the same object."""

    __slots__ = ("admission", "rows", "segment", "takes_tokens", "tokens", "total", "withheld")

    def __init__(
        self,
        admission: Admission,
        *,
        takes_tokens: bool,
        withhold: bool = False,
        rows: RowCount | None = None,
    ) -> None:
        self.admission = admission
        self.takes_tokens = takes_tokens
        self.rows = rows  # None: it has none
        self.withheld: list[int] | None = [] if withhold else None
        self.tokens = 0  # of this segment
        self.total = 0
        self.segment = 0


class Ending(msgspec.Struct, frozen=True):
    """The end of a request, or of a segment of it.

    Args:
        reason: Why.
        tokens: Ids sampled in the whole request.
        segment: True if more may follow.
        error: For an error of ours, the sentence and class name to report.
    """

    reason: FinishReason
    tokens: int
    segment: bool = False
    error: tuple[str, str] | None = None


class Event(msgspec.Struct, frozen=True):
    """One request in one step, as the scheduler thread saw it."""

    record: Record
    ids: tuple[int, ...] = ()
    position: int = 0
    segment: int = 0
    tensors: Mapping[str, Payload] | None = None
    ending: Ending | None = None
    paused: bool = False


class StepEvents(msgspec.Struct, frozen=True):
    """What one step hands over.

    Args:
        stamp: Monotonic ns.
        events: At most one a request.
    """

    stamp: int
    events: list[Event]


class Refusal(msgspec.Struct, frozen=True):
    """An admission record that could not be read: the request runs, but has no consumer."""

    request_id: str
    error: str

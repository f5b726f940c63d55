"""The scheduler thread's share: note who is served, collect each step, hand it over.

It reads what vLLM returns for a step, and may hold a request's ids back until its last output; it
touches no state of vLLM's, never raises and never waits.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.request import RequestStatus

from omnistage.core.events import Ending, Event, Record, Refusal, StepEvents
from omnistage.core.rows import FailedRows, MissingRows, RowCount
from omnistage.core.withhold import is_plain, may_withhold
from omnistage.errors import PayloadError, ProtocolError, SubscriberStalled, UpdatesLost
from omnistage.request import FinishReason, Payload
from omnistage.transport.handover import HandOver
from omnistage.wire import MAX_ERROR, decode_admission
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE, StepPayload

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

log = logging.getLogger(__name__)

EXTRA_ARG: Final = "omnistage"


class StepCollector:
    """The scheduler's side of the output adapter.

    Args:
        takes_tokens: For each channel, whether its processor declared ``requires_token_updates``.
        limit: Steps that may wait.
        log_stats: Whether the engine keeps statistics.
        takes_rows: The channels whose processors want payloads, where the workers give them.
        only_prefill: Whether nothing of a payload is due behind a prompt.
    """

    def __init__(
        self,
        takes_tokens: Mapping[str, bool],
        limit: int,
        *,
        log_stats: bool = True,
        takes_rows: Collection[str] = (),
        only_prefill: bool = False,
    ) -> None:
        self._takes_rows = takes_rows
        self._only_prefill = only_prefill
        self._log_stats = log_stats
        self.steps: HandOver[StepEvents | Refusal] = HandOver(limit)
        self._takes_tokens = takes_tokens
        self._records: dict[str, Record] = {}
        self._names: set[str] = set()  # the records' own ids, by which consumers know them
        self._paused: set[str] = set()  # preempted and not resumed yet
        self._finished: dict[str, FinishReason] | None = (
            None  # a dict while a step is being updated
        )
        self._payload: StepPayload | None = None

    def __len__(self) -> int:
        return len(self._records)

    def admit(self, request: Any) -> None:
        """Note a request that vLLM has just queued, if it has a consumer."""
        try:
            params = request.sampling_params
            raw = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
            if raw is None:
                return
            admission = decode_admission(raw)
            if admission.final_stage or not admission.consumers:
                return
            takes = [self._takes_tokens[channel] for channel, _ in admission.consumers]
            if admission.request_id in self._names:
                # Consumers could not tell the two apart, and the first is not to suffer for it.
                raise ProtocolError(f"request id {admission.request_id!r} is in use")
            rows = None
            if any(channel in self._takes_rows for channel, _ in admission.consumers):
                if request.resumable:
                    raise ProtocolError("a request whose input comes in pieces cannot have rows")
                rows = RowCount(request.num_prompt_tokens, only_prefill=self._only_prefill)
        except KeyError as error:
            self._refuse(request, f"unknown channel {error}; known: {sorted(self._takes_tokens)}")
        except (ProtocolError, AttributeError, TypeError) as error:
            self._refuse(request, str(error))
        else:
            self._records[request.request_id] = Record(
                admission,
                takes_tokens=any(takes),
                withhold=may_withhold(request, log_stats=self._log_stats),
                rows=rows,
            )
            self._names.add(admission.request_id)

    def begin(self, runner_output: Any) -> None:
        """Take the payload off a step's output before vLLM sees it."""
        self._finished = {}
        # From __dict__: the attribute stands on the instance or nowhere.
        attributes = getattr(runner_output, "__dict__", {})
        self._payload = attributes.pop(PAYLOAD_ATTRIBUTE, None)

    def abandon(self) -> None:
        """Forget a step whose update failed."""
        self._finished = None
        self._payload = None

    def finished(self, requests: Iterable[Any]) -> None:
        """Note requests that vLLM has just finished from outside or inside a step."""
        ended = {
            request.request_id: _reason(request.get_finished_reason())
            for request in requests
            if request.request_id in self._records
        }
        if self._finished is not None:
            # Inside a step: ids of the same step may still have to go first.
            self._finished.update(ended)
        elif ended:
            self._hand_over([self._end(request_id, reason) for request_id, reason in ended.items()])

    def collect(
        self,
        outputs: dict[int, Any],
        alive: Mapping[str, Any],
        preempted: Iterable[str] | None = None,
    ) -> None:
        """Hand over what a step brought, and take out of ``outputs`` what is withheld.

        Args:
            outputs: What vLLM's ``update_from_output`` returned.
            alive: The scheduler's ``requests``.
            preempted: Requests that the step preempted.
        """
        finished, arrived = self._finished or {}, _Arrived(self._payload)
        self.abandon()
        if not self._records:
            return
        events: dict[Record, Event] = {}
        for client, engine_outputs in list(outputs.items()):
            passed = []
            for output in engine_outputs.outputs:
                record = self._records.get(output.request_id)
                if record is not None:
                    self._take(events, record, output, arrived, alive)
                if record is None or not _withhold(record, output):
                    passed.append(output)
            if len(passed) < len(engine_outputs.outputs):
                engine_outputs.outputs = passed
                if not passed and _is_bare(engine_outputs):
                    del outputs[client]
        for request_id in arrived.rest():
            record = self._records.get(request_id)
            if record is not None:
                self._take_rows(events, request_id, record, arrived)
        for request_id in preempted or ():
            self._pause(events, request_id, alive)
        for request_id, reason in finished.items():
            if request_id in self._records:
                _add(events, self._end(request_id, reason))
        if events:
            self._hand_over(list(events.values()))

    def _take(
        self,
        events: dict[Record, Event],
        record: Record,
        output: Any,
        arrived: _Arrived,
        alive: Mapping[str, Any],
    ) -> None:
        request_id = output.request_id
        ids = tuple(output.new_token_ids)
        position, segment = record.tokens, record.segment
        try:
            tensors = arrived.take(request_id, record, sampled=len(ids))
            if ids and record.rows is not None:
                record.rows.check_complete(record.total + len(ids))
        except (MissingRows, FailedRows) as error:
            events[record] = self._fail(request_id, error)
            return
        record.tokens += len(ids)
        record.total += len(ids)
        ending = None
        if output.finish_reason is not None:
            reason = _reason(output.finish_reason)
            request = alive.get(request_id)
            if request is None or request.is_finished():
                ending = Ending(reason, record.total)
                self._forget(request_id)
            else:
                # A streaming segment: the scheduler keeps the request for its next input.
                ending = Ending(reason, record.total, segment=True)
                record.segment += 1
                record.tokens = 0
        paused = request_id in self._paused and ending is None
        if paused and alive[request_id].status is not RequestStatus.PREEMPTED:
            self._paused.discard(request_id)
            paused = False
        if tensors or ending is not None or (ids and record.takes_tokens):
            _add(events, Event(record, ids, position, segment, tensors, ending, paused))

    def _take_rows(
        self, events: dict[Record, Event], request_id: str, record: Record, arrived: _Arrived
    ) -> None:
        """Take rows that came without ids, as those of a prefill's chunks do."""
        try:
            tensors = arrived.take(request_id, record, sampled=0)
        except (MissingRows, FailedRows) as error:
            events[record] = self._fail(request_id, error)
        else:
            if tensors:
                events[record] = Event(record, (), record.tokens, record.segment, tensors)

    def _fail(self, request_id: str, error: MissingRows | FailedRows) -> Event:
        """End a request that lacks rows; the AR stage is told, and aborts it in vLLM."""
        record = self._forget(request_id)
        kind = PayloadError if isinstance(error, FailedRows) else UpdatesLost
        failure = (str(error)[:MAX_ERROR], kind.__name__)
        return Event(record, ending=Ending(FinishReason.ERROR, record.total, error=failure))

    def _pause(
        self, events: dict[Record, Event], request_id: str, alive: Mapping[str, Any]
    ) -> None:
        """Say that no update is due from a request that waits to be resumed."""
        record, request = self._records.get(request_id), alive.get(request_id)
        # By now it may have been resumed, or ended, under async scheduling.
        if record and request and request.status is RequestStatus.PREEMPTED:
            self._paused.add(request_id)
            _add(events, Event(record, (), record.tokens, record.segment, paused=True))

    def _end(self, request_id: str, reason: FinishReason) -> Event:
        record = self._forget(request_id)
        return Event(record, (), record.tokens, record.segment, None, Ending(reason, record.total))

    def _forget(self, request_id: str) -> Record:
        record = self._records.pop(request_id)
        self._names.discard(record.admission.request_id)
        self._paused.discard(request_id)
        return record

    def _hand_over(self, events: list[Event]) -> None:
        step = StepEvents(time.monotonic_ns(), events)
        if self.steps.put(step):
            return
        # Full: these updates are lost, so their requests must fail. One event each and then the
        # record is gone, so that what exceeds the limit is bounded by the requests that are alive.
        error = ("the publisher is behind; the step queue is full", SubscriberStalled.__name__)
        lost = {event.record: None for event in events}
        for request_id in [name for name, record in self._records.items() if record in lost]:
            self._forget(request_id)
        endings = [
            Event(record, ending=Ending(FinishReason.ERROR, record.total, error=error))
            for record in lost
        ]
        self.steps.put_beyond_limit(StepEvents(step.stamp, endings))

    def _refuse(self, request: Any, error: str) -> None:
        log.warning("request %s has no consumer: %s", request.request_id, error)
        self.steps.put(Refusal(str(request.request_id), error))


class _Arrived:
    """A step's payload, of which each request's part is taken once."""

    def __init__(self, payload: StepPayload | None) -> None:
        self._payload = payload
        self._places: dict[str, int] = {}
        if payload is not None:
            names = payload.request_ids
            self._places = {names[place]: i for i, place in enumerate(payload.places)}

    def take(
        self, request_id: str, record: Record, *, sampled: int
    ) -> Mapping[str, Payload] | None:
        """A request's new rows; see :meth:`RowCount.take`."""
        index = self._places.pop(request_id, None)
        if index is None or self._payload is None or record.rows is None:
            return None
        return record.rows.take(self._payload, index, committed=record.total, sampled=sampled)

    def rest(self) -> list[str]:
        """The requests whose rows have not been taken."""
        return list(self._places)


def _add(events: dict[Record, Event], event: Event) -> None:
    """Add a request's event to a step; an error after its ids makes one event with them."""
    before = events.get(event.record)
    if before is not None:
        event = Event(
            event.record,
            before.ids + event.ids,
            before.position,
            before.segment,
            before.tensors or event.tensors,
            event.ending,
            event.paused,
        )
    events[event.record] = event


def _withhold(record: Record, output: Any) -> bool:
    """Keep a plain output's ids back, or give another one, as the last is, all that were."""
    if record.withheld is None:
        return False
    if is_plain(output):
        record.withheld += output.new_token_ids
        return True
    if record.withheld:
        output.new_token_ids = record.withheld + output.new_token_ids
        record.withheld = []
    return False


def _is_bare(engine_outputs: Any) -> bool:
    """Whether a client's outputs of a step carry nothing but the requests' own."""
    return engine_outputs.finished_requests is None and engine_outputs.scheduler_stats is None


def _reason(reason: object) -> FinishReason:
    """VLLM's finish reason as ours; one that a later vLLM adds counts as an error."""
    try:
        return FinishReason(str(reason))
    except ValueError:
        return FinishReason.ERROR

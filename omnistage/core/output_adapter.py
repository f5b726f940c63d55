"""The output adapter: from a step's events to each topic's messages, through the processors.

It runs in the publisher thread, does no I/O, and holds the state of every request that is open on a
channel: exactly one terminal leaves for each of its topics, whatever happens.
"""

from __future__ import annotations

import logging
import operator
import time
from typing import TYPE_CHECKING, Any, Final

from omnistage.adapters.processor import ChunkProcessor, Emission, Step
from omnistage.core.events import Ending, Event, Record, Refusal, StepEvents
from omnistage.errors import OmniStageError, ProcessorError, ProtocolError
from omnistage.request import FinishReason, Payload, Terminal
from omnistage.transport.publisher import Outgoing
from omnistage.wire import (
    MAX_ERROR,
    PROTOCOL_VERSION,
    Buffer,
    Failed,
    TensorInfo,
    Update,
    buffer_bytes,
    topic,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omnistage.transport.handover import HandOver

log = logging.getLogger(__name__)

MAX_IDS: Final = 65_536
"""Ids of one emission; a message of a step holds those of all its requests."""
MAX_TENSORS: Final = 64

SLOW_STEP_NS: Final = 1_000_000
"""Processors that hold the interpreter longer than this in one step delay the scheduler."""

_NO_TENSORS: Final[Mapping[str, Payload]] = {}


class _Channel:
    """One request on one channel."""

    __slots__ = ("dropped", "position", "processor", "started", "state", "topics")

    def __init__(self, processor: ChunkProcessor, topics: list[bytes], state: Any) -> None:
        self.processor = processor
        self.topics = topics
        self.state = state
        self.position = 0
        self.dropped = 0
        self.started = False


class _Open:
    """One request on all its channels; a failed one only waits for the scheduler's terminal."""

    __slots__ = ("channels", "failed", "topics")

    def __init__(self, topics: list[bytes]) -> None:
        self.channels: list[_Channel] = []
        self.topics = topics
        self.failed = False


class _Batch:
    """The messages of one step while they are built."""

    def __init__(self, stamp: int) -> None:
        self.stamp = stamp
        self._updates: dict[bytes, list[Update]] = {}
        self._buffers: dict[bytes, list[Buffer]] = {}

    def add(self, destination: bytes, update: Update, tensors: Mapping[str, Payload]) -> None:
        if tensors:
            buffers = self._buffers.setdefault(destination, [])
            infos = []
            for name, tensor in tensors.items():
                infos.append(
                    TensorInfo(name, tensor.dtype, tensor.shape, tensor.first_row, len(buffers))
                )
                buffers.append(tensor.data)
            update = _with_tensors(update, tuple(infos))
        self._updates.setdefault(destination, []).append(update)

    def messages(self) -> Iterator[Outgoing]:
        for destination, updates in self._updates.items():
            buffers = tuple(self._buffers.get(destination, ()))
            yield Outgoing(destination, self.stamp, tuple(updates), buffers)


class OutputAdapter:
    """Runs the processors and builds one message a step and topic.

    Args:
        channels: The processor of each channel.
        steps: The scheduler's hand-over queue.
    """

    def __init__(
        self, channels: Mapping[str, ChunkProcessor], steps: HandOver[StepEvents | Refusal]
    ) -> None:
        self.slow_steps = 0
        self._channels = channels
        self._steps = steps
        self._open: dict[Record, _Open] = {}
        self._failures: list[Failed] = []
        self._ended: list[Record] = []
        self._errors = _Batch(0)

    def __len__(self) -> int:
        return len(self._open)

    def fileno(self) -> int:
        """Readable when the scheduler has handed something over."""
        return self._steps.fileno()

    def messages(self) -> Iterator[Outgoing]:
        """Build the messages of every step handed over so far, in order."""
        for item in self._steps.drain():
            if isinstance(item, Refusal):
                self._failures.append(
                    Failed(PROTOCOL_VERSION, item.request_id, ProtocolError.__name__, item.error)
                )
                continue
            batch = _Batch(item.stamp)
            began = time.thread_time_ns()  # not the wall clock: a preempted thread holds nothing
            for event in item.events:
                self._take(batch, event)
            if time.thread_time_ns() - began > SLOW_STEP_NS:
                self._note_slow(time.thread_time_ns() - began)
            yield from batch.messages()
            yield from self._error_messages()
            # Only now: until its terminal was sent, a request can still be found undelivered.
            for record in self._ended:
                self._open.pop(record, None)
            self._ended.clear()

    def failures(self) -> list[Failed]:
        """Take the requests given up since the last call."""
        taken, self._failures = self._failures, []
        return taken

    def release(self, request_id: str) -> None:
        """Drop whatever is still held of a request that was aborted.

        The scheduler's terminal has come before this and removed it; only a request whose terminal
        was lost with a full queue can still be here.
        """
        for record in [r for r in self._open if r.admission.request_id == request_id]:
            del self._open[record]

    def undelivered(self, destination: bytes, error: OmniStageError) -> None:
        """Fail every request that is open on a topic whose message could not be sent."""
        for record, request in self._open.items():
            if destination in request.topics and not request.failed:
                self._fail(self._errors, record, request, error, unless=destination)

    def _error_messages(self) -> Iterator[Outgoing]:
        """Terminals that failing one topic's requests brought up on their other topics."""
        batch, self._errors = self._errors, _Batch(time.monotonic_ns())
        yield from batch.messages()

    def _take(self, batch: _Batch, event: Event) -> None:
        record, ending = event.record, event.ending
        request = self._open.get(record)
        try:
            if request is None:
                request = self._admit(record)
            if not request.failed:
                self._run(batch, event, request)
        except OmniStageError as error:
            # _admit stores the request before a processor can raise.
            self._fail(batch, record, self._open[record], error)
        if ending is not None and not ending.segment:
            self._ended.append(record)

    def _admit(self, record: Record) -> _Open:
        admission = record.admission
        by_channel: dict[str, list[bytes]] = {}
        for channel, subscriber in admission.consumers:
            by_channel.setdefault(channel, []).append(topic(channel, subscriber))
        request = _Open([t for topics in by_channel.values() for t in topics])
        self._open[record] = request
        for name, topics in by_channel.items():
            processor = self._channels[name]
            try:
                state = processor.open(admission.request_id, admission.start)
            except BaseException as error:
                # Whatever it is, SystemExit too: it must not end the publisher's thread.
                raise _blame(processor, admission.request_id, error) from error
            request.channels.append(_Channel(processor, topics, state))
        return request

    def _run(self, batch: _Batch, event: Event, request: _Open) -> None:
        if event.ending is not None and event.ending.error is not None:
            message, kind = event.ending.error
            self._end_in_error(batch, event.record, request, message, kind)
            return
        request_id = event.record.admission.request_id
        # All channels before any is sent: a processor that raises must not leave half a step
        # behind.
        emissions = [self._emit(channel, event, request_id) for channel in request.channels]
        for channel, (ids, tensors) in zip(request.channels, emissions, strict=True):
            self._publish(batch, event, channel, ids, tensors)

    def _emit(
        self, channel: _Channel, event: Event, request_id: str
    ) -> tuple[tuple[int, ...], Mapping[str, Payload]]:
        """Call one channel's processor as its declaration and the event ask for."""
        processor, ending, tensors = channel.processor, event.ending, event.tensors
        try:
            ids: tuple[int, ...] = ()
            rows = _NO_TENSORS
            if tensors or (event.ids and processor.requires_token_updates):
                step = Step(event.ids, event.position, tensors or _NO_TENSORS)
                ids, rows = _checked(channel, processor.update(channel.state, step), event.ids)
            if ending is not None:
                more, last = _checked(channel, processor.finish(channel.state, ending.reason))
                if twice := rows.keys() & last.keys():
                    raise ValueError(f"tensors {sorted(twice)} emitted twice in one step")
                ids, rows = ids + more, {**rows, **last}
        except BaseException as error:
            raise _blame(processor, request_id, error) from error
        return ids, rows

    def _publish(
        self,
        batch: _Batch,
        event: Event,
        channel: _Channel,
        ids: tuple[int, ...],
        tensors: Mapping[str, Payload],
    ) -> None:
        ending, admission = event.ending, event.record.admission
        pause = event.paused and channel.started
        if not ids and not tensors and ending is None and not pause:
            return
        over = ending is not None and not ending.segment
        update = Update(
            admission.request_id,
            admission.generation,
            event.segment,
            channel.position,
            ids,
            (),
            None if channel.started else admission.start,
            _terminal(ending, channel.dropped) if ending is not None and over else None,
            ending is not None and not over,
            event.paused,
        )
        channel.started = True
        channel.position = 0 if update.segment_end else channel.position + len(ids)
        for destination in channel.topics:
            batch.add(destination, update, tensors)

    def _fail(
        self,
        batch: _Batch,
        record: Record,
        request: _Open,
        error: OmniStageError,
        *,
        unless: bytes | None = None,
    ) -> None:
        """Give a request up: terminals on its topics, a report to the AR stage, no more updates."""
        log.error(
            "request %s failed: %s",
            record.admission.request_id,
            error.message,
            exc_info=error.__cause__,
        )
        kind = type(error).__name__
        self._end_in_error(batch, record, request, error.message, kind, unless=unless)

    def _end_in_error(
        self,
        batch: _Batch,
        record: Record,
        request: _Open,
        message: str,
        kind: str,
        *,
        unless: bytes | None = None,
    ) -> None:
        request.failed = True
        message = message[:MAX_ERROR]
        admission = record.admission
        self._failures.append(Failed(PROTOCOL_VERSION, admission.request_id, kind, message))
        opened = {t: channel for channel in request.channels for t in channel.topics}
        terminal = Terminal(FinishReason.ERROR, record.total, 0, message, kind)
        for destination in request.topics:
            if destination != unless:
                channel = opened.get(destination)  # None if its processor raised in open
                update = Update(
                    admission.request_id,
                    admission.generation,
                    record.segment,
                    0 if channel is None else channel.position,
                    start=admission.start if channel is None or not channel.started else None,
                    terminal=terminal,
                )
                batch.add(destination, update, _NO_TENSORS)

    def _note_slow(self, took_ns: int) -> None:
        self.slow_steps += 1
        if self.slow_steps == 1:
            log.warning(
                "the processors took %.1f ms for one step; they share the interpreter with the "
                "scheduler and slow every request (logged once)",
                took_ns / 1e6,
            )


def _checked(
    channel: _Channel, emission: Emission | None, sampled: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], Mapping[str, Payload]]:
    """The ids and tensors that a processor returned, if they can be published."""
    if emission is None:
        return (), _NO_TENSORS
    if not isinstance(emission, Emission):
        raise TypeError(f"returned {type(emission).__name__}, expected Emission or None")
    if emission.tensors:
        _check_tensors(emission.tensors)
    if emission.dropped:
        channel.dropped += operator.index(emission.dropped)
    if emission.ids is sampled:
        return sampled, emission.tensors  # passed on as vLLM gave them
    ids = tuple(map(operator.index, emission.ids))
    if len(ids) > MAX_IDS:
        raise ValueError(f"emitted {len(ids)} ids at once, at most {MAX_IDS} may be")
    if ids and not (min(ids) >= -(2**63) and max(ids) < 2**63):
        raise ValueError("emitted an id that does not fit 64 bits")
    return ids, emission.tensors


def _check_tensors(tensors: Mapping[str, Payload]) -> None:
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"emitted {len(tensors)} tensors at once, at most {MAX_TENSORS} may be")
    for name, tensor in tensors.items():
        if len(str(name)) > 256 or str(name) != name:
            raise TypeError(f"a tensor's name is a short string, got {str(name)[:80]!r}")
        if not isinstance(tensor, Payload):
            raise TypeError(f"tensor {name!r} is {type(tensor).__name__}, expected Payload")
        if not all(type(n) is int for n in (*tensor.shape, tensor.first_row)):
            raise TypeError(f"tensor {name!r} has a shape or first row that is no integer")
        if not memoryview(tensor.data).c_contiguous:
            raise ValueError(f"tensor {name!r} is not contiguous")
        needed = buffer_bytes(TensorInfo(name, tensor.dtype, tensor.shape, tensor.first_row, 0))
        if memoryview(tensor.data).nbytes != needed:
            raise ValueError(
                f"tensor {name!r} has {len(tensor.data)} bytes, its shape needs {needed}"
            )


def _blame(processor: ChunkProcessor, request_id: str, error: BaseException) -> ProcessorError:
    try:
        text = str(error)
    except Exception:
        text = ""
    what = f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
    # It crosses the wire: a file name in it may hold bytes that are no text.
    what = what.encode("utf-8", "backslashreplace").decode()
    return ProcessorError(
        f"processor {type(processor).__name__} failed: {what}", request_id=request_id
    )


def _terminal(ending: Ending, dropped: int) -> Terminal:
    return Terminal(ending.reason, ending.tokens, dropped)


def _with_tensors(update: Update, infos: tuple[TensorInfo, ...]) -> Update:
    return Update(
        update.request_id,
        update.generation,
        update.segment,
        update.position,
        update.ids,
        infos,
        update.start,
        update.terminal,
        update.segment_end,
        update.paused,
    )

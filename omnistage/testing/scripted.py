"""An AR stage whose ids and timing come from a script: no model, everything behind it real.

Its updates go through the output adapter, the publisher thread and ZeroMQ, as vLLM's do.
"""

from __future__ import annotations

import asyncio
import os
import time
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from anyio import to_thread

from omnistage.adapters.processor import TokenUpdates, row_keys
from omnistage.config import AUDIO
from omnistage.core.events import Ending, Event, Record, Refusal, StepEvents
from omnistage.core.output_adapter import OutputAdapter
from omnistage.errors import StageClosed, error_of_kind
from omnistage.request import FinishReason, Payload, Usage
from omnistage.stages.admission import admission_record
from omnistage.stages.ar_request import ARRequest
from omnistage.transport.control import ControlServer
from omnistage.transport.endpoints import IPC, check_bind
from omnistage.transport.handover import HandOver
from omnistage.transport.keys import load_keys
from omnistage.transport.publisher import Publisher, PublisherConfig
from omnistage.wire import decode_admission

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from omnistage.adapters.processor import ChunkProcessor
    from omnistage.errors import OmniStageError
    from omnistage.request import StageInput, StageRequest
    from omnistage.transport.endpoints import Endpoints
    from omnistage.transport.keys import Keys
    from omnistage.wire import Failed

_HELLO_SECONDS: Final = 10.0
_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one request samples, and when.

    Args:
        ids: The ids, in order.
        ids_per_step: Ids in one step, as with speculative decoding.
        first_after: Seconds to the first step.
        step_after: Seconds from a step to the next one.
        reason: Why it ends.
        payloads: The worker's payload of each step, by key.
        text: What each step writes, where somebody reads text.
        error: Ends it with this error instead, after the ids.
        stalls: Whether it never ends: the last id is followed by nothing.
    """

    ids: Sequence[int] = ()
    ids_per_step: int = 1
    first_after: float = 0.0
    step_after: float = 0.0
    reason: FinishReason = FinishReason.STOP
    payloads: Sequence[Mapping[str, Payload]] = ()
    text: Sequence[str] = ()
    error: OmniStageError | None = None
    stalls: bool = False


def scripted(
    script: Script | Callable[[StageInput], Script],
    *,
    processor: ChunkProcessor | None = None,
    gives: Collection[str] = (),
    split: Callable[[StageInput], Sequence[StageInput]] | None = None,
    name: str = "ar",
    bind: str = IPC,
    keys: str | Path | None = None,
) -> Callable[[Endpoints], ScriptedARStage]:
    """An AR stage for ``Pipeline(ar=scripted(...), decoder=...)``.

    Args:
        script: What every request samples, or what makes a request's script of its input; an
            OmniStageError that it raises refuses the request.
        processor: The chunk processor; every id is passed on without one.
        gives: The keys of its scripts' payloads.
        split: Cuts a submission into requests that follow one another, as an input adapter may.
        name: Names the stage in errors.
        bind: Where updates are published, as :class:`~omnistage.ARStageConfig` says.
        keys: Directory of the keys of its tcp sockets, as there.
    """
    make = (lambda _: script) if isinstance(script, Script) else script
    return _Scripted(make, processor or TokenUpdates(), gives, split, name, bind, keys)


@dataclass(frozen=True, slots=True)
class _Scripted:
    """Makes the stage, for a pipeline that makes its own sockets with ``keys``."""

    script: Callable[[StageInput], Script]
    processor: ChunkProcessor
    gives: Collection[str]
    split: Callable[[StageInput], Sequence[StageInput]] | None
    name: str
    bind: str
    keys: str | Path | None

    def __call__(self, endpoints: Endpoints) -> ScriptedARStage:
        return ScriptedARStage(
            self.script,
            endpoints,
            processor=self.processor,
            gives=self.gives,
            split=self.split,
            name=self.name,
            bind=self.bind,
            keys=load_keys(self.keys),
        )


class ScriptedARStage:
    """Runs scripts instead of a model; it is an :class:`~omnistage.AutoregressiveStage`.

    Args:
        script: Makes a request's script of its input.
        endpoints: This process's sockets.
        processor: The chunk processor.
        gives: The keys of its scripts' payloads.
        split: Cuts a submission into requests that follow one another.
        name: Names the stage in errors.
        bind: Where updates are published.
        keys: Those of its tcp sockets.

    Raises:
        ConfigError: A bind address that is not allowed.
    """

    model_name = "scripted"

    def __init__(
        self,
        script: Callable[[StageInput], Script],
        endpoints: Endpoints,
        *,
        processor: ChunkProcessor,
        gives: Collection[str] = (),
        split: Callable[[StageInput], Sequence[StageInput]] | None = None,
        name: str = "ar",
        bind: str = IPC,
        keys: Keys | None = None,
    ) -> None:
        self.name = name
        self._bind = check_bind(bind, keys)
        self._keys = keys
        self.publishers: list[str] = []
        self.row_keys = row_keys(processor, gives)
        self._script = script
        self._endpoints = endpoints
        self._processor = processor
        self._split = split
        self._generations = count()
        self._running: dict[str, ARRequest] = {}
        self._closed: StageClosed | None = None
        self._idle = asyncio.Event()
        self._control: ControlServer | None = None
        self._publisher: Publisher | None = None
        self._steps: HandOver[StepEvents | Refusal] | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def closed(self) -> StageClosed | None:
        """Why the stage takes no requests; None while it does."""
        closed = self._closed
        return None if closed is None else StageClosed(closed.message, stage=closed.stage)

    async def start(self) -> None:
        """Start the publisher thread.

        Raises:
            StartupError: It cannot bind, or does not say hello.
        """
        self._control = ControlServer(self._endpoints, self._on_failed)
        self._steps = HandOver(_STEPS)
        adapter = OutputAdapter({AUDIO: self._processor}, self._steps)
        config = PublisherConfig(
            bind=self._bind,
            directory=str(self._endpoints.directory),
            control=self._control.endpoint,
            owner_pid=os.getpid(),
            keys=self._keys,
        )
        self._publisher = Publisher(adapter, config, dp_index=0)
        try:
            self._publisher.start()
            hellos = await self._control.wait_for_hellos(1, within=_HELLO_SECONDS)
        except BaseException:
            await self.aclose()
            raise
        self.publishers = [hello.data_endpoint for hello in hellos]

    async def split(self, asked: StageInput) -> Sequence[StageInput]:
        """A submission is one request, unless it was said how to cut it."""
        return [asked] if self._split is None else self._split(asked)

    def submit(
        self, request: StageRequest, *, on_done: Callable[[Usage | OmniStageError], None]
    ) -> ARRequest:
        """Start a request; see :meth:`AutoregressiveStage.submit`."""
        if (closed := self.closed) is not None:
            raise closed
        if self._steps is None:
            raise StageClosed("the stage is not started", stage=self.name)
        running = ARRequest(self, request, next(self._generations), on_done)
        self._running[request.request_id] = running
        return running

    async def run(self, request: StageRequest, generation: int) -> Usage:
        """Play one request's script."""
        script = self._script(request.input)
        admission = decode_admission(admission_record(request, generation))
        takes = self._processor.requires_token_updates
        record = None if request.final_stage else Record(admission, takes_tokens=takes)
        tokens, reason = 0, FinishReason.ABORT
        try:
            await asyncio.sleep(script.first_after)
            for start in range(0, len(script.ids), script.ids_per_step):
                if start:
                    await asyncio.sleep(script.step_after)
                ids = tuple(script.ids[start : start + script.ids_per_step])
                step = start // script.ids_per_step
                payload = script.payloads[step] if step < len(script.payloads) else None
                self._publish(record, ids, position=start, payload=payload)
                tokens += len(ids)
                if request.text is not None and step < len(script.text):
                    request.text.write(script.text[step])
            if script.stalls:
                await asyncio.Event().wait()
            reason = FinishReason.ERROR if script.error is not None else script.reason
        finally:
            self._end(record, Ending(reason, tokens))
        if script.error is not None:
            raise copy(script.error)  # each request notes its id on its own
        prompt: Any = request.input.prompt
        length = prompt.shape[0] if isinstance(prompt, Payload) else len(prompt)
        text = "".join(script.text) if request.text is not None else ""
        return Usage(
            prompt_tokens=length, output_tokens=tokens, finish_reason=reason, text=text or None
        )

    async def serve(self) -> None:
        """Nothing to do: requests run in tasks of their own."""
        await asyncio.Event().wait()

    async def ended(self) -> None:
        """Never: there is no engine that could die."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._close("the stage is draining and takes no requests")
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Abort what is running and end the publisher thread. Idempotent."""
        self._close("the stage is closed")
        await asyncio.gather(
            *(request.abort() for request in list(self._running.values())), return_exceptions=True
        )
        publisher, self._publisher = self._publisher, None
        if publisher is not None and self._steps is not None:
            await to_thread.run_sync(publisher.close, 5.0)
            self._steps.close()
        if self._control is not None:
            self._control.close()
            self._control = None

    async def release(self, request_id: str) -> None:
        """Return when the publisher has let go of a request."""
        if self._control is not None:
            await self._control.release(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that is over; called by its own handle."""
        self._running.pop(request_id, None)
        if not self._running:
            self._idle.set()

    def _publish(
        self,
        record: Record | None,
        ids: tuple[int, ...],
        *,
        position: int,
        payload: Mapping[str, Payload] | None,
    ) -> None:
        if record is not None and ids:
            record.tokens += len(ids)
            record.total += len(ids)
            self._hand_over(Event(record, ids, position, tensors=payload))

    def _end(self, record: Record | None, ending: Ending) -> None:
        if record is not None:
            self._hand_over(Event(record, position=ending.tokens, ending=ending))

    def _hand_over(self, event: Event) -> None:
        if self._steps is not None:
            self._steps.put_beyond_limit(StepEvents(time.monotonic_ns(), [event]))

    def _on_failed(self, message: Failed) -> None:
        running = self._running.get(message.request_id)
        if running is not None:
            error = error_of_kind(message.kind, message.error)
            error.request_id, error.stage = message.request_id, self.name
            running.fail(error)

    def _close(self, why: str) -> None:
        self._closed = self._closed or StageClosed(why, stage=self.name)

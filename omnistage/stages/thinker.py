"""A thinker and a talker, one behind the other, as the one AR stage that they are of a pipeline.

The thinker answers a request in text. The rows of its hidden states come here as a subscriber's do,
are joined, and are the talker's prompt; what the talker samples goes to the decoders.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from omnistage.adapters.rows import RequestRows
from omnistage.config import AUDIO
from omnistage.errors import (
    ConfigError,
    InvalidRequest,
    OmniStageError,
    StageClosed,
    StreamClosed,
    UpdatesLost,
)
from omnistage.stages.base import serve
from omnistage.stages.fit import HIDDEN, check_fit, check_thinker
from omnistage.take import Take
from omnistage.tensors import token_update
from omnistage.transport.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omnistage.payload import Payload
    from omnistage.request import AudioChunk, StageInput, StageRequest, TokenUpdate, Usage
    from omnistage.stages.base import AutoregressiveStage, PacedSink, RunningRequest
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Buffer, Update

log = logging.getLogger(__name__)

_SUBSCRIBE_SECONDS: Final = 10.0


class ThinkerTalker:
    """Runs each request through a thinker, and then, as rows, through a talker.

    Both run under the request's own id, each in its own engine. ``sampling`` and ``conditioning``
    are the thinker's; the talker samples as its input adapter says. A request for text alone ends
    with the thinker: no rows are taken for it, and the talker hears nothing of it.

    Args:
        thinker: Its updates must carry rows of hidden states.
        talker: Its prompts are those rows.
        endpoints: This process's sockets.

    Attributes:
        upstream: Name of the stage whose updates the decoders get.
        has_text: That its requests write text.

    Raises:
        ConfigError: Both have one name.
    """

    has_text = True

    def __init__(
        self, thinker: AutoregressiveStage, talker: AutoregressiveStage, endpoints: Endpoints
    ) -> None:
        if thinker.name == talker.name:
            raise ConfigError(
                f"the thinker and the talker are both named {talker.name!r}; give each its own name"
            )
        self.name = thinker.name
        self.upstream = talker.name
        self.model_name = thinker.model_name
        self.publishers: list[str] = []
        self.row_keys: Collection[str] | None = None
        self.thinker = thinker
        self.talker = talker
        self._running: dict[str, _Answer] = {}
        self._rows: dict[str, _Rows] = {}  # of the requests that are thought about
        self._subscriber = Subscriber(endpoints, AUDIO, talker.name, self)
        self._closed: StageClosed | None = None
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def closed(self) -> StageClosed | None:
        """Why it takes no requests; None while both stages do."""
        if self._closed is not None:
            return StageClosed(self._closed.message, stage=self._closed.stage)
        return self.thinker.closed or self.talker.closed

    async def start(self) -> None:
        """Start the thinker, then the talker, and subscribe the rows.

        Raises:
            ConfigError: The two do not fit together.
            StartupError: One did not come up.
        """
        try:
            await self.thinker.start()
            check_thinker(self.thinker)
            await self.talker.start()
            await check_fit(self.thinker, self.talker)
            await self._subscriber.connect(self.thinker.publishers, within=_SUBSCRIBE_SECONDS)
        except BaseException:
            await self.aclose()
            raise
        self.publishers = self.talker.publishers
        self.row_keys = getattr(self.talker, "row_keys", None)

    async def split(self, asked: StageInput) -> Sequence[StageInput]:
        """See :meth:`AutoregressiveStage.split`: as the thinker does."""
        return await self.thinker.split(asked)

    def submit(
        self, request: StageRequest, *, on_done: Callable[[Usage | OmniStageError], None]
    ) -> RunningRequest:
        """Start a request; its usage is the talker's with the thinker's text, or the thinker's.

        Raises:
            StageClosed: One of the stages takes no requests.
            InvalidRequest: Subscribers, which get the talker's updates, of a request for text.
        """
        if (closed := self.closed) is not None:
            raise closed
        if request.consumers and not request.input.wants_audio:
            raise InvalidRequest(
                "subscribers get what the talker samples, and a request for text alone never "
                "reaches it",
                parameter="subscribers",
            )
        answer = _Answer(self, request, on_done)
        self._running[request.request_id] = answer
        answer.start()
        return answer

    def rows_of(self) -> _Rows:
        """What joins the rows of one request."""
        return _Rows(self._rows, self.talker.name)

    async def serve(self) -> None:
        """Serve both until cancelled, and end what the talker can no longer speak."""
        watching = asyncio.create_task(self._watch_talker())
        try:
            await serve([self.thinker, self.talker])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def ended(self) -> None:
        """Return when the engine of either has died."""
        waits = [asyncio.create_task(one.ended()) for one in (self.thinker, self.talker)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._close("the stage is draining and takes no requests")
        while self._running:
            self._idle.clear()
            await self._idle.wait()
        await self.thinker.drain()
        await self.talker.drain()

    async def aclose(self) -> None:
        """Abort what is running and close both stages, whatever the other does. Idempotent."""
        self._close("the stage is closed")
        aborts = [answer.abort() for answer in list(self._running.values())]
        await asyncio.gather(*aborts, return_exceptions=True)
        self._subscriber.close()
        for stage in (self.talker, self.thinker):
            try:
                await stage.aclose()
            except Exception:
                log.exception("stage %s could not be closed", stage.name)

    def forget(self, request_id: str) -> None:
        """Drop a request that is over; called by its own handle."""
        self._running.pop(request_id, None)
        if not self._running:
            self._idle.set()

    def on_update(self, update: Update, buffers: Sequence[Buffer], stamp: int) -> None:
        """Take a request's next rows from the subscriber; those of one that is over are late."""
        rows = self._rows.get(update.request_id)
        if rows is not None:
            rows.take(token_update(update, buffers, stamp))

    def on_lost(self, error: UpdatesLost) -> None:
        """Fail every request that is thought about: whose rows were lost cannot be known."""
        for rows in list(self._rows.values()):
            rows.fail(UpdatesLost(error.message, stage=self.thinker.name))

    async def _watch_talker(self) -> None:
        await self.talker.ended()
        for answer in list(self._running.values()):
            answer.give_up(self.talker.closed or StageClosed("it ended", stage=self.talker.name))

    def _close(self, why: str) -> None:
        self._closed = self._closed or StageClosed(why, stage=self.name)


class _Answer:
    """A request in both stages: thought about first, then spoken."""

    def __init__(
        self,
        stage: ThinkerTalker,
        request: StageRequest,
        on_done: Callable[[Usage | OmniStageError], None],
    ) -> None:
        self._stage = stage
        self._request = request
        self._on_done = on_done
        self._rows = stage.rows_of() if request.input.wants_audio else None
        consumers = [] if self._rows is None else [self._rows]
        self._thinking = Take(0, consumers, self._on_thinking)
        self._thought: Usage | None = None
        self._speaking: RunningRequest | None = None
        self._over = False

    def start(self) -> None:
        """Submit it to the thinker."""
        self._thinking.start(self._stage.thinker, replace(self._request, consumers=()))

    async def abort(self) -> None:
        """Abort it where it is, and return when both stages have let go. Idempotent.

        Raises:
            DeadlineExceeded: One has not in time.
        """
        request_id = self._request.request_id
        self.fail(StreamClosed("the request was aborted", request_id=request_id))
        await self._thinking.abort()
        if self._speaking is not None:
            await self._speaking.abort()

    def fail(self, error: OmniStageError) -> None:
        """Report ``error`` instead of the result, and abort it where it is."""
        if self._over:
            return
        if self._speaking is None:
            self._thinking.fail(error)  # which comes back at once
        else:
            self._speaking.fail(error)

    def give_up(self, error: OmniStageError) -> None:
        """Fail it if it has yet to get to the talker, which has died."""
        if self._rows is not None and self._speaking is None:
            self.fail(error)

    def _on_thinking(self, take: Take, chunk: AudioChunk | None) -> None:
        if take.error is not None:
            self._finish(take.error)
        elif take.usage is not None:
            self._thought = take.usage
            if self._request.text is not None:
                self._request.text.end()
            if self._rows is None:
                self._finish(take.usage)
            else:
                self._speak(self._rows)

    def _speak(self, rows: _Rows) -> None:
        """Submit the thinker's rows to the talker."""
        try:
            asked = replace(
                self._request.input, prompt=rows.joined(), sampling=None, conditioning=None
            )
            request = replace(self._request, input=asked, text=None)
            self._speaking = self._stage.talker.submit(request, on_done=self._on_spoken)
        except OmniStageError as error:
            self._finish(error)

    def _on_spoken(self, outcome: Usage | OmniStageError) -> None:
        if isinstance(outcome, OmniStageError) or self._thought is None:
            self._finish(outcome)
        else:
            self._finish(replace(outcome, text=self._thought.text, thinker=self._thought))

    def _finish(self, outcome: Usage | OmniStageError) -> None:
        if not self._over:
            self._over = True
            self._stage.forget(self._request.request_id)
            self._on_done(outcome)


class _Rows:
    """One request's rows on their way here, as the one consumer of its updates at the thinker.

    Args:
        waiting: Where it stands, by request id, while rows may come.
        subscriber: The subscriber id.
    """

    def __init__(self, waiting: dict[str, _Rows], subscriber: str) -> None:
        self._waiting = waiting
        self._subscriber = subscriber
        self._request_id = ""
        self._sink: PacedSink | None = None
        self._rows = RequestRows(HIDDEN)
        self._ended = False

    def open(
        self, request_id: str, sink: PacedSink, *, after: str | None = None, more: bool = False
    ) -> tuple[str, str]:
        """Expect the request's updates."""
        self._request_id, self._sink = request_id, sink
        self._waiting[request_id] = self
        return AUDIO, self._subscriber

    def drop(self, request_id: str) -> None:
        """Expect no more. Idempotent."""
        self._waiting.pop(request_id, None)

    def resume(self, request_id: str) -> None:
        """Nothing is ever held: rows are as long as an answer at most."""

    async def release(self, request_id: str) -> None:
        """Nothing of it is in anybody's hands."""

    def has_ended(self, request_id: str) -> bool:
        """Whether the last update is here."""
        return self._ended

    def joined(self) -> Payload:
        """All its rows, [rows, hidden size], and none are kept.

        Raises:
            ProtocolError: There are none.
        """
        rows, self._rows = self._rows, RequestRows(HIDDEN)
        return rows.joined()

    def take(self, update: TokenUpdate) -> None:
        """Take the next update."""
        try:
            if not self._rows.take(update) or update.terminal is None or self._sink is None:
                return
        except OmniStageError as error:
            self.fail(error)
            return
        self._ended = True
        self.drop(self._request_id)
        self._sink.on_end(update.terminal)

    def fail(self, error: OmniStageError) -> None:
        """Its rows cannot be had."""
        self.drop(self._request_id)
        if self._sink is not None:
            self._sink.on_error(error)

"""One request of a pipeline: the stream its caller reads and what feeds it."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

from omnistage.errors import (
    DeadlineExceeded,
    OmniStageError,
    ServerError,
    StreamClosed,
    UpdatesLost,
)
from omnistage.request import FinishReason, StageRequest, Usage, new_request_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from omnistage.metrics import RequestMetrics
    from omnistage.request import AudioChunk, StageInput, Terminal
    from omnistage.stages.ar import ARRequest, ARStage
    from omnistage.stages.decoder import DecoderStage

log = logging.getLogger(__name__)

# How long the last update may be behind vLLM's own answer, and the other way round.
_STRAGGLER_SECONDS: Final = 10.0


class Stream:
    """One request's audio: an async iterator of :class:`~omnistage.request.AudioChunk`.

    Chunks come in order and none is missing; the iteration ends after the last sample, or raises
    what went wrong. Leaving ``async with``, closing, cancelling the reader or dropping the stream
    aborts what is left of the request in every stage.
    """

    def __init__(self, request: Submission) -> None:
        self._request = request

    async def __aenter__(self) -> Self:
        self._request.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.abort()

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        return self

    async def __anext__(self) -> AudioChunk:
        self._request.start()
        try:
            chunk = await self._request.next()
        except asyncio.CancelledError:
            # Whoever cancels the reader may never come back to close the stream.
            self._request.fail(StreamClosed("the reader was cancelled"))
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __del__(self) -> None:
        request = self._request
        if request.started and not request.over:
            warnings.warn(
                f"{request.request_id} was dropped unfinished; it is aborted. Use `async with`.",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            request.fail_threadsafe(StreamClosed("the stream was dropped"))

    @property
    def request_id(self) -> str:
        """The internal id, unique a submission."""
        return self._request.request_id

    @property
    def usage(self) -> Usage | None:
        """What the request took; None until it is complete."""
        return self._request.usage

    async def abort(self) -> None:
        """Abort the request and return when every stage has let go of it.

        Idempotent, and harmless after the end.

        Raises:
            DeadlineExceeded: The engine did not let go in time.
        """
        self._request.fail(StreamClosed("the stream was aborted", request_id=self.request_id))
        await self._request.abort()

    async def aclose(self) -> None:
        """The same as :meth:`abort`, under the name that :func:`contextlib.aclosing` wants."""
        await self.abort()


class Submission:
    """One submission: what the stages report, in the order it is read.

    It is complete when the decoder has given all audio and the AR stage its usage, and their counts
    agree; the first error ends it and aborts the other side.

    Args:
        stages: Gives the running stages, or raises StageClosed.
        running: Where it stands while it runs, by internal id.
        asked: What to run.
        metrics: Makes the request's metrics when it starts.
        external_id: What the caller calls it.
        timeout: Seconds from start to end.
    """

    def __init__(
        self,
        stages: Callable[[], tuple[ARStage, DecoderStage]],
        running: dict[str, Submission],
        asked: StageInput,
        *,
        metrics: Callable[[], RequestMetrics],
        external_id: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.request_id = new_request_id(external_id)
        self.usage: Usage | None = None
        self.started = False
        self.over = False
        self.unread_seconds = 0.0
        self._stages = stages
        self._running = running
        self._input = asked
        self._make_metrics = metrics
        self._metrics: RequestMetrics | None = None
        self._external_id = external_id or self.request_id
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._chunks: deque[AudioChunk] = deque()
        self._news = asyncio.Event()
        self._error: OmniStageError | None = None
        self._terminal: Terminal | None = None
        self._result: Usage | None = None
        self._ar: ARRequest | None = None
        self._decoder: DecoderStage | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def start(self) -> None:
        """Open the decoder, then submit to the AR stage; once."""
        if self.started or self.over:
            return
        self._loop = asyncio.get_running_loop()
        ar, decoder = self._stages()
        self.started = True
        decoder.open(self.request_id, self)
        self._decoder = decoder
        request = StageRequest(
            request_id=self.request_id,
            external_id=self._external_id,
            input=self._input,
            consumers=(decoder.consumer,),
        )
        self._running[self.request_id] = self
        self._metrics = self._make_metrics()
        log.info("request %s started", self.request_id)
        try:
            self._ar = ar.submit(request, on_done=self._on_ar_done)
        except OmniStageError as error:
            self.fail(error)
        if self._timeout is not None:
            self._after(self._timeout, self._on_timeout)

    async def next(self) -> AudioChunk | None:
        """The next chunk; None after the last one."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.over:
                return None
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self.unread_seconds -= chunk.seconds
        if self._decoder is not None:
            self._decoder.resume(self.request_id)
        return chunk

    def fail(self, error: OmniStageError) -> None:
        """End the request with ``error`` unless it is over, and abort it in every stage."""
        if self.over:
            return
        self._error = error
        self._chunks.clear()
        if self._metrics is not None:
            self._metrics.failure(type(error).__name__)
            log.info("request %s ended: %s", self.request_id, error)
        self._end()
        if self._decoder is not None:
            self._decoder.drop(self.request_id)
        if self._ar is not None:
            self._ar.fail(error)

    def fail_threadsafe(self, error: OmniStageError) -> None:
        """As :meth:`fail`, from a finalizer: any thread, any time."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, error)

    async def abort(self) -> None:
        """Return when the stages have let go; :meth:`fail` comes first and makes them."""
        if self._decoder is not None:
            await self._decoder.release(self.request_id)
        if self._ar is not None:
            await self._ar.abort()

    def on_chunk(self, chunk: AudioChunk) -> None:
        """From the decoder stage: the next piece of audio."""
        self._chunks.append(chunk)
        if self._metrics is not None:
            self._metrics.chunk(chunk.seconds)
        self.unread_seconds += chunk.seconds
        self._news.set()

    def on_end(self, terminal: Terminal) -> None:
        """From the decoder stage: all audio has been given."""
        self._terminal = terminal
        self._complete("vLLM's answer")

    def on_error(self, error: OmniStageError) -> None:
        """From the decoder stage: it failed the request."""
        self.fail(error)

    def _on_ar_done(self, outcome: Usage | OmniStageError) -> None:
        if isinstance(outcome, OmniStageError):
            self.fail(outcome)
            return
        self._result = outcome
        self._complete("the last update")

    def _complete(self, missing: str) -> None:
        """Finish if both sides have reported; otherwise give the other one a bounded time."""
        terminal, result = self._terminal, self._result
        if self.over:
            return
        if terminal is None or result is None:
            self._after(_STRAGGLER_SECONDS, lambda: self._on_straggler(missing))
        elif terminal.tokens != result.output_tokens:
            self.fail(
                UpdatesLost(
                    f"vLLM sampled {result.output_tokens} ids, {terminal.tokens} were published",
                    request_id=self.request_id,
                )
            )
        elif terminal.reason in {FinishReason.ABORT, FinishReason.ERROR}:
            self.fail(
                ServerError(
                    f"vLLM ended the request with {terminal.reason!s}", request_id=self.request_id
                )
            )
        else:
            self.usage = Usage(
                prompt_tokens=result.prompt_tokens,
                output_tokens=result.output_tokens,
                finish_reason=terminal.reason,
                dropped_tokens=terminal.dropped,
                text=result.text,
            )
            if self._metrics is not None:
                self._metrics.success(terminal.reason)
            log.info("request %s finished: %s", self.request_id, terminal.reason)
            self._end()

    def _end(self) -> None:
        self.over = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._running.pop(self.request_id, None)
        self._news.set()

    def _after(self, seconds: float, call: Any) -> None:
        if self._loop is not None:
            self._timers.append(self._loop.call_later(seconds, call))

    def _on_timeout(self) -> None:
        self.fail(
            DeadlineExceeded(
                f"the request was not complete after {self._timeout:g} s",
                request_id=self.request_id,
            )
        )

    def _on_straggler(self, missing: str) -> None:
        if self._decoder is not None and self._decoder.has_ended(self.request_id):
            return  # all ids are here, decoding them just takes longer
        self.fail(
            UpdatesLost(
                f"{missing} did not come within {_STRAGGLER_SECONDS:g} s of the other side's end",
                request_id=self.request_id,
            )
        )

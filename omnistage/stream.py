"""One request of a pipeline: the stream its caller reads and what feeds it."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from omnistage.errors import (
    ConfigError,
    DeadlineExceeded,
    OmniStageError,
    ServerError,
    StreamClosed,
    UpdatesLost,
)
from omnistage.request import FinishReason, StageRequest, Usage, new_request_id
from omnistage.speech import Speech

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import TracebackType

    from omnistage.metrics import RequestMetrics
    from omnistage.request import AudioChunk, StageInput, Terminal
    from omnistage.stages.base import AutoregressiveStage, RunningRequest
    from omnistage.stages.branch import Branch

log = logging.getLogger(__name__)

# How long the last update may be behind vLLM's own answer, and the other way round.
_STRAGGLER_SECONDS: Final = 10.0


class Stream:
    """One request's audio: an async iterator of :class:`~omnistage.request.AudioChunk`.

    Chunks come in order and none is missing; the iteration ends after the last sample, or raises
    what went wrong. With several decoders their chunks come as they are ready, each decoder's in
    order; without one there are none, and the iteration ends with the request.

    Leaving ``async with``, closing, cancelling the reader or dropping the stream aborts what is
    left of the request in every stage.
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

    async def collect(self) -> Speech:
        """Read what is left and return it in one piece.

        Raises:
            OmniStageError: What the iteration raises.
            ConfigError: The pipeline has no decoder, or several.
        """
        rate = self._request.sample_rate
        async with self:
            pieces = [chunk.pcm async for chunk in self]
        pcm = np.concatenate([np.zeros(0, np.float32), *pieces])
        return Speech(pcm=pcm, sample_rate=rate, usage=await self.finished())

    async def finished(self) -> Usage:
        """Read what is left without keeping it, and return what the request took.

        Raises:
            OmniStageError: What the iteration raises.
        """
        async with self:
            async for _ in self:
                pass
        if self.usage is None:
            raise StreamClosed("the stream was aborted", request_id=self.request_id)
        return self.usage

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

    It is complete when every branch has given all its audio and the AR stage its usage, and their
    counts agree; the first error ends it and aborts all the others.

    Args:
        stages: Gives the running AR stage and branches, or raises StageClosed.
        running: Where it stands while it runs, by internal id.
        asked: What to run.
        metrics: Makes the request's metrics when it starts.
        consumers: (channel, subscriber id) pairs that get its updates beside the branches.
        external_id: What the caller calls it.
        timeout: Seconds from start to end.
    """

    def __init__(
        self,
        stages: Callable[[], tuple[AutoregressiveStage, Sequence[Branch]]],
        running: dict[str, Submission],
        asked: StageInput,
        *,
        metrics: Callable[[], RequestMetrics],
        consumers: tuple[tuple[str, str], ...] = (),
        external_id: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.request_id = new_request_id(external_id)
        self.usage: Usage | None = None
        self.started = False
        self.over = False
        self._stages = stages
        self._running = running
        self._input = asked
        self._make_metrics = metrics
        self._metrics: RequestMetrics | None = None
        self._consumers = consumers
        self._external_id = external_id or self.request_id
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._chunks: deque[tuple[_Part, AudioChunk]] = deque()
        self._news = asyncio.Event()
        self._error: OmniStageError | None = None
        self._parts: list[_Part] = []
        self._result: Usage | None = None
        self._ar: RunningRequest | None = None
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def sample_rate(self) -> int:
        """Samples a second of the one branch's audio.

        Raises:
            ConfigError: There is none, or more than one.
        """
        branches = self._stages()[1]
        if len(branches) != 1:
            raise ConfigError(f"the pipeline has {len(branches)} decoders; read chunk by chunk")
        return branches[0].sample_rate

    def start(self) -> None:
        """Open every branch, then submit to the AR stage; once."""
        if self.started or self.over:
            return
        self._loop = asyncio.get_running_loop()
        ar, branches = self._stages()
        self.started = True
        self._running[self.request_id] = self
        self._metrics = self._make_metrics()
        log.info("request %s started", self.request_id)
        try:
            for branch in branches:
                part = _Part(self, branch)
                branch.open(self.request_id, part)
                self._parts.append(part)
            consumers = (*(branch.consumer for branch in branches), *self._consumers)
            request = StageRequest(
                request_id=self.request_id,
                external_id=self._external_id,
                input=self._input,
                final_stage=not consumers,
                consumers=consumers,
            )
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
        part, chunk = self._chunks.popleft()
        part.unread_seconds -= chunk.seconds
        part.branch.resume(self.request_id)
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
        for part in self._parts:
            part.branch.drop(self.request_id)
        if self._ar is not None:
            self._ar.fail(error)

    def fail_threadsafe(self, error: OmniStageError) -> None:
        """As :meth:`fail`, from a finalizer: any thread, any time."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, error)

    async def abort(self) -> None:
        """Return when the stages have let go; :meth:`fail` comes first and makes them."""
        for part in self._parts:
            await part.branch.release(self.request_id)
        if self._ar is not None:
            await self._ar.abort()

    def on_chunk(self, part: _Part, chunk: AudioChunk) -> None:
        """The next piece of a branch's audio."""
        self._chunks.append((part, chunk))
        if self._metrics is not None and part is self._parts[0]:
            self._metrics.chunk(chunk.seconds)
        self._news.set()

    def complete(self) -> None:
        """Finish if every side has reported; otherwise give the late ones a bounded time."""
        if self.over:
            return
        result = self._result
        terminals = [part.terminal for part in self._parts if part.terminal is not None]
        if len(terminals) < len(self._parts) or result is None:
            if result is not None or len(terminals) == len(self._parts):
                self._after(_STRAGGLER_SECONDS, self._on_straggler)
            return
        reason = terminals[0].reason if terminals else result.finish_reason
        wrong = next((t.tokens for t in terminals if t.tokens != result.output_tokens), None)
        if wrong is not None:
            message = f"vLLM sampled {result.output_tokens} ids, {wrong} were published"
            self.fail(UpdatesLost(message, request_id=self.request_id))
        elif reason in {FinishReason.ABORT, FinishReason.ERROR}:
            message = f"vLLM ended the request with {reason!s}"
            self.fail(ServerError(message, request_id=self.request_id))
        else:
            self.usage = Usage(
                prompt_tokens=result.prompt_tokens,
                output_tokens=result.output_tokens,
                finish_reason=reason,
                dropped_tokens=terminals[0].dropped if terminals else 0,
                text=result.text,
            )
            if self._metrics is not None:
                self._metrics.success(reason)
            log.info("request %s finished: %s", self.request_id, reason)
            self._end()

    def _on_ar_done(self, outcome: Usage | OmniStageError) -> None:
        if isinstance(outcome, OmniStageError):
            self.fail(outcome)
            return
        self._result = outcome
        self.complete()

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

    def _on_straggler(self) -> None:
        missing = [part for part in self._parts if part.terminal is None]
        if missing and all(part.branch.has_ended(self.request_id) for part in missing):
            return  # all ids are here, decoding them just takes longer
        what = "the last update" if missing else "vLLM's answer"
        self.fail(
            UpdatesLost(
                f"{what} did not come within {_STRAGGLER_SECONDS:g} s of the other side's end",
                request_id=self.request_id,
            )
        )


class _Part:
    """A submission's share of one branch: what that branch has given of it."""

    def __init__(self, submission: Submission, branch: Branch) -> None:
        self.branch = branch
        self.terminal: Terminal | None = None
        self.unread_seconds = 0.0
        self._submission = submission

    def on_chunk(self, chunk: AudioChunk) -> None:
        self.unread_seconds += chunk.seconds
        self._submission.on_chunk(self, chunk)

    def on_end(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._submission.complete()

    def on_error(self, error: OmniStageError) -> None:
        self._submission.fail(error)

"""One request of a pipeline: the stream its caller reads and what feeds it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import anyio
import numpy as np

from omnistage.errors import (
    ConfigError,
    DeadlineExceeded,
    OmniStageError,
    StreamClosed,
)
from omnistage.pieces import Pieces
from omnistage.request import StageRequest, new_request_id, total
from omnistage.speech import Speech
from omnistage.take import Take
from omnistage.text import Text, TextReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
    from types import TracebackType

    from omnistage.metrics import RequestMetrics
    from omnistage.request import AudioChunk, StageInput, Usage
    from omnistage.stages.base import AutoregressiveStage
    from omnistage.stages.route import RequestBranch

log = logging.getLogger(__name__)

_FAILED_SECONDS: Final = 1.0
"""For the stages to let go of a request that failed, before its caller hears of that."""


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
        try:
            await self._request.start()
        except asyncio.CancelledError:
            self._request.fail(StreamClosed("the reader was cancelled"))
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or error is not self._request.error:
            await self.abort()
            return
        # It says what went wrong, perhaps that a stage stands still: no reason to wait for that one
        # with it, nor to say instead that it does not let go.
        with anyio.move_on_after(_FAILED_SECONDS), contextlib.suppress(OmniStageError):
            await self.abort()

    def __aiter__(self) -> AsyncIterator[AudioChunk]:
        return self

    async def __anext__(self) -> AudioChunk:
        try:
            await self._request.start()
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
            request.fail_threadsafe(StreamClosed("the stream was dropped"))
            # Last: it raises where warnings are errors.
            warnings.warn(
                f"{request.request_id} was dropped unfinished; it is aborted. Use `async with`.",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    @property
    def request_id(self) -> str:
        """The internal id, unique a submission."""
        return self._request.request_id

    @property
    def usage(self) -> Usage | None:
        """What the request took; None until it is complete."""
        return self._request.usage

    @property
    def text(self) -> AsyncIterator[str]:
        """The thinker's text, in pieces as they are sampled, from the first one on.

        It may be read beside the audio, in another task, afterwards, or not at all: all pieces are
        kept. It ends when the thinker is done, or raises what the request failed with before.
        Cancelling who reads it aborts nothing.

        Raises:
            ConfigError: The pipeline has no thinker.
        """
        return TextReader(self, self._request.text)

    async def collect(self) -> Speech:
        """Read what is left and return it in one piece.

        Raises:
            OmniStageError: What the iteration raises.
            ConfigError: The pipeline has no decoder, or several, or text alone was asked for.
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
    """One submission: its pieces one after the other, and their audio in the order it is read.

    A text that is too long for one request is several, and so is one that comes as an iterator;
    each is submitted when the AR stage is done with the one before. The first error ends all of it.

    Args:
        stages: Gives the running AR stage and branches, or raises StageClosed.
        running: Where it stands while it runs, by internal id.
        asked: What to run.
        text: Its prompt, if that comes as an iterator.
        metrics: Makes the request's metrics of its last stage's name when it starts.
        consumers: (channel, subscriber id) pairs that get its updates beside the branches.
        external_id: What the caller calls it.
        timeout: Seconds from start to end.
    """

    def __init__(
        self,
        stages: Callable[[], tuple[AutoregressiveStage, Sequence[RequestBranch]]],
        running: dict[str, Submission],
        asked: StageInput,
        text: AsyncIterable[str] | None = None,
        *,
        metrics: Callable[[str], RequestMetrics],
        consumers: tuple[tuple[str, str], ...] = (),
        external_id: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.request_id = new_request_id(external_id)
        self.usage: Usage | None = None
        self.text = Text()
        self.started = False
        self.over = False
        self._stages = stages
        self._running = running
        self._input = asked
        self._pieces = Pieces(
            self.request_id, asked, text, on_change=self._on_pieces, on_failure=self.fail
        )
        self._make_metrics = metrics
        self._metrics: RequestMetrics | None = None
        self._consumers = consumers
        self._external_id = external_id or self.request_id
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._route: tuple[AutoregressiveStage, Sequence[RequestBranch]] | None = None
        self._news = asyncio.Event()
        self._error: OmniStageError | None = None
        self._takes: deque[Take] = deque()  # the last one may run, those before it wait to be read
        self._usages: dict[int, Usage] = {}  # by piece; they may end in another order
        self._indices: dict[str, int] = {}  # chunks given, by decoder
        self._started_takes = 0
        self._last_stage = ""

    @property
    def error(self) -> OmniStageError | None:
        """What it failed with, if it did."""
        return self._error

    @property
    def sample_rate(self) -> int:
        """Samples a second of the one branch's audio.

        Raises:
            ConfigError: There is none, or more than one.
        """
        if not self._input.wants_audio:
            raise ConfigError("text alone was asked for; `async for piece in stream.text` reads it")
        branches = self._stages()[1]
        if len(branches) != 1:
            what = "read chunk by chunk" if branches else "`await stream.finished()` is its end"
            raise ConfigError(f"the pipeline has {len(branches) or 'no'} decoders; {what}")
        return branches[0].sample_rate

    async def start(self) -> None:
        """Submit the first piece, or begin to read the text that comes; once."""
        if self.started or self.over:
            return
        self._loop = asyncio.get_running_loop()
        ar, branches = self._stages()
        if not self._input.wants_audio:
            branches = ()
        self._route = ar, branches
        self._last_stage = branches[0].name if branches else ar.name
        self.started = True
        self._running[self.request_id] = self
        self._metrics = self._make_metrics(self._last_stage)
        log.info("request %s, stage %s: started", self.request_id, ar.name)
        if self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._on_timeout)
        try:
            self.text.expect(ar, self._input)
        except OmniStageError as error:
            self.fail(error)
            return
        await self._pieces.start(ar)

    async def next(self) -> AudioChunk | None:
        """The next chunk; None after the last one."""
        while True:
            if self._error is not None:
                raise self._error
            # The last one stays, for stages may expect more after it.
            while len(self._takes) > 1 and self._takes[0].over and not self._takes[0].has_audio:
                self._takes.popleft()
            if self._takes and self._takes[0].has_audio:
                chunk = self._takes[0].pop()
                self._go_on()
                return self._numbered(chunk)
            if self.over:
                return None
            self._news.clear()
            await self._news.wait()

    def fail(self, error: OmniStageError) -> None:
        """End it with ``error`` unless it is over, and abort what runs in every stage."""
        if self.over:
            return
        error.request_id = self.request_id
        self._error = error
        self._end()
        if self._metrics is not None:
            self._metrics.failure(type(error).__name__)
            where = error.stage or self._last_stage
            log.info("request %s, stage %s: failed: %s", self.request_id, where, error.message)
        for take in self._takes:
            take.fail(error)

    def fail_threadsafe(self, error: OmniStageError) -> None:
        """As :meth:`fail`, from a finalizer: any thread, any time."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, error)

    async def abort(self) -> None:
        """Return when the stages have let go; :meth:`fail` comes first and makes them."""
        for take in list(self._takes):
            await take.abort()
        await self._pieces.aclose()

    def _go_on(self) -> None:
        """Submit the next piece if the AR stage is done with the last one and a reader reads."""
        if self.over or not self._pieces or (self._takes and not self._takes[-1].sampled):
            return
        if sum(not take.over for take in self._takes) > 1:
            return  # sampling is ahead of decoding by a whole piece
        if self._route is None:
            return
        ar, branches = self._route
        limit = min((branch.max_unread for branch in branches), default=0.0)
        if self._takes and branches and sum(t.unread_seconds for t in self._takes) >= limit:
            return
        number = self._started_takes
        self._started_takes += 1
        asked = self._pieces.take()
        take = Take(number, branches, self._on_news)
        self._takes.append(take)
        take.start(
            ar,
            StageRequest(
                request_id=self._id_of(number),
                external_id=self._external_id,
                input=asked,
                consumers=self._consumers,
                after=self._id_of(number - 1) if number else None,
                more=self._pieces.more,
                text=self.text.part(last=not self._pieces.more),
            ),
        )

    def _id_of(self, number: int) -> str:
        """Internal id of a piece's request."""
        return f"{self.request_id}.{number}" if number else self.request_id

    def _on_news(self, take: Take, chunk: AudioChunk | None = None) -> None:
        """From a take: a chunk came, the AR stage is done with it, or it is over."""
        if chunk is not None and self._metrics is not None:
            self._metrics.chunk(chunk.seconds)
        if take.error is not None:
            self.fail(take.error)
        elif take.over and take.usage is not None and not self.over:
            self._usages[take.number] = take.usage
            self._succeed_if_complete()
        self._news.set()
        if take.sampled:
            self._go_on()

    def _on_pieces(self) -> None:
        """Another piece is there, or it is known that there will be none."""
        self._go_on()
        self._succeed_if_complete()

    def _succeed_if_complete(self) -> None:
        if self.over or self._pieces.more or len(self._usages) < self._started_takes:
            return
        self._takes[-1].nothing_follows()
        self.usage = total([self._usages[number] for number in range(self._started_takes)])
        self._end()
        if self._metrics is not None:
            self._metrics.success(self.usage.finish_reason)
        reason = self.usage.finish_reason
        log.info("request %s, stage %s: finished: %s", self.request_id, self._last_stage, reason)

    def _numbered(self, chunk: AudioChunk) -> AudioChunk:
        """The chunk of a piece as one of the whole."""
        index = self._indices.get(chunk.decoder, 0)
        self._indices[chunk.decoder] = index + 1
        if self._started_takes == 1:
            return chunk
        return replace(chunk, request_id=self.request_id, index=index)

    def _end(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        self._pieces.cancel()
        self._running.pop(self.request_id, None)
        self.text.close(self._error)
        self._news.set()

    def _on_timeout(self) -> None:
        self.fail(DeadlineExceeded(f"the request was not complete after {self._timeout:g} s"))

"""The decoder stage: a channel's updates in, each request's audio out, decoded in batches.

It subscribes to an AR stage's publishers and does not know where they are. Decoding runs in one
worker thread; everything else happens on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING, Final

from anyio import CapacityLimiter, to_thread

from omnistage.config import AUDIO
from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import (
    DeadlineExceeded,
    DecoderError,
    OmniStageError,
    ProtocolError,
    ReaderStalled,
    StageClosed,
    StartupError,
    UpdatesLost,
    error_of_kind,
)
from omnistage.request import AudioChunk, Pcm, Start
from omnistage.stages.decoding import Decoding
from omnistage.stages.watch import Watch
from omnistage.transport.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omnistage.config import DecoderStageConfig
    from omnistage.decoders.base import AnyDecoder
    from omnistage.decoders.window import WindowedStream
    from omnistage.stages.base import PacedSink
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Buffer, Update

log = logging.getLogger(__name__)

_DECODE_SECONDS: Final = 30.0
_REMEMBERED: Final = 1024  # requests that are over; what is late comes within milliseconds


class DecoderStage:
    """Decodes the requests of a channel.

    A request is opened before it is submitted to the AR stage, and ends in exactly one call of its
    sink's ``on_end`` or ``on_error``, unless it is dropped before.

    Args:
        config: What decodes, and in which portions.
        endpoints: This process's sockets.
        channel: The channel to subscribe.

    Attributes:
        late_updates: Updates of requests that were over, or not for this stage.
        on_unexpected: Called with the first update of a request that nobody has opened, and may
            open it; a decoder that is a service learns of its requests so.
    """

    def __init__(
        self, config: DecoderStageConfig, endpoints: Endpoints, *, channel: str = AUDIO
    ) -> None:
        self.name = config.name
        self.late_updates = 0
        self.on_unexpected: Callable[[Update], None] | None = None
        self._config = config
        self._channel = channel
        self._endpoints = endpoints
        self._limiter = CapacityLimiter(1)
        self._open: dict[str, Decoding] = {}
        self._gone: dict[str, int] = {}  # generations of the latest that are over
        self._due: dict[str, Decoding] = {}  # those worth a look, in the order they became so
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._closed: StageClosed | None = None
        self._upstream = "ar"
        self._batch: asyncio.Future[list[Pcm | DecoderError]] | None = None  # in the thread now
        self._in_hands: set[str] = set()
        self._decoder: AnyDecoder | None = None
        self._windowed: WindowedDecoder | None = None
        self._subscriber: Subscriber | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def sample_rate(self) -> int:
        """Samples a second of the audio it makes."""
        if self._decoder is None:
            raise StageClosed("the stage is not started", stage=self.name)
        return self._decoder.sample_rate

    @property
    def codebooks(self) -> int:
        """Ids a frame that it takes; 0 if it takes rows."""
        if self._windowed is None:
            raise StageClosed("the stage is not started", stage=self.name)
        return self._windowed.frames.width

    async def start(self) -> None:
        """Build the decoder and decode a window of zeros, so that the first request is warm.

        Raises:
            StartupError: The decoder could not be built or does not keep its declaration.
        """
        try:
            await to_thread.run_sync(self._build, limiter=self._limiter)
        except OmniStageError:
            raise
        except Exception as error:
            raise StartupError(
                f"the decoder could not be built: {type(error).__name__}: {error}", stage=self.name
            ) from error

    async def subscribe(
        self,
        publishers: Sequence[str],
        subscriber: str,
        *,
        within: float,
        upstream: str = "ar",
        rows: Collection[str] | None = None,
    ) -> None:
        """Subscribe the channel at an AR stage's publishers, and no longer at a former one's.

        Args:
            publishers: Their data endpoints.
            subscriber: This stage's id among the channel's subscribers.
            within: Seconds to wait for the confirmations.
            upstream: Name of that AR stage, for errors.
            rows: Keys of the tensors that its updates carry, if that is known.

        Raises:
            ConfigError: The decoder takes rows, and not of these.
            StartupError: Not all publishers have confirmed in time.
        """
        if self._windowed is not None:
            self._windowed.frames.check_given(rows, upstream)
        self._upstream = upstream
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = Subscriber(self._endpoints, self._channel, subscriber, self)
        await self._subscriber.connect(publishers, within=within)
        log.info("stage %s subscribed %s", self.name, self._channel)

    def open(self, request_id: str, sink: PacedSink) -> None:
        """Expect a request's updates; must be called before it is submitted.

        Raises:
            StageClosed: The stage is stopping or stopped.
        """
        if self._closed is not None:
            raise StageClosed(self._closed.message, stage=self.name)
        watch = Watch(
            self._config.deadlines,
            self._upstream,
            self.name,
            lambda error: self._late(request_id, error),
        )
        self._open[request_id] = Decoding(request_id, sink, watch)

    def drop(self, request_id: str) -> None:
        """Forget a request: its sink is not called again, later updates are ignored. Idempotent."""
        request = self._open.get(request_id)
        if request is not None:
            self._forget(request)

    def resume(self, request_id: str) -> None:
        """Go on with a request that was held, now that its reader has read."""
        request = self._open.get(request_id)
        if request is None or not request.held:
            return
        if request.sink.unread_seconds < self._config.max_unread:
            request.held = False
            self._consider(request)

    async def release(self, request_id: str) -> None:
        """Return when a dropped request is not in the decoder's hands any more."""
        if self._batch is not None and request_id in self._in_hands:
            await asyncio.wait([self._batch])

    def has_ended(self, request_id: str) -> bool:
        """Whether the request's last update is here, its audio perhaps still being decoded."""
        request = self._open.get(request_id)
        return request is not None and request.terminal is not None

    async def serve(self) -> None:
        """Decode what is ready until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while batch := self._take_ready():
                await self._decode(batch)

    async def drain(self) -> None:
        """Refuse new requests and wait for the open ones."""
        self._close("the stage is draining and takes no requests")
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Fail what is open and unsubscribe. Idempotent."""
        self._close("the stage is closed")
        for request in list(self._open.values()):
            self._fail(request, StageClosed("the stage is closed", stage=self.name))
        if self._subscriber is not None:
            self._subscriber.close()
        batch = self._batch
        if batch is not None and (await asyncio.wait([batch], timeout=_DECODE_SECONDS))[1]:
            log.error("stage %s: a decode does not end; its thread is left", self.name)

    def on_update(self, update: Update, buffers: Sequence[Buffer], stamp: int) -> None:
        """Take one request's update from the subscriber."""
        request = self._open.get(update.request_id)
        if request is None and update.start is not None and self.on_unexpected is not None:
            self.on_unexpected(update)
            request = self._open.get(update.request_id)
        if request is None or self._is_of_a_former_life(request, update):
            # Aborted, failed or another subscriber's: the AR stage learns that by its own way.
            self.late_updates += 1
            return
        try:
            self._take(request, update, buffers)
        except OmniStageError as error:
            # Without its traceback, which would keep the request's state as long as it is kept.
            self._fail(request, error.with_traceback(None))

    def on_lost(self, error: UpdatesLost) -> None:
        """Fail every open request: whose updates were lost cannot be known."""
        for request in list(self._open.values()):
            self._fail(request, UpdatesLost(error.message))

    def _build(self) -> None:
        decoder = self._config.build()
        windowed = WindowedDecoder(decoder)
        frames = decoder.left_context + 1 + decoder.right_context
        windowed.decode_clip(windowed.frames.zeros(frames))
        self._decoder, self._windowed = decoder, windowed

    def _is_of_a_former_life(self, request: Decoding, update: Update) -> bool:
        if request.generation is None:
            return update.start is None and self._gone.get(request.request_id) == update.generation
        return update.generation != request.generation

    def _take(self, request: Decoding, update: Update, buffers: Sequence[Buffer]) -> None:
        if update.start is not None:
            self._begin(request, update.start)
            request.generation = update.generation
        if request.stream is None or self._windowed is None:
            raise ProtocolError("data came before the request's start record")
        if update.position != request.position:
            raise UpdatesLost(
                f"ids from {update.position} came where {request.position} was due",
            )
        request.position += len(update.ids)
        frames = request.frames(self._windowed.frames, update, buffers)
        if len(frames):
            request.stream.push(frames)
            request.wanted -= len(frames)
        if update.terminal is not None:
            if update.terminal.error is not None:
                error = error_of_kind(update.terminal.kind, update.terminal.error)
                error.stage = self._upstream
                raise error
            request.terminal = update.terminal
            request.stream.finish()
        if update.segment_end:
            request.position = 0
        request.watch.update_came(more_due=request.terminal is None and not update.paused)
        self._consider(request)

    def _consider(self, request: Decoding) -> None:
        """Have the request decoded if a chunk is there; one in the thread comes again after it."""
        due = request.wanted <= 0 or request.terminal is not None
        request.watch.chunk_due(due and not request.held)
        if due and not request.held and not request.busy:
            self._due[request.request_id] = request
            self._work.set()

    def _begin(self, request: Decoding, start: Start) -> None:
        if request.stream is not None or self._windowed is None:
            raise ProtocolError("a second start record for one request")
        request.chunks = start.chunks or self._config.chunks
        request.stream = self._windowed.open(start.seed)
        self._want(request)

    def _want(self, request: Decoding) -> None:
        """Note how many frames must come before the next chunk can be decoded."""
        if request.stream is not None and self._decoder is not None:
            size = request.chunks.size(request.chunk_index)
            request.wanted = size + self._decoder.right_context - request.stream.pending

    def _take_ready(self) -> list[Decoding]:
        batch = list(islice(self._due.values(), self._config.max_batch))
        for request in batch:
            del self._due[request.request_id]
            request.busy = True
        return batch

    async def _decode(self, batch: list[Decoding]) -> None:
        work = [
            (request.stream, request.chunks.size(request.chunk_index))
            for request in batch
            if request.stream is not None
        ]
        self._in_hands = {request.request_id for request in batch}
        self._batch = asyncio.ensure_future(
            to_thread.run_sync(self._run, work, limiter=self._limiter)
        )
        # Shielded: the thread goes on whether or not we wait, and aclose() waits for it.
        results = await asyncio.shield(self._batch)
        self._batch, self._in_hands = None, set()
        for request, result in zip(batch, results, strict=True):
            request.busy = False
            if request.dropped:
                continue
            if isinstance(result, DecoderError):
                result.request_id, result.stage = request.request_id, self.name
                self._fail(request, result)
            else:
                self._deliver(request, result)

    def _run(self, work: list[tuple[WindowedStream, int]]) -> list[Pcm | DecoderError]:
        """Decode a batch in the worker thread; one that fails is repeated stream by stream."""
        windowed = self._windowed
        if windowed is None:
            raise StageClosed("the stage is not started", stage=self.name)
        try:
            return list(windowed.decode(work))
        except BaseException as error:
            if len(work) == 1:
                log.exception("stage %s: a decode failed", self.name)
                if isinstance(error, DecoderError):
                    return [error]
                return [DecoderError(f"decoding raised {type(error).__name__}")]
        return [self._run([item])[0] for item in work]

    def _deliver(self, request: Decoding, pcm: Pcm) -> None:
        if len(pcm):
            chunk = AudioChunk(
                request.request_id, request.chunk_index, pcm, self.sample_rate, self.name
            )
            request.chunk_index += 1
            request.watch.chunk_came()
            request.sink.on_chunk(chunk)
        if request.dropped:  # by the sink
            return
        stream, terminal = request.stream, request.terminal
        if terminal is not None and stream is not None and stream.done:
            self._forget(request)
            request.sink.on_end(terminal)
            return
        if request.sink.unread_seconds >= self._config.max_unread:
            if self._config.slow_reader == "fail":
                limit = self._config.max_unread
                self._fail(request, ReaderStalled(f"{limit:g} s of audio wait to be read"))
                return
            request.held = True
        self._want(request)
        self._consider(request)

    def _late(self, request_id: str, error: DeadlineExceeded) -> None:
        request = self._open.get(request_id)
        if request is not None:
            self._fail(request, error)

    def _fail(self, request: Decoding, error: OmniStageError) -> None:
        self._forget(request)
        error.request_id = error.request_id or request.request_id
        error.stage = error.stage or self.name
        request.sink.on_error(error)

    def _forget(self, request: Decoding) -> None:
        request.dropped = True
        request.watch.close()
        if request.generation is not None:
            self._gone[request.request_id] = request.generation
            if len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
        self._open.pop(request.request_id, None)
        self._due.pop(request.request_id, None)
        self._check_idle()

    def _check_idle(self) -> None:
        if not self._open:
            self._idle.set()

    def _close(self, why: str) -> None:
        if self._closed is None:
            self._closed = StageClosed(why, stage=self.name)

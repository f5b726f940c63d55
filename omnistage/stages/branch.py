"""A decoder stage and the audio stages behind it, as the one consumer that they are of an AR stage.

What happens between the stages is watched here: an error of one fails its request and no other, and
a stage that was given the last chunk and does not end is late.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

from omnistage.config import AUDIO
from omnistage.errors import DeadlineExceeded, OmniStageError, ServerError, StartupError
from omnistage.request import AudioChunk
from omnistage.stages.base import AudioStage
from omnistage.stages.decoder import DecoderStage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from omnistage.config import DecoderStageConfig
    from omnistage.request import Terminal
    from omnistage.stages.base import AudioSink, PacedSink, Stage
    from omnistage.transport.endpoints import Endpoints

log = logging.getLogger(__name__)

_RELEASE_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 40.0  # a decode that does not end is waited for for 30


class Branch:
    """Everything between one subscription of an AR stage and the audio that a caller reads.

    Args:
        config: The decoder stage, and what makes the stages behind it.
        endpoints: This process's sockets.
    """

    def __init__(self, config: DecoderStageConfig, endpoints: Endpoints) -> None:
        self.name = config.name
        self.decoder = DecoderStage(config, endpoints)
        self.max_unread = config.max_unread
        self._make = config.then
        self._limit = config.deadlines.between_chunks
        self._behind: list[AudioStage] = []
        self._crossings: dict[str, list[_Crossing]] = {}

    @property
    def stages(self) -> list[Stage]:
        """Its stages, the decoder first."""
        return [self.decoder, *self._behind]

    @property
    def consumer(self) -> tuple[str, str]:
        """The (channel, subscriber id) that updates must be published to for it."""
        return AUDIO, self.name

    @property
    def sample_rate(self) -> int:
        """Samples a second of the audio that leaves its last stage."""
        return self._behind[-1].sample_rate if self._behind else self.decoder.sample_rate

    async def start(self) -> None:
        """Start every stage.

        Raises:
            StartupError: One did not come up.
        """
        await self.decoder.start()
        for number, make in enumerate(self._make, start=1):
            try:
                stage = make()
                if not isinstance(stage, AudioStage):
                    raise TypeError(f"`then` made {stage!r}, which is no AudioStage")
                self._behind.append(stage)
                await stage.start()
            except OmniStageError:
                raise
            except Exception as error:
                raise StartupError(
                    f"stage {number} behind {self.name!r} could not start: "
                    f"{type(error).__name__}: {error}",
                    stage=self.name,
                ) from error

    async def subscribe(
        self,
        publishers: Sequence[str],
        *,
        within: float,
        upstream: str,
        rows: Collection[str] | None = None,
    ) -> None:
        """Subscribe the decoder under its own name; see :meth:`DecoderStage.subscribe`."""
        await self.decoder.subscribe(
            publishers, self.name, within=within, upstream=upstream, rows=rows
        )

    def open(
        self, request_id: str, sink: PacedSink, *, after: str | None = None, more: bool = False
    ) -> tuple[str, str]:
        """Expect a request's updates; must be called before it is submitted.

        Args:
            request_id: Internal id.
            sink: Receives its audio.
            after: The request that it continues, which makes no difference here.
            more: Whether another one may continue it, which makes none either.

        Returns:
            The (channel, subscriber id) that they must be published to.

        Raises:
            StageClosed: A stage is stopping or stopped.
            ServerError: A stage's ``open`` raised.
        """
        crossings: list[_Crossing] = []
        if self._behind:
            sink = _Last(sink, lambda: self._close(request_id))
        receiver: PacedSink = sink
        for stage in reversed(self._behind):
            crossing = _Crossing(stage, request_id, receiver, sink, self._limit)
            crossings.append(crossing)
            receiver = crossing.entry
        if crossings:
            self._crossings[request_id] = crossings
        try:
            for crossing in crossings:
                crossing.open()
            self.decoder.open(request_id, receiver)
        except BaseException:
            self._close(request_id)
            raise
        return self.consumer

    def drop(self, request_id: str) -> None:
        """Forget a request in every stage: its sink is not called again. Idempotent."""
        self.decoder.drop(request_id)
        self._close(request_id)

    def resume(self, request_id: str) -> None:
        """Go on with a request that was held, now that its reader has read."""
        self.decoder.resume(request_id)

    async def release(self, request_id: str) -> None:
        """Return when no stage has anything of a dropped request in its hands.

        Raises:
            DeadlineExceeded: A stage behind the decoder has not let go in time.
        """
        await self.decoder.release(request_id)
        for stage in self._behind:
            try:
                async with asyncio.timeout(_RELEASE_SECONDS):
                    await stage.release(request_id)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the stage did not let go of the request within {_RELEASE_SECONDS:g} s",
                    request_id=request_id,
                    stage=stage.name,
                ) from None

    def has_ended(self, request_id: str) -> bool:
        """Whether the request's last update is here, its audio perhaps still on the way."""
        return self.decoder.has_ended(request_id) or any(
            crossing.ended for crossing in self._crossings.get(request_id, ())
        )

    async def aclose(self) -> None:
        """Fail what is open and close every stage. Idempotent."""
        for stage in self.stages:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await stage.aclose()
            except Exception:
                log.exception("stage %s could not be closed", stage.name)
        for request_id in list(self._crossings):
            self._close(request_id)

    def _close(self, request_id: str) -> None:
        for crossing in self._crossings.pop(request_id, ()):
            crossing.close()


class _Crossing:
    """One request at one stage behind a decoder: what goes in, what comes out, and in what time."""

    def __init__(
        self,
        stage: AudioStage,
        request_id: str,
        receiver: AudioSink,
        last: PacedSink,
        limit: float | None,
    ) -> None:
        self.ended = False
        self.entry = _Entry(self)
        self._stage = stage
        self.request_id = request_id
        self._exit = _Exit(self, receiver)
        self._last = last
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def open(self) -> None:
        """Have the stage expect the request."""
        try:
            self.entry.receiver = self._stage.open(self.request_id, self._exit)
        except OmniStageError:
            raise
        except Exception as error:
            raise self._blame(error) from error

    def call(self, action: Callable[[], None]) -> None:
        """Have the stage handle something; what it raises fails the request."""
        if self._closed:
            return
        try:
            action()
        except OmniStageError as error:
            error.request_id = error.request_id or self.request_id
            error.stage = error.stage or self._stage.name
            self._last.on_error(error)
        except Exception as error:
            log.exception("stage %s failed request %s", self._stage.name, self.request_id)
            blame = self._blame(error)
            blame.__cause__ = error
            self._last.on_error(blame)

    def break_off(self, why: str) -> None:
        """The stage broke its contract: end the request."""
        if not self._closed:
            log.error("stage %s, request %s: %s", self._stage.name, self.request_id, why)
            self._last.on_error(
                ServerError(
                    f"the stage broke its contract: {why}",
                    request_id=self.request_id,
                    stage=self._stage.name,
                )
            )

    def owe(self) -> None:
        """The stage has been given everything, or shown that it goes on with it."""
        if self._timer is not None:
            self._timer.cancel()
        if self.ended and self._limit is not None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(self._limit, self._late)

    def close(self) -> None:
        """Let the stage forget the request. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._stage.drop(self.request_id)
        except Exception:
            log.exception("stage %s could not drop %s", self._stage.name, self.request_id)

    @property
    def closed(self) -> bool:
        """Whether nothing may leave the stage any more."""
        return self._closed

    @property
    def unread_seconds(self) -> float:
        """What the caller has not read; audio inside the stage does not count."""
        return self._last.unread_seconds

    def _late(self) -> None:
        name = self._stage.name
        self._last.on_error(
            DeadlineExceeded(
                f"no audio for {self._limit:g} s; the stage that was late is {name!r}",
                request_id=self.request_id,
                stage=name,
            )
        )

    def _blame(self, error: Exception) -> ServerError:
        return ServerError(
            f"the stage raised {type(error).__name__}: {error}",
            request_id=self.request_id,
            stage=self._stage.name,
        )


class _Entry:
    """What the stage before gives its audio to."""

    receiver: AudioSink

    def __init__(self, crossing: _Crossing) -> None:
        self._crossing = crossing

    @property
    def unread_seconds(self) -> float:
        return self._crossing.unread_seconds

    def on_chunk(self, chunk: AudioChunk) -> None:
        self._crossing.call(lambda: self.receiver.on_chunk(chunk))

    def on_end(self, terminal: Terminal) -> None:
        self._crossing.ended = True
        self._crossing.owe()
        self._crossing.call(lambda: self.receiver.on_end(terminal))

    def on_error(self, error: OmniStageError) -> None:
        self._crossing.call(lambda: self.receiver.on_error(error))


class _Exit:
    """What the stage gives its own audio to."""

    def __init__(self, crossing: _Crossing, receiver: AudioSink) -> None:
        self._crossing = crossing
        self._receiver = receiver
        self._index = 0
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def on_chunk(self, chunk: AudioChunk) -> None:
        if not self._is_heard():
            return
        if wrong := self._wrong_with(chunk):
            self._crossing.break_off(f"it gave a chunk that {wrong}")
            return
        self._index += 1
        self._crossing.owe()
        self._receiver.on_chunk(chunk)

    def on_end(self, terminal: Terminal) -> None:
        if self._is_heard():
            self._receiver.on_end(terminal)

    def on_error(self, error: OmniStageError) -> None:
        if self._is_heard():
            self._receiver.on_error(error)

    def _is_heard(self) -> bool:
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(
                self._crossing.break_off,
                "it called its sink from another thread; loop.call_soon_threadsafe is the way",
            )
            return False
        return not self._crossing.closed

    def _wrong_with(self, chunk: object) -> str | None:
        if not isinstance(chunk, AudioChunk):
            return f"is a {type(chunk).__name__}"
        if chunk.request_id != self._crossing.request_id:
            return f"is of {chunk.request_id}"
        if chunk.index != self._index:
            return f"has index {chunk.index} where {self._index} was due"
        pcm = chunk.pcm
        if getattr(pcm, "dtype", None) != "float32" or pcm.ndim != 1 or not len(pcm):
            return "is no float32 array of one dimension with samples in it"
        return None


class _Last:
    """The caller's own sink: it is over with a request as soon as the request is over."""

    def __init__(self, sink: PacedSink, close: Callable[[], None]) -> None:
        self._sink = sink
        self._close = close

    @property
    def unread_seconds(self) -> float:
        return self._sink.unread_seconds

    def on_chunk(self, chunk: AudioChunk) -> None:
        self._sink.on_chunk(chunk)

    def on_end(self, terminal: Terminal) -> None:
        self._close()
        self._sink.on_end(terminal)

    def on_error(self, error: OmniStageError) -> None:
        self._close()
        self._sink.on_error(error)

"""A decoder stage and the audio stages behind it, as the one consumer that they are of an AR stage.

What happens between the stages is watched here: an error of one fails its request and no other, and
a stage that was given the last chunk and does not end is late.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from omnistage.errors import DeadlineExceeded, OmniStageError, ServerError, StartupError
from omnistage.stages.decoder import DecoderStage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.config import DecoderStageConfig
    from omnistage.request import AudioChunk, Terminal
    from omnistage.stages.base import AudioSink, AudioStage, PacedSink, Stage
    from omnistage.transport.endpoints import Endpoints

log = logging.getLogger(__name__)


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
        """See :attr:`DecoderStage.consumer`."""
        return self.decoder.consumer

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
        for make in self._make:
            try:
                stage = make()
                self._behind.append(stage)
                await stage.start()
            except OmniStageError:
                raise
            except Exception as error:
                raise StartupError(
                    f"stage {len(self._behind)} behind {self.name!r} could not start: "
                    f"{type(error).__name__}: {error}",
                    stage=self.name,
                ) from error

    async def subscribe(self, publishers: Sequence[str], *, within: float, upstream: str) -> None:
        """Subscribe the decoder under its own name; see :meth:`DecoderStage.subscribe`."""
        await self.decoder.subscribe(publishers, self.name, within=within, upstream=upstream)

    def open(self, request_id: str, sink: PacedSink) -> None:
        """Expect a request's updates; must be called before it is submitted.

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

    def drop(self, request_id: str) -> None:
        """Forget a request in every stage: its sink is not called again. Idempotent."""
        self.decoder.drop(request_id)
        self._close(request_id)

    def resume(self, request_id: str) -> None:
        """Go on with a request that was held, now that its reader has read."""
        self.decoder.resume(request_id)

    async def release(self, request_id: str) -> None:
        """Return when no stage has anything of a dropped request in its hands."""
        await self.decoder.release(request_id)
        for stage in self._behind:
            await stage.release(request_id)

    def has_ended(self, request_id: str) -> bool:
        """Whether the request's last update is here, its audio perhaps still on the way."""
        return self.decoder.has_ended(request_id) or any(
            crossing.ended for crossing in self._crossings.get(request_id, ())
        )

    async def aclose(self) -> None:
        """Fail what is open and close every stage. Idempotent."""
        for stage in self.stages:
            try:
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
        self._request_id = request_id
        self._exit = _Exit(self, receiver)
        self._last = last
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def open(self) -> None:
        """Have the stage expect the request."""
        try:
            self.entry.receiver = self._stage.open(self._request_id, self._exit)
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
            error.request_id = error.request_id or self._request_id
            error.stage = error.stage or self._stage.name
            self._last.on_error(error)
        except Exception as error:
            log.exception("stage %s failed request %s", self._stage.name, self._request_id)
            blame = self._blame(error)
            blame.__cause__ = error
            self._last.on_error(blame)

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
            self._stage.drop(self._request_id)
        except Exception:
            log.exception("stage %s could not drop %s", self._stage.name, self._request_id)

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
                request_id=self._request_id,
                stage=name,
            )
        )

    def _blame(self, error: Exception) -> ServerError:
        return ServerError(
            f"the stage raised {type(error).__name__}: {error}",
            request_id=self._request_id,
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

    def on_chunk(self, chunk: AudioChunk) -> None:
        if not self._crossing.closed:
            self._crossing.owe()
            self._receiver.on_chunk(chunk)

    def on_end(self, terminal: Terminal) -> None:
        if not self._crossing.closed:
            self._receiver.on_end(terminal)

    def on_error(self, error: OmniStageError) -> None:
        if not self._crossing.closed:
            self._receiver.on_error(error)


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

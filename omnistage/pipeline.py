"""The pipeline: an AR stage and a decoder stage joined into one call, text in and audio out."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from omnistage.errors import (
    ConfigError,
    InvalidRequest,
    StageClosed,
)
from omnistage.metrics import RequestMetrics, default_metrics
from omnistage.request import (
    ChunkPolicy,
    StageInput,
    check_text,
)
from omnistage.stages.ar import ARStage
from omnistage.stages.base import check_environment, check_event_loop, settled
from omnistage.stages.decoder import DecoderStage
from omnistage.stream import Stream, Submission
from omnistage.transport.endpoints import Endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from omnistage.config import ARStageConfig, DecoderStageConfig
    from omnistage.stages.base import Stage

log = logging.getLogger(__name__)

_SUBSCRIBE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a pipeline takes requests.

    Args:
        ok: Whether it does.
        reason: If not, why.
        running: Requests in it.
    """

    ok: bool
    reason: str | None
    running: int


class Pipeline:
    """Turns text into audio, as a stream that starts while the model is still generating.

    An async context manager: it starts its stages on entry; leaving it aborts what is still running
    and leaves no process, thread, socket or file behind. All of it belongs to one event loop;
    several pipelines may share that.

    Args:
        ar: The AR stage.
        decoder: The decoder stage.

    Raises:
        ConfigError: Two stages of one name.
    """

    def __init__(self, *, ar: ARStageConfig, decoder: DecoderStageConfig) -> None:
        if ar.name == decoder.name:
            raise ConfigError(f"two stages are named {ar.name!r}; give each its own name")
        self._configs = (ar, decoder)
        self._running: dict[str, Submission] = {}
        self._ar: ARStage | None = None
        self._decoder: DecoderStage | None = None
        self._started: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()
        self._host: asyncio.Task[None] | None = None

    @classmethod
    def from_preset(cls, name: str, /, **changes: Any) -> Self:
        """A pipeline that omnistage knows how to set up.

        Args:
            name: ``talker``, the embedded voice.
            changes: Fields of the preset's :class:`~omnistage.config.ARStageConfig` to replace.

        Raises:
            ConfigError: An unknown preset or field.
        """
        from omnistage.models import load_preset

        ar, decoder = load_preset(name, **changes)
        return cls(ar=ar, decoder=decoder)

    async def __aenter__(self) -> Self:
        check_event_loop()
        if self._host is not None:
            raise StageClosed("a pipeline can be entered once; make another one")
        check_environment()
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        # A task of its own, so that entry and exit may come from different tasks.
        self._host = loop.create_task(self._run(), name="omnistage-pipeline")
        try:
            await asyncio.wait([self._host, self._started], return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self.aclose()
            raise
        if self._host.done():
            await self._host
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is running and stop every stage. Idempotent."""
        if self._host is None:
            return
        self._stop.set()
        if self._started is not None and not self._started.done():
            self._host.cancel()
        # However often we are cancelled: half a shutdown would leave processes behind.
        await settled(self._host)
        if not self._host.cancelled():
            self._host.exception()  # retrieved; entering the pipeline or a request has raised it

    def _request_metrics(self) -> RequestMetrics:
        ar, decoder = self._configs
        return RequestMetrics(default_metrics(), ar.served_name, decoder.name)

    def health(self) -> Health:
        """Whether the pipeline takes requests, and if not, why; never raises."""
        try:
            ar, _ = self._stages()
        except StageClosed as error:
            return Health(ok=False, reason=str(error), running=len(self._running))
        reason = ar.closed
        return Health(
            ok=reason is None,
            reason=None if reason is None else str(reason),
            running=len(self._running),
        )

    async def ready(self) -> None:
        """Return if the pipeline takes requests.

        Raises:
            StageClosed: It is not entered, stopping, stopped, or a stage died.
        """
        ar, _ = self._stages()
        if ar.closed is not None:
            raise ar.closed

    @property
    def sample_rate(self) -> int:
        """Samples a second of every chunk.

        Raises:
            StageClosed: The pipeline does not run.
        """
        return self._stages()[1].sample_rate

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        voice: str | None = None,
        chunks: ChunkPolicy | None = None,
        timeout: float | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Stream:
        """Prepare a request; it starts when the stream is entered or first read.

        Args:
            prompt: Text, or prompt token ids.
            sampling: Fields of vLLM's ``SamplingParams`` over the stage's own.
            seed: Seeds sampling and decoder noise.
            voice: A voice of the preset.
            chunks: Chunk sizes over the decoder stage's own.
            timeout: Seconds from the start to the last chunk.
            priority: vLLM's request priority.
            trace_headers: W3C trace context.
            request_id: What the caller calls it, for logs; two requests may share it.

        Returns:
            The request's audio.

        Raises:
            InvalidRequest: A timeout that is not positive, or an argument of another type.
        """
        if timeout is not None and not _is_positive(timeout):
            raise InvalidRequest(
                f"a timeout must be a positive number of seconds, got {timeout!r}",
                parameter="timeout",
            )
        check_text(request_id, "request_id", limit=256)
        asked = StageInput(
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            voice=voice,
            chunks=chunks,
            priority=priority,
            trace_headers=trace_headers,
        )
        return Stream(
            Submission(
                self._stages,
                self._running,
                asked,
                metrics=self._request_metrics,
                external_id=request_id,
                timeout=timeout,
            )
        )

    def _stages(self) -> tuple[ARStage, DecoderStage]:
        if self._host is not None and self._host.done() and not self._host.cancelled():
            error = self._host.exception()
            if error is not None:
                raise StageClosed(f"the pipeline failed: {error}") from error
        if self._ar is None or self._decoder is None or self._stop.is_set():
            raise StageClosed("the pipeline is not running; use it as `async with`")
        if self._host is not None and self._host.get_loop() is not asyncio.get_running_loop():
            raise StageClosed(
                "the pipeline runs on another event loop; submit from there, for instance with "
                "asyncio.run_coroutine_threadsafe"
            )
        return self._ar, self._decoder

    async def _run(self) -> None:
        """Own the stages from start to end."""
        with Endpoints() as endpoints:
            ar, decoder = (
                ARStage(self._configs[0], endpoints),
                DecoderStage(self._configs[1], endpoints),
            )
            try:
                # The engine first: it may be forked, and the decoder starts torch's threads.
                await ar.start()
                await decoder.start()
                await decoder.subscribe(
                    ar.publishers, "local", within=_SUBSCRIBE_SECONDS, upstream=ar.name
                )
                self._ar, self._decoder = ar, decoder
                await self._serve([ar, decoder])
            finally:
                self._stop.set()
                await self._end_requests()
                await decoder.aclose()
                await ar.aclose()
                self._ar = self._decoder = None

    async def _serve(self, stages: Sequence[Stage]) -> None:
        serving = [asyncio.create_task(stage.serve()) for stage in stages]
        stopping = asyncio.create_task(self._stop.wait())
        if self._started is not None:
            self._started.set_result(None)
        try:
            done, _ = await asyncio.wait([*serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                await task
        finally:
            for task in (*serving, stopping):
                task.cancel()
            await asyncio.gather(*serving, stopping, return_exceptions=True)

    async def _end_requests(self) -> None:
        running = list(self._running.values())
        for request in running:
            request.fail(StageClosed("the pipeline is closing", request_id=request.request_id))
        # What an abort raises is logged there; the stages are closed in any case.
        await asyncio.gather(*(request.abort() for request in running), return_exceptions=True)


def _is_positive(seconds: object) -> bool:
    return isinstance(seconds, int | float) and seconds > 0

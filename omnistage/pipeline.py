"""The pipeline: an AR stage and its decoders joined into one call, text in and audio out."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any, Self

from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.errors import ConfigError, InvalidRequest, StageClosed
from omnistage.metrics import RequestMetrics, default_metrics
from omnistage.monitoring import Health as Health
from omnistage.request import (
    MODALITIES,
    ChunkPolicy,
    StageInput,
    check_name,
    check_text,
    is_positive,
)
from omnistage.services.remote_ar import RemoteARStage, RemoteRoute
from omnistage.stages.admission import consumers_of
from omnistage.stages.base import serve, settled
from omnistage.stages.branch import Branch
from omnistage.stages.environment import check_event_loop
from omnistage.stages.make import ar_maker
from omnistage.stages.route import Route, close, pick, start
from omnistage.stream import Stream, Submission
from omnistage.transport.endpoints import Endpoints, check_endpoint
from omnistage.transport.keys import load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from vllm.v1.engine.async_llm import AsyncLLM

    from omnistage.payload import Array
    from omnistage.stages.base import AutoregressiveStage, Stage
    from omnistage.stages.route import AnyRoute, RequestBranch

log = logging.getLogger(__name__)


class Pipeline:
    """Turns text into audio, as a stream that starts while the model is still generating.

    An async context manager: it starts its stages on entry; leaving it aborts what is still running
    and leaves no process, thread, socket or file behind. All of it belongs to one event loop;
    several pipelines may share that.

    Args:
        ar: The AR stage, or what makes one of this process's sockets; its attribute ``keys``, if it
            has one, is the directory of their keys.
        decoder: The decoder stage; several, each of which decodes every request; or none, where
            requests end with the AR stage or others subscribe to its updates.
        thinker: Another AR stage, before it: requests are answered there, in text, and the rows of
            hidden states behind that are the prompts of ``ar``, which is the talker then.
        llm: An engine for ``ar`` that is running already, its configuration given to
            :func:`~omnistage.attach` before it was made. The pipeline leaves it running.

    Raises:
        ConfigError: Two stages of one name, or what is no stage's description.
    """

    def __init__(
        self,
        *,
        ar: ARStageConfig | Callable[[Endpoints], AutoregressiveStage],
        decoder: DecoderStageConfig | Sequence[DecoderStageConfig] | None,
        thinker: ARStageConfig | Callable[[Endpoints], AutoregressiveStage] | None = None,
        llm: AsyncLLM | None = None,
    ) -> None:
        decoders = [decoder] if isinstance(decoder, DecoderStageConfig) else list(decoder or ())
        if not all(isinstance(one, DecoderStageConfig) for one in decoders):
            raise ConfigError("decoder is a DecoderStageConfig, a list of them, or None")
        make_ar = ar_maker(ar, thinker, llm)
        _check_names([*(s for s in (thinker, ar) if isinstance(s, ARStageConfig)), *decoders])
        self._set_up(
            lambda endpoints: [
                Route(make_ar(endpoints), [Branch(config, endpoints) for config in decoders])
            ],
            getattr(ar, "keys", None) or getattr(thinker, "keys", None),
        )

    def _set_up(
        self,
        make_routes: Callable[[Endpoints], Sequence[AnyRoute]],
        keys: str | Path | None,
    ) -> None:
        self._make_routes = make_routes
        self._keys = keys
        self._running: dict[str, Submission] = {}
        self._routes: Sequence[AnyRoute] = ()
        self._started: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()
        self._failure: Exception | None = None
        self._host: asyncio.Task[None] | None = None

    @classmethod
    def from_preset(cls, model: str, /, **changes: Any) -> Self:
        """A pipeline that omnistage knows how to set up.

        Args:
            model: A preset's name, or a model's directory or hub id.
            changes: Fields of the preset or its AR stage; see :func:`omnistage.models.load_preset`.

        Raises:
            ConfigError: An unknown preset or field, or a checkpoint that is not in order.
        """
        from omnistage.models import load_preset

        ar, decoder = load_preset(model, **changes)
        return cls(ar=ar, decoder=decoder)

    @classmethod
    def connect(
        cls,
        *services: str,
        decoders: Sequence[str] = ("decoder",),
        keys: str | Path | None = None,
        within: float = 10.0,
    ) -> Self:
        """A pipeline whose stages are services, in other processes or on other hosts.

        Each request goes to the AR service that has the fewest of ours, and there to the decoder
        service that has the fewest, for its whole life. Services may come and go: one that is gone
        fails the requests it had and is used again when it is back.

        Args:
            services: Endpoints of AR services, as ``omnistage stage ar`` prints them.
            decoders: Names of the decoder stages that decode each request; none, where requests end
                with the AR stage or others subscribe to its updates.
            keys: Directory of the CURVE keys of tcp services that have some.
            within: Seconds until one AR service must have answered and have a decoder of each name.

        Raises:
            ConfigError: No endpoint, one that cannot be one, or a name that cannot be one.
        """
        if not services:
            raise ConfigError("there is no AR service to connect to")
        for service in services:
            check_endpoint(service)
        names = [decoders] if isinstance(decoders, str) else list(decoders)
        for name in names:
            check_name(name, "a decoder's name")
            if names.count(name) > 1:
                raise ConfigError(f"two decoders are named {name!r}; those share the requests")
        if not is_positive(within):
            raise ConfigError(f"within must be a positive number of seconds, got {within!r}")
        client = f"client-{secrets.token_hex(8)}"
        pipeline = cls.__new__(cls)
        pipeline._set_up(
            lambda endpoints: [
                RemoteRoute(
                    RemoteARStage(endpoints, service, client=client, roles=names, within=within)
                )
                for service in dict.fromkeys(services)
            ],
            keys,
        )
        return pipeline

    async def __aenter__(self) -> Self:
        check_event_loop()
        if self._host is not None:
            raise StageClosed("a pipeline can be entered once; make another one")
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

    def _request_metrics(self, stage: str) -> RequestMetrics:
        return RequestMetrics(default_metrics(), self._pick()[0].model_name, stage)

    def health(self) -> Health:
        """Whether the pipeline takes requests, and if not, why; never raises, in any thread."""
        try:
            closed = self._pick()[0].closed
        except StageClosed as error:
            closed = error
        reason = None if closed is None else str(closed)
        return Health(ok=closed is None, reason=reason, running=len(self._running))

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
        """Samples a second of every chunk of the first decoder.

        Raises:
            StageClosed: The pipeline does not run.
            ConfigError: It has no decoder.
        """
        branches = self._pick()[1]
        if not branches:
            raise ConfigError("the pipeline has no decoder")
        return branches[0].sample_rate

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the AR stage publishes its updates, for :func:`~omnistage.subscribe`.

        Raises:
            StageClosed: The pipeline does not run.
        """
        return tuple(endpoint for route in self._served() for endpoint in route.ar.publishers)

    def submit(
        self,
        prompt: str | AsyncIterable[str] | Sequence[int] | Array,
        *,
        sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        voice: str | None = None,
        chunks: ChunkPolicy | None = None,
        timeout: float | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        conditioning: Mapping[str, Array] | None = None,
        by_sentence: bool = False,
        modalities: Collection[str] = MODALITIES,
        subscribers: Iterable[str] = (),
        request_id: str | None = None,
    ) -> Stream:
        """Prepare a request; it starts when the stream is entered or first read.

        Args:
            prompt: Text, or an async iterator of its parts, which is spoken as its sentences are
                complete; prompt token ids; or embeddings, [positions, hidden size].
            sampling: Fields of vLLM's ``SamplingParams`` over the stage's own.
            seed: Seeds sampling and decoder noise.
            voice: A voice of the preset.
            chunks: Chunk sizes over the decoder stage's own.
            timeout: Seconds from the start to the last chunk.
            priority: vLLM's request priority.
            trace_headers: W3C trace context.
            conditioning: Tensors for the model, by name; copied.
            by_sentence: Whether a text is run sentence by sentence, as one that comes always is.
            modalities: ``("text",)`` for a thinker's text alone, which never reaches the talker.
            subscribers: Ids under which others have subscribed to updates, and get this request's;
                one that is not there fails the request.
            request_id: What the caller calls it, for logs; two requests may share it.

        Returns:
            The request's audio.

        Raises:
            InvalidRequest: A timeout that is not positive, an argument of another type, or a tensor
                that cannot cross.
        """
        if timeout is not None and not is_positive(timeout):
            raise InvalidRequest(
                f"a timeout must be a positive number of seconds, got {timeout!r}",
                parameter="timeout",
            )
        check_text(request_id, "request_id", limit=256)
        text = prompt if isinstance(prompt, AsyncIterable) else None
        asked = StageInput(
            prompt="" if isinstance(prompt, AsyncIterable) else prompt,
            sampling=sampling,
            seed=seed,
            voice=voice,
            chunks=chunks,
            priority=priority,
            trace_headers=trace_headers,
            conditioning=conditioning,
            by_sentence=by_sentence or text is not None,
            modalities=modalities,
        )
        return Stream(
            Submission(
                self._stages,
                self._running,
                asked,
                text,
                metrics=self._request_metrics,
                consumers=consumers_of(subscribers),
                external_id=request_id,
                timeout=timeout,
            )
        )

    def _stages(self) -> tuple[AutoregressiveStage, Sequence[RequestBranch]]:
        """The stages for the next request, on the event loop that they run on."""
        picked = self._pick()
        if self._host is not None and self._host.get_loop() is not asyncio.get_running_loop():
            raise StageClosed(
                "the pipeline runs on another event loop; submit from there, for instance with "
                "asyncio.run_coroutine_threadsafe"
            )
        return picked

    def _pick(self) -> tuple[AutoregressiveStage, Sequence[RequestBranch]]:
        """The stages for the next request, from any thread."""
        route = pick(self._served())
        return route.ar, route.branches

    def _served(self) -> Sequence[AnyRoute]:
        """The running routes, from anywhere."""
        if self._failure is not None:
            raise StageClosed(self._why()) from self._failure
        if not self._routes or self._stop.is_set():
            raise StageClosed("the pipeline is not running; use it as `async with`")
        return self._routes

    async def _run(self) -> None:
        """Own the stages from start to end."""
        with Endpoints(keys=load_keys(self._keys)) as endpoints:
            routes = self._make_routes(endpoints)
            try:
                await start(routes)
                self._routes = routes
                await self._serve([stage for route in routes for stage in route.stages])
            except Exception as error:
                self._failure = error
                raise
            finally:
                self._stop.set()
                await self._end_requests()
                await close(routes)
                self._routes = ()

    async def _serve(self, stages: Sequence[Stage]) -> None:
        serving = asyncio.create_task(serve(stages))
        stopping = asyncio.create_task(self._stop.wait())
        if self._started is not None:
            self._started.set_result(None)
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        finally:
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)

    def _why(self) -> str:
        if self._failure is None:
            return "the pipeline is closing"
        return f"the pipeline failed: {type(self._failure).__name__}: {self._failure}"

    async def _end_requests(self) -> None:
        running = list(self._running.values())
        for request in running:
            request.fail(StageClosed(self._why(), request_id=request.request_id))
        # What an abort raises is logged there; the stages are closed in any case.
        await asyncio.gather(*(request.abort() for request in running), return_exceptions=True)


def _check_names(stages: Sequence[ARStageConfig | DecoderStageConfig]) -> None:
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two stages are named {name!r}; give each its own name")

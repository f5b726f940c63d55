"""An AR stage as a process of its own: it runs what its clients submit.

Decoder services that have subscribed to its updates are listed to every client; which of them
decodes a request is the client's choice, and the request's first update tells that decoder who gets
the audio.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from omnistage.config import AUDIO
from omnistage.errors import (
    ConfigError,
    InvalidRequest,
    OmniStageError,
    ServerError,
    StageClosed,
    StreamClosed,
)
from omnistage.metrics import ServiceMetrics, default_metrics
from omnistage.request import StageRequest, check_name
from omnistage.transport.endpoints import check_endpoint
from omnistage.transport.service import ServiceServer
from omnistage.wire import PROTOCOL_VERSION
from omnistage.wire_services import (
    INPUTS,
    Abort,
    Aborted,
    ARInfo,
    Decoders,
    Done,
    Fault,
    Input,
    Pieces,
    Split,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine
    from typing import Any

    from omnistage.request import Usage
    from omnistage.stages.base import AutoregressiveStage, RunningRequest
    from omnistage.transport.endpoints import Endpoints
    from omnistage.transport.service import Client
    from omnistage.wire_services import DecoderInfo, ServiceMessage

log = logging.getLogger(__name__)

MAX_REQUESTS: Final = 4096
"""Requests at once, those in vLLM's queue included."""


class ARService:
    """Serves an AR stage to clients and decoder services.

    Args:
        stage: The AR stage, not started.
        endpoints: This process's sockets.
        bind: Where clients and decoders connect: ``ipc`` or ``tcp://host:port``.
        codec: Names what the stage's ids are; a decoder that names another codec is refused.
        codebooks: Ids a frame, likewise; 0 checks nothing.
    """

    def __init__(
        self,
        stage: AutoregressiveStage,
        endpoints: Endpoints,
        *,
        bind: str,
        codec: str = "",
        codebooks: int = 0,
    ) -> None:
        self.stage = stage
        self._endpoints = endpoints
        self._bind = bind
        self._codec = codec
        self._codebooks = codebooks
        self._metrics = ServiceMetrics(default_metrics(), stage.name)
        self._server: ServiceServer | None = None
        self._running: dict[str, tuple[Client, RunningRequest]] = {}
        self._awaited: dict[str, Client] = {}  # requests that are over and will be continued
        self._continued: set[str] = set()  # those that run, and after which nothing is awaited
        self._decoders: dict[bytes, DecoderInfo] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._running) + len(self._awaited)

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    @property
    def endpoint(self) -> str:
        """Where clients and decoders connect.

        Raises:
            StageClosed: The service is not started.
        """
        if self._server is None:
            raise StageClosed("the service is not started", stage=self.name)
        return self._server.endpoint

    @property
    def closed(self) -> StageClosed | None:
        """Why it takes no requests; None while it does."""
        if self._draining:
            return StageClosed("the service is draining and takes no requests", stage=self.name)
        return self.stage.closed

    async def start(self) -> None:
        """Start the stage, then listen.

        Raises:
            StartupError: The stage did not come up, or the service cannot listen there.
        """
        await self.stage.start()
        self._server = ServiceServer(self._endpoints, self._bind, self)

    async def serve(self) -> None:
        """Serve until cancelled.

        Raises:
            StageClosed: The stage can serve nobody any more.
        """
        serving = asyncio.ensure_future(self.stage.serve())
        ended = asyncio.ensure_future(self.stage.ended())
        try:
            await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
            raise self.stage.closed or StageClosed("the stage has ended", stage=self.name)
        finally:
            serving.cancel()
            ended.cancel()
            await asyncio.gather(serving, ended, return_exceptions=True)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, and for what continues them."""
        self._draining = True
        self._announce()
        while len(self):
            self._idle.clear()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Abort what is running, stop the stage and stop listening. Idempotent."""
        self._draining = True
        for _, running in list(self._running.values()):
            running.fail(StageClosed("the service is closed", stage=self.name))
        await self.stage.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def on_greet(self, client: Client) -> ARInfo:
        """Take a client, or a decoder once it has subscribed."""
        decoder = client.greeting.decoder
        check_name(client.greeting.name, "a client's name")
        loop = asyncio.get_running_loop()
        known = self._decoders.get(client.identity)
        if decoder is None:
            self._decoders.pop(client.identity, None)
        else:
            self._check(decoder, client.greeting.name)
            self._decoders[client.identity] = decoder
        if known != decoder:
            log.info("decoder %s: %s", client, "left" if decoder is None else "joined")
            loop.call_soon(self._announce)
        elif decoder is None:
            loop.call_soon(self._tell, client)  # behind the welcome
        rows = getattr(self.stage, "row_keys", None)
        return ARInfo(
            self.name,
            self.stage.model_name,
            tuple(self.stage.publishers),
            AUDIO,
            self._codec,
            self._codebooks,
            INPUTS,
            None if rows is None else tuple(sorted(rows)),
        )

    def on_message(self, client: Client, message: ServiceMessage) -> None:
        """Do what a client asks."""
        if isinstance(message, Submit):
            self._submit(client, message)
        elif isinstance(message, Abort):
            self._spawn(self._abort(client, message.request_id))
        elif isinstance(message, Split):
            self._spawn(self._split(client, message))

    def on_gone(self, client: Client) -> None:
        """Free what was run for it, and list it no more."""
        if self._decoders.pop(client.identity, None) is not None:
            self._announce()
        for request_id, owner in list(self._awaited.items()):
            if owner is client:
                del self._awaited[request_id]
        self._idle.set()
        for owner, running in list(self._running.values()):
            if owner is client:
                running.fail(StreamClosed("the client that submitted the request is gone"))

    def _check(self, decoder: DecoderInfo, name: str) -> None:
        check_name(decoder.name, "a decoder's name")
        check_name(decoder.subscriber, "a subscriber id")
        if decoder.subscriber != name:
            raise ConfigError(f"{name!r} must subscribe under its own name")
        for endpoint in (decoder.service, *decoder.publishers):
            check_endpoint(endpoint)
        for other in self._decoders.values():
            if other.name == decoder.name and other.sample_rate != decoder.sample_rate:
                raise ConfigError(
                    f"another decoder {decoder.name!r} makes {other.sample_rate} samples a second, "
                    f"this one {decoder.sample_rate}; decoders of one name stand in for each other"
                )
        if decoder.codec != self._codec and decoder.codec and self._codec:
            raise ConfigError(
                f"stage {self.name!r} emits {self._codec!r}, decoder {decoder.name!r} takes "
                f"{decoder.codec!r}; join stages of one codec"
            )
        if decoder.codebooks != self._codebooks and decoder.codebooks and self._codebooks:
            raise ConfigError(
                f"stage {self.name!r} emits frames of {self._codebooks} ids, decoder "
                f"{decoder.name!r} takes {decoder.codebooks}"
            )

    def _announce(self) -> None:
        if self._server is not None:
            for client in list(self._server.clients.values()):
                self._tell(client)

    def _tell(self, client: Client) -> None:
        self._send(
            client, Decoders(PROTOCOL_VERSION, tuple(self._decoders.values()), self._draining)
        )

    def _send(self, client: Client, message: ServiceMessage) -> None:
        if self._server is not None:
            self._server.send(client, message)

    def _submit(self, client: Client, message: Submit) -> None:
        request_id = message.request_id

        def on_done(outcome: Usage | OmniStageError) -> None:
            self._running.pop(request_id, None)
            self._metrics.ended(_outcome(outcome))
            expected = message.more and request_id not in self._continued
            self._continued.discard(request_id)
            if expected and not isinstance(outcome, OmniStageError):
                self._awaited[request_id] = client
            self._idle.set()
            self._send(client, Done.of(request_id, outcome))

        after = message.after or ""
        if client not in {self._awaited.get(after), self._running.get(after, (None,))[0]}:
            after = ""  # somebody else's, or unknown
        continues = after in self._running or after in self._awaited
        if self._awaited.pop(after, None) is None and continues:
            self._continued.add(after)  # its last update was faster than its outcome
        try:
            if message.reply != client.greeting.name:
                raise InvalidRequest("a request's audio goes to the client that submits it")
            if (closed := self.closed) is not None and not (continues and self._draining):
                raise closed
            if request_id in self._running:
                raise InvalidRequest(f"request {request_id} is running already")
            if len(self._running) >= MAX_REQUESTS:
                raise ServerError(f"the service has {MAX_REQUESTS} requests; try again later")
            running = self.stage.submit(
                StageRequest(
                    request_id=request_id,
                    external_id=message.external_id,
                    input=message.input.stage_input(),
                    final_stage=not message.consumers,
                    consumers=message.consumers,
                    reply=message.reply,
                ),
                on_done=on_done,
            )
        except OmniStageError as error:
            self._send(client, Done.of(request_id, error))
        except Exception as error:
            log.exception("request %s could not be started", request_id)
            failure = ServerError(f"starting the request raised {type(error).__name__}: {error}")
            self._send(client, Done.of(request_id, failure))
        else:
            self._running[request_id] = (client, running)
            self._metrics.begun()

    async def _abort(self, client: Client, request_id: str) -> None:
        owner, running = self._running.get(request_id, (None, None))
        if self._awaited.get(request_id) is client:
            del self._awaited[request_id]
            self._idle.set()
        fault = None
        if running is not None and owner is client:
            self._continued.add(request_id)  # by nothing; it may have just ended all the same
            try:
                await running.abort()
            except OmniStageError as error:
                fault = Fault.of(error)
        self._send(client, Aborted(PROTOCOL_VERSION, request_id, fault))

    async def _split(self, client: Client, message: Split) -> None:
        try:
            pieces = await self.stage.split(message.input.stage_input())
            answer = Pieces(PROTOCOL_VERSION, message.call, tuple(map(Input.of, pieces)))
        except OmniStageError as error:
            answer = Pieces(PROTOCOL_VERSION, message.call, fault=Fault.of(error))
        except Exception as error:
            log.exception("an input of client %s could not be cut", client)
            failure = ServerError(f"cutting the input raised {type(error).__name__}: {error}")
            answer = Pieces(PROTOCOL_VERSION, message.call, fault=Fault.of(failure))
        self._send(client, answer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _outcome(outcome: Usage | OmniStageError) -> str:
    if isinstance(outcome, StreamClosed):
        return "aborted"
    return type(outcome).__name__ if isinstance(outcome, OmniStageError) else "ok"


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        log.exception("a client's message could not be answered")

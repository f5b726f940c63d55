"""A decoder stage as a process of its own: an AR service's updates in, its clients' audio out."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from typing import TYPE_CHECKING, Final

from anyio import to_thread

from omnistage.config import AUDIO
from omnistage.errors import (
    ConfigError,
    OmniStageError,
    StageClosed,
    StartupError,
    UpdatesLost,
)
from omnistage.metrics import ServiceMetrics, default_metrics
from omnistage.request import check_name
from omnistage.services.audio import AudioOut, Outlet
from omnistage.stages.branch import Branch
from omnistage.transport.control import ControlServer
from omnistage.transport.endpoints import beside
from omnistage.transport.publisher import Publisher, PublisherConfig
from omnistage.transport.service import ServiceServer
from omnistage.transport.service_link import ServiceLink
from omnistage.wire import PROTOCOL_VERSION, parse_topic
from omnistage.wire_services import Abort, Aborted, DecoderInfo, Fault, Greet, Read

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.config import DecoderStageConfig
    from omnistage.stages.decoder import DecoderStage
    from omnistage.transport.endpoints import Endpoints
    from omnistage.transport.service import Client
    from omnistage.wire import Update
    from omnistage.wire_services import ServiceMessage, Welcome

log = logging.getLogger(__name__)

_SECONDS: Final = 10.0  # for each step of the start, and of the end
_RETRY_SECONDS: Final = 1.0
_REMEMBERED: Final = 1024


class DecoderService:
    """Serves a decoder stage to the clients of an AR service.

    It subscribes to that service's updates and is listed there. A request comes with its first
    update, which names the client; the audio is published to that client until it has an end, and
    decoding waits while too much of it is unread there.

    Args:
        config: The decoder stage, and what makes the stages behind it.
        endpoints: This process's sockets.
        connect: The AR service's endpoint.
        bind: Where clients connect: ``ipc`` or ``tcp://host:port``.
        within: Seconds that the AR service may take to answer; it may be starting, too.
    """

    def __init__(
        self,
        config: DecoderStageConfig,
        endpoints: Endpoints,
        *,
        connect: str,
        bind: str,
        within: float = 60.0,
    ) -> None:
        self.name = config.name
        self._config = config
        self._endpoints = endpoints
        self._bind = bind
        self._branch = Branch(config, endpoints)
        self._branch.decoder.on_unexpected = self._begin
        self._idle = asyncio.Event()  # or something else that a drain waits for
        self._upstream = _Upstream(
            self._branch.decoder, endpoints, connect, config.codec, within, self._idle.set
        )
        self._outlets: dict[str, Outlet] = {}
        self._out: AudioOut | None = None
        self._publisher: Publisher | None = None
        self._control: ControlServer | None = None
        self._server: ServiceServer | None = None
        self._info: DecoderInfo | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._aborted: dict[tuple[str, str], None] = {}  # the latest: (client, request id)
        self._metrics = ServiceMetrics(default_metrics(), config.name)
        self._draining = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._outlets)

    @property
    def endpoint(self) -> str:
        """Where clients connect.

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
        if not self._upstream.joined:
            return StageClosed(f"not joined to {self._upstream.endpoint}", stage=self.name)
        return None

    async def start(self) -> None:
        """Build the decoder, start to publish, subscribe at the AR service and join it.

        Raises:
            StartupError: One of these failed, or the AR service emits another codec.
        """
        await self._branch.start()
        self._out = AudioOut(self._on_undelivered)
        # Only for the publisher's hello: nothing fails on its side without a topic failing.
        self._control = ControlServer(self._endpoints, lambda _: None)
        config = PublisherConfig(
            bind=beside(self._bind),
            directory=str(self._endpoints.directory),
            control=self._control.endpoint,
            owner_pid=os.getpid(),
            keys=self._endpoints.keys,
        )
        self._publisher = Publisher(self._out, config)
        await to_thread.run_sync(self._publisher.start)
        hellos = await self._control.wait_for_hellos(1, within=_SECONDS)
        self._server = ServiceServer(self._endpoints, self._bind, self)
        self._info = DecoderInfo(
            self.name,
            self._upstream.subscriber,
            self._server.endpoint,
            tuple(hello.data_endpoint for hello in hellos),
            self._branch.sample_rate,
            self._upstream.codec,
            self._branch.decoder.codebooks,
            self._config.max_unread,
        )
        await self._upstream.join(self._info)

    async def serve(self) -> None:
        """Run every stage until cancelled; the error of one ends the service."""
        serving = [asyncio.ensure_future(stage.serve()) for stage in self._branch.stages]
        try:
            done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
            raise StageClosed("a stage's serve() has returned", stage=self.name)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def drain(self) -> None:
        """Leave the AR service's list and wait for the requests that are here."""
        self._draining = True
        self._upstream.leave()
        # A client that has read that we are listed no more leaves, unless it has a text to go on
        # with; without the AR service none can.
        while self._outlets or (self._upstream.up and self._server and self._server.clients):
            self._idle.clear()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Fail what is open, tell the clients, and give everything back. Idempotent."""
        self._draining = True
        self._upstream.leave()
        await self._branch.aclose()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await to_thread.run_sync(publisher.close, _SECONDS)
        if self._out is not None:
            self._out.close()
        for part in (self._upstream, self._server, self._control):
            if part is not None:
                part.close()

    def on_greet(self, client: Client) -> DecoderInfo:
        """Take a client, whose name is its subscriber id."""
        check_name(client.greeting.name, "a client's name")
        if self._info is None:
            raise StageClosed("the service is not started", stage=self.name)
        return self._info

    def on_message(self, client: Client, message: ServiceMessage) -> None:
        """What was read, and what to abort."""
        if isinstance(message, Read):
            outlet = self._outlets.get(message.request_id)
            if outlet is not None and outlet.client == client.greeting.name:
                outlet.read(message.samples)
                self._branch.resume(message.request_id)
        elif isinstance(message, Abort):
            task = self._loop.create_task(self._abort(client, message.request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def on_gone(self, client: Client) -> None:
        """Decode no more for it."""
        self._lose(client.greeting.name)
        self._idle.set()

    def _begin(self, update: Update) -> None:
        """Take a request, with its first update."""
        start = update.start
        if start is None or not start.reply or self._out is None:
            return
        if (start.reply, update.request_id) in self._aborted:
            return  # the abort was faster than the first update
        try:
            client = check_name(start.reply, "a client's name")
            outlet = Outlet(
                self._out,
                update.request_id,
                update.generation,
                client,
                sample_rate=self._branch.sample_rate,
                stage=self.name,
                on_over=self._forget,
            )
        except ConfigError as error:
            log.warning("request %s cannot be answered: %s", update.request_id, error)
            return
        self._outlets[update.request_id] = outlet
        self._metrics.begun()
        try:
            self._branch.open(update.request_id, outlet)
        except OmniStageError as error:
            outlet.on_error(error)

    async def _abort(self, client: Client, request_id: str) -> None:
        outlet = self._outlets.get(request_id)
        self._aborted[client.greeting.name, request_id] = None
        if len(self._aborted) > _REMEMBERED:
            del self._aborted[next(iter(self._aborted))]
        fault = None
        if outlet is None or outlet.client == client.greeting.name:
            self._drop(request_id)
            try:
                await self._branch.release(request_id)
            except OmniStageError as error:
                fault = Fault.of(error)
        if self._server is not None:
            self._server.send(client, Aborted(PROTOCOL_VERSION, request_id, fault))

    def _on_undelivered(self, topic: bytes, error: OmniStageError) -> None:
        """From the publisher's thread: a client gets nothing any more."""
        client = parse_topic(topic)[1]
        log.warning("client %s: %s", client, error.message)
        self._loop.call_soon_threadsafe(self._lose, client)

    def _lose(self, client: str) -> None:
        for request_id, outlet in list(self._outlets.items()):
            if outlet.client == client:
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._branch.drop(request_id)
        self._forget(request_id, "aborted")

    def _forget(self, request_id: str, outcome: str) -> None:
        if self._outlets.pop(request_id, None) is not None:
            self._metrics.ended(outcome)
        if not self._outlets:
            self._idle.set()


class _Upstream:
    """The AR service that a decoder has joined, and joins again after it was away.

    Args:
        decoder: Who subscribes there.
        endpoints: This process's sockets.
        endpoint: The service's.
        codec: Names what the decoder takes.
        within: Seconds that the service may take to answer first.
        on_lapse: Called when it does not answer any more.
    """

    def __init__(
        self,
        decoder: DecoderStage,
        endpoints: Endpoints,
        endpoint: str,
        codec: str,
        within: float,
        on_lapse: Callable[[], None],
    ) -> None:
        # Its own, however many decoders of this name there are.
        self.subscriber = f"{decoder.name[:50]}-{secrets.token_hex(4)}"
        self.endpoint = endpoint
        self.codec = codec
        self._decoder = decoder
        self._endpoints = endpoints
        self._within = within
        self._on_lapse = on_lapse
        self._alone = Greet(PROTOCOL_VERSION, self.subscriber)
        self._link: ServiceLink | None = None
        self._info: DecoderInfo | None = None
        self._epoch: int | None = None  # of the service that we have subscribed at
        self._joining: asyncio.Task[None] | None = None
        self._left = False

    @property
    def joined(self) -> bool:
        """Whether the service lists us."""
        link = self._link
        return link is not None and link.up and link.greeting.decoder is not None

    @property
    def up(self) -> bool:
        """Whether the service answers."""
        return self._link is not None and self._link.up

    async def join(self, info: DecoderInfo) -> None:
        """Introduce ourselves, subscribe, and be listed.

        Raises:
            StartupError: There is no AR service, it does not fit, or it does not answer.
        """
        self._info = info
        link = self._link = ServiceLink(self._endpoints, self.endpoint, self._alone, self)
        log.info("connecting to %s", self.endpoint)
        welcome = await link.answered(self._within)
        if welcome.ar is None:
            raise StartupError(f"the service at {self.endpoint} is no AR stage")
        if self._joining is not None:
            await self._joining
        await link.answered(_SECONDS)  # it may refuse us now that it knows what we are

    def leave(self) -> None:
        """Be listed no more. Idempotent."""
        self._left = True
        if self._joining is not None:
            self._joining.cancel()
        if self._link is not None and self._link.greeting is not self._alone:
            self._link.introduce(self._alone)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._link is not None:
            self._link.close()

    def on_up(self, welcome: Welcome) -> None:
        """The service has welcomed us: subscribe there unless we have, then be listed."""
        link = self._link
        if link is None or self._left or link.greeting is not self._alone or welcome.ar is None:
            return
        if self._joining is None or self._joining.done():
            self._joining = asyncio.get_running_loop().create_task(self._join(link, welcome))
            self._joining.add_done_callback(self._on_joined)

    def on_down(self, why: str) -> None:
        """It does not answer, has restarted or forgotten us; the next welcome is a new start."""
        if self._link is not None:
            self._link.greeting = self._alone
        self._on_lapse()

    def on_message(self, message: ServiceMessage) -> None:
        """The list of decoders is for clients."""

    def _on_joined(self, joining: asyncio.Task[None]) -> None:
        if joining.cancelled() or (error := joining.exception()) is None:
            return
        if self._epoch is not None and self._link is not None:  # else the start has failed
            log.warning("joining %s again failed: %s", self.endpoint, error)
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._link.introduce, self._alone)

    async def _join(self, link: ServiceLink, welcome: Welcome) -> None:
        if welcome.ar is None or self._info is None:
            return
        if welcome.epoch != self._epoch:
            if welcome.ar.channel != AUDIO:
                raise StartupError(f"the AR service publishes on {welcome.ar.channel!r}")
            if self._epoch is not None:
                self._decoder.on_lost(UpdatesLost("the AR service has restarted"))
            await self._decoder.subscribe(
                welcome.ar.publishers,
                self.subscriber,
                within=_SECONDS,
                upstream=welcome.ar.name,
                rows=welcome.ar.rows,
            )
            self._epoch = welcome.epoch
        link.introduce(Greet(PROTOCOL_VERSION, self.subscriber, self._info))

"""The sockets between services and their clients, with greeting, heartbeat and reconnection.

A service binds a ROUTER, everybody else connects a DEALER. What the messages mean is the business
of :mod:`omnistage.services`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import zmq
from zmq.utils.monitor import parse_monitor_message

from omnistage.errors import ConfigError, OmniStageError, ProtocolError, StartupError
from omnistage.transport.curve import FAILED_HANDSHAKE, explain_handshake
from omnistage.transport.endpoints import close_quietly, connect, listen, set_options
from omnistage.transport.reader import SocketReader
from omnistage.wire import PROTOCOL_VERSION, encode
from omnistage.wire_services import (
    MAX_MESSAGE_BYTES,
    ARInfo,
    Beat,
    DecoderInfo,
    Farewell,
    Greet,
    Refuse,
    Stranger,
    Welcome,
    decode_service,
)

if TYPE_CHECKING:
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire_services import ServiceMessage

log = logging.getLogger(__name__)

BEAT_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 5.0
"""A service that is connected and says nothing for so long is down: its event loop stands still."""
CUT_SECONDS: Final = 1.0
"""A client without a connection is gone, if it does not come again."""
CLIENT_SECONDS: Final = 10.0
"""And one that is connected and says nothing: applications do block their event loop."""
RECONNECT_SECONDS: Final = 0.5
"""A service to which the connection was cut is down if it has not answered by then."""
_LINGER_MS: Final = 200  # for the last words; a peer that is gone takes all of it
MAX_CLIENTS: Final = 4096
MAX_MALFORMED: Final = 100
"""Messages that are none; whoever sends more is not listened to."""


class Client:
    """Somebody who has greeted a service.

    Args:
        identity: The routing id of its connection.
        greeting: How it introduced itself.
    """

    def __init__(self, identity: bytes, greeting: Greet) -> None:
        self.identity = identity
        self.greeting = greeting
        self.heard = time.monotonic()
        self.cut_at: float | None = None

    def __str__(self) -> str:
        return self.greeting.name


class ServiceHandler(Protocol):
    """What a service does; called on its event loop, must not block."""

    def on_greet(self, client: Client) -> ARInfo | DecoderInfo:
        """Somebody new, or somebody known with something new to say.

        Returns:
            What the service is.

        Raises:
            OmniStageError: It cannot be served; the message says why.
        """
        ...

    def on_message(self, client: Client, message: ServiceMessage) -> None:
        """A message of a client that was welcomed."""
        ...

    def on_gone(self, client: Client) -> None:
        """It is gone, or has been silent for too long."""
        ...


class ServiceServer:
    """A service's end: a ROUTER socket.

    Args:
        endpoints: Whose context and directory to use.
        bind: ``ipc`` or ``tcp://host:port``.
        handler: What the service does.

    Raises:
        StartupError: It cannot bind there.
    """

    def __init__(self, endpoints: Endpoints, bind: str, handler: ServiceHandler) -> None:
        self.epoch = secrets.randbits(62)
        self.clients: dict[bytes, Client] = {}
        self.malformed: dict[bytes, int] = {}
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._closed = False
        self._socket = endpoints.context.socket(zmq.ROUTER)
        _set_options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.endpoint = listen(self._socket, bind, endpoints.directory, endpoints.curve)
        except zmq.ZMQError as error:
            close_quietly(self._socket)
            raise StartupError(f"the service cannot listen at {bind}: {error}") from error
        self._reader = SocketReader(self._socket, self._on_frames)

    def send(self, client: Client, message: ServiceMessage) -> None:
        """Send a message, unless the client is gone or does not read."""
        self._send(client.identity, message)

    def broadcast(self, message: ServiceMessage) -> None:
        """Send a message to every client."""
        for client in list(self.clients.values()):
            self.send(client, message)

    def close(self) -> None:
        """Tell the clients, stop reading and close. Idempotent."""
        if not self._closed:
            self.broadcast(Refuse(PROTOCOL_VERSION, "it is closing"))
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._reader.close()
        close_quietly(self._socket)

    def _send(self, identity: bytes, message: ServiceMessage) -> None:
        if self._closed:
            return
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: no connection. EAGAIN: a thousand messages unread, as good as gone.
            client = self.clients.get(identity)
            if client is not None and client.cut_at is None:
                client.cut_at = time.monotonic()
                log.debug("client %s cannot be reached: %s", client, error)
        self._reader.touch()

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if self.malformed.get(identity, 0) >= MAX_MALFORMED:
            return
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames in a service message")
            message = decode_service(frames[1])
        except ProtocolError as error:
            self._on_malformed(identity, error)
            return
        client = self.clients.get(identity)
        if isinstance(message, Greet):
            self._on_greet(identity, client, message)
        elif client is None:
            self._send(identity, Stranger(PROTOCOL_VERSION))
        elif isinstance(message, Farewell):
            self._lose(client)
        else:
            client.heard, client.cut_at = time.monotonic(), None
            if not isinstance(message, Beat):
                self._handler.on_message(client, message)

    def _on_malformed(self, identity: bytes, error: ProtocolError) -> None:
        if len(self.malformed) >= MAX_CLIENTS:
            self.malformed.pop(next(iter(self.malformed)))
        count = self.malformed.get(identity, 0) + 1
        self.malformed[identity] = count
        log.warning("service message dropped: %s (%d so far)", error, count)
        # Also where it speaks another version: it can read at least the tag, and its user the log.
        self._send(identity, Refuse(PROTOCOL_VERSION, error.message))
        client = self.clients.get(identity)
        if count >= MAX_MALFORMED and client is not None:
            log.error("client %s sends what is no message; not listening to it any more", client)
            self._lose(client)

    def _on_greet(self, identity: bytes, client: Client | None, greeting: Greet) -> None:
        if client is None and len(self.clients) >= MAX_CLIENTS:
            self._send(identity, Refuse(PROTOCOL_VERSION, f"{MAX_CLIENTS} clients are served"))
            return
        known = client is not None
        client = client or Client(identity, greeting)
        client.greeting, client.heard, client.cut_at = greeting, time.monotonic(), None
        self.clients[identity] = client
        try:
            info = self._handler.on_greet(client)
        except OmniStageError as error:
            self._send(identity, Refuse(PROTOCOL_VERSION, error.message))
            if known:
                self._lose(client)
            else:
                del self.clients[identity]
            return
        ar = info if isinstance(info, ARInfo) else None
        decoder = info if isinstance(info, DecoderInfo) else None
        self._send(identity, Welcome(PROTOCOL_VERSION, self.epoch, ar, decoder))
        if self._timer is None:
            self._schedule()

    def _schedule(self) -> None:
        self._due = time.monotonic() + BEAT_SECONDS
        self._timer = self._loop.call_later(BEAT_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self.clients:
            return
        now = time.monotonic()
        late = now - self._due > BEAT_SECONDS  # we stood still: what they said is not read yet
        self._schedule()
        for client in list(self.clients.values()):
            self.send(client, Beat(PROTOCOL_VERSION))
            cut = client.cut_at is not None and now - client.cut_at > CUT_SECONDS
            if not late and (cut or now - client.heard > CLIENT_SECONDS):
                self._lose(client)

    def _lose(self, client: Client) -> None:
        if self.clients.pop(client.identity, None) is not None:
            log.info("client %s is gone, %d are left", client, len(self.clients))
            self._handler.on_gone(client)


class LinkHandler(Protocol):
    """Whom a link serves; called on the event loop, must not block."""

    def on_up(self, welcome: Welcome) -> None:
        """The service has welcomed us: the first time, or again."""
        ...

    def on_message(self, message: ServiceMessage) -> None:
        """A message of a service that has welcomed us."""
        ...

    def on_down(self, why: str) -> None:
        """The service does not answer, has restarted or forgotten us; `on_up` may follow."""
        ...


class ServiceLink:
    """A client's end: a DEALER socket that greets until it is welcomed, and again after a cut.

    Args:
        endpoints: Whose context to use.
        endpoint: The service's.
        greeting: How to introduce ourselves; may be changed before the next one.
        handler: Whom it serves.

    Raises:
        ConfigError: It is no endpoint.
    """

    def __init__(
        self, endpoints: Endpoints, endpoint: str, greeting: Greet, handler: LinkHandler
    ) -> None:
        self.endpoint = endpoint
        self.greeting = greeting
        self.welcome: Welcome | None = None
        self.refused: str | None = None
        self._handshake: str | None = None
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._answered = asyncio.Event()
        self._heard = self._due = time.monotonic()
        self._closed = False
        self._socket = endpoints.context.socket(zmq.DEALER)
        _set_options(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKE)
        monitor.setsockopt(zmq.RCVHWM, 0)  # else libzmq's I/O thread would wait for us to read
        try:
            connect(self._socket, endpoint, endpoints.curve)
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            close_quietly(self._socket)
            raise ConfigError(f"cannot connect to {endpoint!r}: {error}") from error
        self._monitor = SocketReader(monitor, self._on_event)
        self._reader = SocketReader(self._socket, self._on_frames)
        self._timer = self._loop.call_soon(self._on_timer)

    @property
    def up(self) -> bool:
        """Whether the service has welcomed us and answers."""
        return self.welcome is not None

    async def answered(self, within: float) -> Welcome:
        """Wait for the service's welcome.

        Args:
            within: Seconds to wait.

        Raises:
            StartupError: It refused us, or has not answered in time.
        """
        with anyio.move_on_after(within):
            await self._answered.wait()
        if self.welcome is not None:
            return self.welcome
        if self.refused is not None:
            raise StartupError(f"the service at {self.endpoint} refuses: {self.refused}")
        raise StartupError(
            f"no service answers at {self.endpoint} after {within:g} s; "
            + (self._handshake or "is it running, and is that the endpoint it printed?")
        )

    def introduce(self, greeting: Greet) -> None:
        """Introduce ourselves anew, and have :meth:`answered` wait for what is said to that."""
        self.greeting = greeting
        self._answered.clear()
        self.send(greeting)

    def send(self, message: ServiceMessage) -> None:
        """Send a message; one that finds a full queue is lost, and the service as good as down.

        Raises:
            ProtocolError: It is too large.
            TypeError: It holds what cannot be encoded.
        """
        if self._closed:
            return
        raw = encode(message)
        if len(raw) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(raw)} bytes, at most {MAX_MESSAGE_BYTES}")
        try:
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("service at %s cannot be reached: %s", self.endpoint, error)
        self._reader.touch()

    def close(self) -> None:
        """Stop reading and close. Idempotent."""
        if self._closed:
            return
        self.send(Farewell(PROTOCOL_VERSION))
        self._closed = True
        self._timer.cancel()
        self._monitor.close()
        self._reader.close()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        close_quietly(self._socket)

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event & FAILED_HANDSHAKE:
            self._handshake = explain_handshake(event)
        elif self.up:
            # A process that was killed is noticed at once; one that was cut off has time to answer.
            self._heard = min(self._heard, time.monotonic() - SILENT_SECONDS + RECONNECT_SECONDS)
            self._timer.cancel()
            self.send(Beat(PROTOCOL_VERSION))
            self._schedule(RECONNECT_SECONDS + 0.05)

    def _schedule(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds
        self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        now = time.monotonic()
        late = now - self._due > BEAT_SECONDS  # our own loop stood still
        self._schedule(BEAT_SECONDS)
        if self.welcome is not None and not late and now - self._heard > SILENT_SECONDS:
            self._down(f"the service at {self.endpoint} does not answer")
        if self.welcome is None:
            self.send(self.greeting)
        else:
            self.send(Beat(PROTOCOL_VERSION))

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames in a service message")
            message = decode_service(frames[0])
        except ProtocolError as error:
            log.warning("service at %s: message dropped: %s", self.endpoint, error)
            if self.welcome is None:
                self.refused = error.message
                self._answered.set()
            return
        self._heard = time.monotonic()
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refuse):
            self.refused = message.error
            self._answered.set()
            self._down(f"the service at {self.endpoint} refuses: {message.error}")
        elif isinstance(message, Stranger):
            if self.welcome is not None:
                self._down(f"the service at {self.endpoint} has forgotten us")
                self.send(self.greeting)
        elif self.welcome is not None and not isinstance(message, Beat):
            self._handler.on_message(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        if self.welcome is not None and self.welcome.epoch != welcome.epoch:
            self._down(f"the service at {self.endpoint} has restarted")
        self.welcome, self.refused = welcome, None
        self._handler.on_up(welcome)
        self._answered.set()

    def _down(self, why: str) -> None:
        if self.welcome is not None:
            self.welcome = None
            log.warning("%s", why)
            self._handler.on_down(why)


def _set_options(socket: zmq.Socket[bytes]) -> None:
    set_options(socket, linger_ms=_LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # ZeroMQ's own, in its I/O threads: a process that is stopped and a host that is cut off do not
    # close their connections, and a busy one's event loop may answer late.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 300)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1200)

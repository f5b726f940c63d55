"""A service's socket: a ROUTER to which clients connect, greet and show that they live.

What the messages mean is the business of :mod:`omnistage.services`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, Protocol

import zmq

from omnistage.errors import OmniStageError, ProtocolError, StartupError
from omnistage.transport.endpoints import close_quietly, listen, set_options
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
CUT_SECONDS: Final = 0.5
"""A client without a connection is gone, if it does not come again; nor does it wait longer."""
CLIENT_SECONDS: Final = 10.0
"""And one that is connected and says nothing: applications do block their event loop."""
_LINGER_MS: Final = 200  # for the last words; a peer that is gone takes all of it
_CUT_OFF: Final = "its connection was cut"
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
        set_service_options(self._socket)
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
            client = self.clients.get(identity)
            if client is not None and error.errno == zmq.EAGAIN:
                # A thousand messages unread. It misses one now, and must not think that it does
                # not; later, for whoever sends is not ready to be told.
                self._loop.call_soon(self._lose, client, "it does not read")
            elif client is not None and client.cut_at is None:
                client.cut_at = time.monotonic()
                self._loop.call_later(CUT_SECONDS, self._on_cut, client)
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
        elif isinstance(message, Farewell):
            if client is not None:
                self._lose(client, "it said farewell")
        elif client is None:
            self._send(identity, Stranger(PROTOCOL_VERSION))
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
            self._lose(client, "malformed messages")

    def _on_greet(self, identity: bytes, client: Client | None, greeting: Greet) -> None:
        if (refusal := self._refusal(identity, greeting)) is not None:
            self._send(identity, Refuse(PROTOCOL_VERSION, refusal))
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
                self._lose(client, error.message)
            else:
                del self.clients[identity]
            return
        ar = info if isinstance(info, ARInfo) else None
        decoder = info if isinstance(info, DecoderInfo) else None
        self._send(identity, Welcome(PROTOCOL_VERSION, self.epoch, ar, decoder))
        if self._timer is None:
            self._schedule()

    def _refusal(self, identity: bytes, greeting: Greet) -> str | None:
        if identity not in self.clients and len(self.clients) >= MAX_CLIENTS:
            return f"{MAX_CLIENTS} clients are served"
        others = (client for name, client in self.clients.items() if name != identity)
        if any(other.greeting.name == greeting.name for other in others):
            return f"another client is named {greeting.name!r}"  # it would get that one's audio
        return None

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
            if late:
                continue
            if client.cut_at is not None and now - client.cut_at > CUT_SECONDS:
                self._lose(client, _CUT_OFF)
            elif now - client.heard > CLIENT_SECONDS:
                self._lose(client, f"silent for {CLIENT_SECONDS:g} s")

    def _on_cut(self, client: Client) -> None:
        """Let go of a client that has not come again, without waiting for the next beat."""
        if self._closed or client.cut_at is None or self.clients.get(client.identity) is not client:
            return
        over = time.monotonic() - client.cut_at - CUT_SECONDS
        if -0.01 < over < BEAT_SECONDS:  # of this cut, and in time: else what it said is not read
            self._lose(client, _CUT_OFF)

    def _lose(self, client: Client, why: str) -> None:
        if self.clients.pop(client.identity, None) is not None:
            log.info("client %s is gone (%s), %d are left", client, why, len(self.clients))
            self._handler.on_gone(client)


def set_service_options(socket: zmq.Socket[bytes]) -> None:
    """Give a service's or a client's socket its bounds and heartbeats."""
    set_options(socket, linger_ms=_LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # ZeroMQ's own, in its I/O threads: a process that is stopped and a host that is cut off do not
    # close their connections, and a busy one's event loop may answer late.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 250)
    # Not less: on a machine whose cores are all taken, I/O threads have answered a second late.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1600)

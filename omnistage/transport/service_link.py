"""A client's connection to a service: it greets until it is welcomed, and again after a cut."""

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

from omnistage.errors import ConfigError, ProtocolError, StartupError
from omnistage.transport.curve import FAILED_HANDSHAKE, explain_handshake
from omnistage.transport.endpoints import close_quietly, connect
from omnistage.transport.reader import SocketReader
from omnistage.transport.service import BEAT_SECONDS, set_service_options
from omnistage.wire import PROTOCOL_VERSION, encode
from omnistage.wire_services import (
    MAX_MESSAGE_BYTES,
    Beat,
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

SILENT_SECONDS: Final = 5.0
"""A service that is connected and says nothing for so long is down: its event loop stands still."""


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
        ConfigError: It is no endpoint, or there are keys and no client's among them.
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
        self._connected = False
        self._lapsed = False  # it may still run what we have given up
        self._socket = endpoints.context.socket(zmq.DEALER)
        set_service_options(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKE
        monitor = self._socket.get_monitor_socket(events)
        monitor.setsockopt(zmq.RCVHWM, 0)  # else libzmq's I/O thread would wait for us to read
        try:
            connect(self._socket, endpoint, endpoints.curve)
        except (zmq.ZMQError, ConfigError) as error:
            self._socket.disable_monitor()
            close_quietly(monitor)
            close_quietly(self._socket)
            raise ConfigError(f"cannot connect to {endpoint!r}: {error}") from error
        self._events = monitor
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
            # Else what is sent while there is no connection would all arrive with the next one.
            # ZeroMQ's own option for that drops what has come over the last one, too.
            if not self._connected:
                raise zmq.Again
            self._socket.send(raw, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("service at %s cannot be reached: %s", self.endpoint, error)
            # Later: whoever sends is not ready to be told.
            self._loop.call_soon(self._down, f"the service at {self.endpoint} cannot be reached")
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
        close_quietly(self._events)  # which the line before does not
        close_quietly(self._socket)

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event & FAILED_HANDSHAKE:
            self._handshake = explain_handshake(event)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._greet()
        else:
            self._connected = False
            # What it said last may say more than that it is gone.
            self._reader.drain()
            # Also if it is back at once: what was on its way, in either direction, is lost.
            self._down(f"the connection to the service at {self.endpoint} was cut")

    def _greet(self) -> None:
        if self.up:
            return
        if self._lapsed:
            self.send(Farewell(PROTOCOL_VERSION))
        self.send(self.greeting)

    def _schedule(self) -> None:
        self._due = time.monotonic() + BEAT_SECONDS
        self._timer = self._loop.call_later(BEAT_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        now = time.monotonic()
        late = now - self._due > BEAT_SECONDS  # our own loop stood still
        self._schedule()
        if self.welcome is not None and not late and now - self._heard > SILENT_SECONDS:
            self._down(f"the service at {self.endpoint} does not answer")
        if self.welcome is None:
            self._greet()
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
                self._greet()
        elif self.welcome is not None and not isinstance(message, Beat):
            self._handler.on_message(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        if self.welcome is not None and self.welcome.epoch != welcome.epoch:
            self._down(f"the service at {self.endpoint} has restarted")
        self.welcome, self.refused, self._lapsed = welcome, None, False
        self._handler.on_up(welcome)
        self._answered.set()

    def _down(self, why: str) -> None:
        if self.welcome is not None and not self._closed:
            self.welcome, self._lapsed = None, True
            log.warning("%s", why)
            self._handler.on_down(why)

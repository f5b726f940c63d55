"""CURVE for tcp sockets: who listens proves itself and admits those it knows, all is encrypted.

A socket of ``ipc`` needs none of it: its directory belongs to one user.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from omnistage.errors import ConfigError
from omnistage.transport.handover import HandOver

if TYPE_CHECKING:
    from omnistage.transport.keys import Keys

log = logging.getLogger(__name__)

_LOG_SECONDS: Final = 10.0
"""Refusals between two lines of the log are only counted."""

_ZAP: Final = "inproc://zeromq.zap.01"  # where libzmq asks, by its specification (ZMQ RFC 27)
_DOMAIN: Final = b"omnistage"
FAILED_HANDSHAKE: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Curve:
    """One context's keys, read when it is made.

    The first socket that listens starts a thread, which says who is admitted and counts who is not.
    It waits without a time limit and ends with the context.

    Args:
        context: Whose sockets.
        keys: Where the keys are.

    Raises:
        ConfigError: A key that cannot be used.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.keys = keys
        self._server_public = keys.server_public()
        self._server_secret = keys.server_pair()[1] if keys.can_listen else None
        self._client = keys.client_pair() if keys.client else None
        # Sockets of the thread's are not the context's to close: it does so itself.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._gate: _Gate | None = None

    @property
    def refused(self) -> int:
        """Connections that were not admitted so far."""
        return 0 if self._gate is None else self._gate.refused

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Have ``socket`` admit known clients only, at what it binds after this.

        Raises:
            ConfigError: The listening side's secret key is not here.
        """
        if self._server_secret is None:
            raise ConfigError(f"{self.keys.directory} has no server.key_secret to listen with")
        if self._gate is None:
            self._gate = _Gate(self._context, self.keys)
        self._gate.watch(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody to ask means nobody is admitted

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Have ``socket`` prove itself, and its peer, at what it connects to after this.

        Raises:
            ConfigError: No client's secret key is here.
        """
        if self._client is None:
            raise ConfigError(f"{self.keys.directory} has no clients/NAME.key_secret")
        public, secret = self._client
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def join(self) -> None:
        """Wait for the thread; the context must have ended."""
        if self._gate is not None:
            self._gate.thread.join()


class FailedHandshakes:
    """What went wrong with a socket's connections, for a sentence; to be closed before the socket.

    Args:
        socket: Not connected yet.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._events = _monitor(socket, socket.context)

    def why(self) -> str | None:
        """The last failure, or None if there was none."""
        event = 0
        while self._events.poll(0):
            event, _ = struct.unpack("=HI", self._events.recv_multipart()[0])
        return explain_handshake(event) if event else None

    def close(self) -> None:
        """Stop listening to the socket."""
        if not self._socket.closed:
            # First: libzmq waits for ever to tell somebody who is gone.
            self._socket.monitor(None, 0)
        self._events.close()


def explain_handshake(event: int) -> str:
    """What one of :data:`FAILED_HANDSHAKE` means for the side that connects."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it does not admit our key: clients/NAME.key must be in its directory of keys"
    return (
        "the handshake failed: both sides need keys or none, and our server.key must be the one of "
        "that side"
    )


class _Gate:
    """The thread that libzmq asks whom to admit, and that hears of handshakes that failed.

    Args:
        context: For its own sockets.
        keys: Whose clients are admitted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.refused = 0
        self._keys = keys
        self._logged_at = -_LOG_SECONDS
        self._context = context
        self._new: HandOver[zmq.Socket[bytes]] = HandOver(0)
        self._asked = context.socket(zmq.REP)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(_ZAP)
        self.thread = threading.Thread(target=self._run, name="omnistage-curve", daemon=True)
        self.thread.start()

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Hear of a socket's failed handshakes; called by its thread, before it binds."""
        # No more than there are sockets; a full queue has no meaning here.
        self._new.put_beyond_limit(_monitor(socket, self._context))

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._new.fileno(), zmq.POLLIN)
        poller.register(self._asked, zmq.POLLIN)
        watched: list[zmq.Socket[bytes]] = []
        try:
            while True:
                ready = dict(poller.poll())
                for events in self._new.drain():
                    watched.append(events)
                    poller.register(events, zmq.POLLIN)
                if self._asked in ready:
                    self._answer()
                for events in [events for events in watched if events in ready]:
                    if not self._hear(events):
                        poller.unregister(events)
                        watched.remove(events)
                        events.close()
        except zmq.ContextTerminated:
            pass
        finally:
            for own in (*watched, *self._new.drain(), self._asked):
                own.close()
            self._new.close()

    def _answer(self) -> None:
        version, request, _, address, _, _, key, *_ = self._asked.recv_multipart()
        public = z85.encode(key)
        admitted = self._keys.admits(public)
        status = [b"200", b"OK"] if admitted else [b"400", b"unknown key"]
        self._asked.send_multipart([version, request, *status, b"", b""])
        if not admitted:
            who, what = address.decode(errors="replace"), public.decode()
            self._refuse(f"{who}: the key {what} is none of {self._keys.directory}/clients")

    def _hear(self, events: zmq.Socket[bytes]) -> bool:
        """Take one event; False if it was the last."""
        what, endpoint = events.recv_multipart()
        event, _ = struct.unpack("=HI", what)
        if event & (
            FAILED_HANDSHAKE ^ zmq.EVENT_HANDSHAKE_FAILED_AUTH
        ):  # whom we refused is counted above
            self._refuse(f"a peer at {endpoint.decode()} that has no keys or another server's")
        return not event & zmq.EVENT_MONITOR_STOPPED

    def _refuse(self, whom: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            log.warning("connection refused, %d so far: %s", self.refused, whom)


def _monitor(
    socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]
) -> zmq.Socket[bytes]:
    """A socket that gets ``socket``'s failed handshakes."""
    endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
    events = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    # Unbounded: libzmq's I/O thread, which serves all sockets, would wait for room.
    events.setsockopt(zmq.RCVHWM, 0)
    socket.monitor(endpoint, FAILED_HANDSHAKE | zmq.EVENT_MONITOR_STOPPED)
    events.connect(endpoint)
    return events

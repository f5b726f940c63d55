"""The publisher: one thread that owns an engine core's sockets and sends what is handed over.

It numbers the messages of each topic, answers subscriptions and reports failed requests over the
control socket. It knows no request and no scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import zmq

from omnistage.errors import (
    OmniStageError,
    ProcessorError,
    ProtocolError,
    StartupError,
    SubscriberStalled,
    UpdatesLost,
)
from omnistage.transport.control import core_identity
from omnistage.transport.endpoints import LINGER_MS, close_quietly, listen, set_options
from omnistage.transport.owner import end_with
from omnistage.wire import (
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Data,
    Failed,
    Hello,
    Release,
    Released,
    Subscribed,
    Update,
    decode_control,
    encode,
    parse_topic,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omnistage.wire import Buffer

log = logging.getLogger(__name__)

MAX_TOPICS: Final = 65_536


class Outgoing(NamedTuple):
    """One message to be: the updates of one step for one topic."""

    topic: bytes
    stamp: int  # monotonic ns when the scheduler handed the step over
    updates: tuple[Update, ...]
    buffers: tuple[Buffer, ...] = ()


class Source(Protocol):
    """Where the messages come from; everything but ``fileno`` runs in the publisher thread."""

    def fileno(self) -> int:
        """Readable when :meth:`messages` has something to yield."""
        ...

    def messages(self) -> Iterable[Outgoing]:
        """Build and yield everything handed over so far, in order."""
        ...

    def failures(self) -> Iterable[Failed]:
        """Take the requests that were given up since the last call."""
        ...

    def release(self, request_id: str) -> None:
        """Drop whatever is still held of a request that was aborted."""
        ...

    def undelivered(self, topic: bytes, error: OmniStageError) -> None:
        """A message could not be sent: fail every request that is open on ``topic``."""
        ...


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a publisher binds and whom it reports to.

    Args:
        bind: ``ipc`` or ``tcp://127.0.0.1:PORT``.
        directory: Private directory for ipc paths.
        control: The AR stage's control endpoint.
        owner_pid: Process that started the engine; the engine ends when that is gone.
    """

    bind: str
    directory: str
    control: str
    owner_pid: int


class Publisher:
    """A daemon thread around an XPUB and a DEALER socket, both made and used only there.

    Args:
        source: What to publish.
        config: Where to bind.
        dp_index: This engine core's data-parallel rank.
    """

    def __init__(self, source: Source, config: PublisherConfig, *, dp_index: int = 0) -> None:
        self.epoch = secrets.randbits(62)
        self._source = source
        self._config = config
        self._dp_index = dp_index
        self._next: dict[bytes, int] = {}  # subscribed topic -> sequence of its next message
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bound = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="omnistage-publisher", daemon=True)

    def start(self) -> None:
        """Start the thread and return when it is bound; then it says hello on the control socket.

        Raises:
            StartupError: It could not bind.
        """
        # Once more, for an engine that was forked by an application of its own.
        end_with(self._config.owner_pid, self._config.directory)
        self._thread.start()
        self._bound.wait()
        if self._failure is not None:
            raise StartupError(
                f"the publisher could not bind to {self._config.bind}: {self._failure}"
            ) from self._failure

    def close(self, timeout: float) -> bool:
        """Send what is handed over, then end the thread.

        Returns:
            Whether it ended within ``timeout`` seconds.
        """
        self._stopping = True
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        return True

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._serve(context)
        except BaseException as error:
            if not self._bound.is_set():
                self._failure = error
                self._bound.set()
                return
            # Without this thread every request would wait for ever; vLLM's own shutdown fails them
            # all.
            log.critical("the publisher failed; stopping the engine", exc_info=True)
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            context.destroy(linger=LINGER_MS)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        data, control = context.socket(zmq.XPUB), context.socket(zmq.DEALER)
        set_options(data)
        set_options(control)
        data.setsockopt(zmq.XPUB_VERBOSE, 1)
        data.setsockopt(zmq.XPUB_NODROP, 1)
        endpoint = listen(data, self._config.bind, Path(self._config.directory))
        self._bound.set()
        control.setsockopt(zmq.ROUTING_ID, core_identity(self._dp_index))
        control.connect(self._config.control)
        control.send(
            encode(Hello(PROTOCOL_VERSION, self.epoch, self._dp_index, os.getpid(), endpoint))
        )
        poller = zmq.Poller()
        for waitable in (self._wake, self._source.fileno(), data, control):
            poller.register(waitable, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            # Subscriptions first: a request is admitted only after its subscription was answered.
            self._answer_subscriptions(data)
            self._publish(data, control)
            # Releases last: what the scheduler handed over before them has left by now.
            if control in ready:
                self._answer_releases(control)
        self._publish(data, control)
        close_quietly(data)
        close_quietly(control)

    def _answer_releases(self, control: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = decode_control(control.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except ProtocolError as error:
                log.warning("control message dropped: %s", error)
                continue
            if isinstance(message, Release):
                self._source.release(message.request_id)
                answer = Released(PROTOCOL_VERSION, message.request_id, self._dp_index)
                with contextlib.suppress(zmq.Again):  # 1000 unread: the AR stage is gone
                    control.send(encode(answer), zmq.NOBLOCK)

    def _publish(self, data: zmq.Socket[bytes], control: zmq.Socket[bytes]) -> None:
        for message in self._source.messages():
            self._send(data, message)
        for failure in self._source.failures():
            try:
                control.send(encode(failure), zmq.NOBLOCK)
            except zmq.Again:
                log.error("control socket is full; failure of %s not reported", failure.request_id)

    def _send(self, data: zmq.Socket[bytes], message: Outgoing) -> None:
        sequence = self._next.get(message.topic)
        if sequence is None:
            self._source.undelivered(
                message.topic,
                UpdatesLost(
                    "nobody is subscribed as {1!r} on channel {0!r}; a subscription must stand "
                    "before the request is submitted".format(*parse_topic(message.topic))
                ),
            )
            return
        # Counted even if the send fails, so that a subscriber that recovers sees the gap.
        self._next[message.topic] = sequence + 1
        header = encode(
            Data(
                PROTOCOL_VERSION,
                self.epoch,
                self._dp_index,
                sequence,
                message.stamp,
                message.updates,
            )
        )
        if len(header) > MAX_HEADER_BYTES or len(message.buffers) > MAX_BUFFERS:
            self._source.undelivered(
                message.topic, ProcessorError("a step's updates are too large for one message")
            )
            return
        try:
            data.send_multipart([message.topic, header, *message.buffers], zmq.NOBLOCK)
        except zmq.Again:
            self._source.undelivered(
                message.topic,
                SubscriberStalled("the request's subscriber does not read; its queue is full"),
            )

    def _answer_subscriptions(self, data: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = data.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, topic = frame[:1], frame[1:]
            try:
                parse_topic(topic)
            except ProtocolError as error:
                log.warning("subscription ignored: %s", error)
                continue
            if kind == b"\x00":
                self._next.pop(topic, None)
            elif kind == b"\x01" and (topic in self._next or len(self._next) < MAX_TOPICS):
                self._confirm(data, topic)

    def _confirm(self, data: zmq.Socket[bytes], topic: bytes) -> None:
        sequence = self._next.setdefault(topic, 0)
        record = Subscribed(PROTOCOL_VERSION, self.epoch, self._dp_index, sequence)
        try:
            data.send_multipart([topic, encode(record)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("subscriber of %r stalled before its subscription was confirmed", topic)

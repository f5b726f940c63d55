"""The publisher: one thread that owns an engine core's sockets and sends what is handed over.

It numbers the messages of each topic, keeps them until they are acknowledged, answers
subscriptions and reports failed requests over the control socket. It knows no request and no
scheduler.
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
from omnistage.transport.curve import Curve
from omnistage.transport.delivery import MAX_RECEIVED, Delivery
from omnistage.transport.endpoints import (
    LINGER_MS,
    beside,
    close_quietly,
    listen,
    set_options,
)
from omnistage.transport.keys import Keys
from omnistage.transport.malformed import MAX_MALFORMED
from omnistage.transport.owner import end_with
from omnistage.transport.retained import Ledger
from omnistage.wire import (
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    MAX_SUBSCRIPTION_BYTES,
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
ZERO_COPY_BYTES: Final = 1 << 20
"""From here on ZeroMQ sends a message from where it is; below, copying it costs less."""
_FLUSH_SECONDS: Final = 0.5
"""For the last acknowledgements when it closes; vLLM waits a second in all."""


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
        bind: ``ipc`` or ``tcp://ADDRESS:PORT``.
        directory: Private directory for ipc paths.
        control: The AR stage's control endpoint.
        owner_pid: Process that started the engine; the engine ends when that is gone.
        keys: Where the keys of its tcp sockets are.
    """

    bind: str
    directory: str
    control: str
    owner_pid: int
    keys: Keys | None = None


class Publisher:
    """A daemon thread around an XPUB, a ROUTER and a DEALER socket, made and used only there.

    Args:
        source: What to publish.
        config: Where to bind.
        dp_index: This engine core's data-parallel rank.
    """

    def __init__(self, source: Source, config: PublisherConfig, *, dp_index: int = 0) -> None:
        self.epoch = secrets.randbits(62)
        self.malformed = 0
        self._source = source
        self._config = config
        self._dp_index = dp_index
        self._ledger = Ledger(source.undelivered, max_topics=MAX_TOPICS)
        self._delivery_endpoint = ""
        self._curve: Curve | None = None
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bound = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="omnistage-publisher", daemon=True)

    @property
    def refused(self) -> int:
        """Connections that were not admitted so far, for want of a key that is known."""
        return 0 if self._curve is None else self._curve.refused

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
        router = context.socket(zmq.ROUTER)
        set_options(data, max_bytes=MAX_SUBSCRIPTION_BYTES)
        for socket in (control, router):
            set_options(socket, max_bytes=MAX_HEADER_BYTES)
        data.setsockopt(zmq.XPUB_VERBOSE, 1)
        data.setsockopt(zmq.XPUB_NODROP, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer whose connection was cut comes again
        directory = Path(self._config.directory)
        curve = None if self._config.keys is None else Curve(context, self._config.keys)
        self._curve = curve
        endpoint = listen(data, self._config.bind, directory, curve)
        self._delivery_endpoint = listen(router, beside(self._config.bind), directory, curve)
        delivery = Delivery(router, self._ledger, epoch=self.epoch, dp_index=self._dp_index)
        self._bound.set()
        control.setsockopt(zmq.ROUTING_ID, core_identity(self._dp_index))
        control.connect(self._config.control)
        control.send(
            encode(Hello(PROTOCOL_VERSION, self.epoch, self._dp_index, os.getpid(), endpoint))
        )
        poller = zmq.Poller()
        for waitable in (self._wake, self._source.fileno(), data, control, router):
            poller.register(waitable, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(delivery.wait_ms()))
            # Subscriptions first: a request is admitted only after its subscription was answered.
            # Then acknowledgements, which give credit.
            if data in ready:
                self._answer_subscriptions(data)
            if router in ready:
                delivery.receive()
            delivery.beat()
            self._publish(data, control, delivery)
            # Releases last: what the scheduler handed over before them has left by now.
            if control in ready:
                self._answer_releases(control)
        self._publish(data, control, delivery)
        delivery.flush(_FLUSH_SECONDS)
        for socket in (data, control, router):
            close_quietly(socket)

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

    def _publish(
        self, data: zmq.Socket[bytes], control: zmq.Socket[bytes], delivery: Delivery
    ) -> None:
        for message in self._source.messages():
            self._send(data, delivery, message)
        for failure in self._source.failures():
            try:
                control.send(encode(failure), zmq.NOBLOCK)
            except zmq.Again:
                log.error("control socket is full; failure of %s not reported", failure.request_id)

    def _send(self, data: zmq.Socket[bytes], delivery: Delivery, message: Outgoing) -> None:
        topic = message.topic
        # It may be sent again later, when its maker has used the memory for something else.
        buffers = [b if isinstance(b, bytes) else bytes(b) for b in message.buffers]
        retained = self._ledger.topics.get(topic)
        if retained is None:
            self._source.undelivered(
                topic,
                UpdatesLost(
                    "nobody is subscribed as {1!r} on channel {0!r}; a subscription must stand "
                    "before the request is submitted".format(*parse_topic(topic))
                ),
            )
            return
        header = encode(
            Data(
                PROTOCOL_VERSION,
                self.epoch,
                self._dp_index,
                retained.next_sequence,
                message.stamp,
                message.updates,
            )
        )
        if len(header) > MAX_HEADER_BYTES or len(buffers) > MAX_BUFFERS:
            retained.give_up(stalled=False)
            self._source.undelivered(
                topic, ProcessorError("a step's updates are too large for one message")
            )
            return
        size = len(header) + sum(map(len, buffers))
        if not retained.admits(size):
            delivery.receive()  # a burst of messages: the credit may be there, unread
        try:
            if not retained.admits(size):
                raise zmq.Again
            copied = size < ZERO_COPY_BYTES
            data.send_multipart([topic, header, *buffers], zmq.NOBLOCK, copy=copied)
        except zmq.Again:
            # Given up, not left out, so that a subscriber that recovers knows what it lacks.
            retained.give_up(stalled=True)
            self._source.undelivered(
                topic,
                SubscriberStalled("the request's subscriber does not read; its queue is full"),
            )
        else:
            retained.append((header, *buffers), size)

    def _answer_subscriptions(self, data: zmq.Socket[bytes]) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                frames = data.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            kind, topic = frames[0][:1], frames[0][1:]
            try:
                if len(frames) != 1:  # an XSUB's own message: ZeroMQ knows of no subscription
                    raise ProtocolError(f"a subscription of {len(frames)} frames")
                parse_topic(topic)
            except ProtocolError as error:
                self._note_malformed(error)
                continue
            if kind == b"\x00":
                self._ledger.unsubscribe(topic)
            elif kind == b"\x01":
                self._confirm(data, topic)

    def _note_malformed(self, error: ProtocolError) -> None:
        """Count what is no subscription. Who sent it is not known, so that nobody is cut off."""
        self.malformed += 1
        if self.malformed <= MAX_MALFORMED:
            log.warning("subscription ignored: %s", error)
        if self.malformed == MAX_MALFORMED:
            log.error("%d malformed subscriptions; more are not logged", self.malformed)

    def _confirm(self, data: zmq.Socket[bytes], topic: bytes) -> None:
        sequence = self._ledger.subscribe(topic)
        if sequence is None:
            return
        record = Subscribed(
            PROTOCOL_VERSION, self.epoch, self._dp_index, sequence, self._delivery_endpoint
        )
        try:
            data.send_multipart([topic, encode(record)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("subscriber of %r stalled before its subscription was confirmed", topic)

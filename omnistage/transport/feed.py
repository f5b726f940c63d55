"""One publisher's part of a subscription: its data socket, and its place on a delivery link.

What is in order and what is missing is the reassembly's business, what it means the handler's.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import zmq

from omnistage.errors import ConfigError, ProtocolError, UpdatesLost
from omnistage.transport.curve import FailedHandshakes
from omnistage.transport.endpoints import close_quietly, connect, is_local, set_options
from omnistage.transport.link import link_to
from omnistage.transport.malformed import MAX_MALFORMED
from omnistage.transport.reader import SocketReader
from omnistage.transport.reassembly import Gap, Reassembly
from omnistage.transport.retained import CREDIT
from omnistage.wire import Data, Subscribed, decode_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from omnistage.metrics import DeliveryCounts
    from omnistage.transport.endpoints import Endpoints
    from omnistage.transport.link import Link
    from omnistage.wire import Buffer

log = logging.getLogger(__name__)

Message = tuple[Data, "Sequence[Buffer]"]


class Feed:
    """One publisher's part of a subscription.

    It has a data socket of its own, so that it is known who sent what is malformed. A publisher
    that sends too much of that is cut off: the feed closes, and reports a loss.

    Args:
        endpoints: Whose context to use.
        topic: The subscription's.
        publisher: The publisher's data endpoint.
        siblings: All feeds of the subscription.
        counts: The subscription's.
        on_data: Called with each message and its buffers, in order, each once.
        on_lost: Called wherever messages are missing.
        on_up: Called when the publisher knows of us.

    Raises:
        ConfigError: An endpoint that cannot be one.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        topic: bytes,
        publisher: str,
        siblings: Sequence[Feed],
        counts: DeliveryCounts,
        *,
        on_data: Callable[[Data, Sequence[Buffer]], None],
        on_lost: Callable[[UpdatesLost], None],
        on_up: Callable[[], None],
    ) -> None:
        self.topic = topic
        self.reassembly: Reassembly[Message] = Reassembly()
        self.up = False
        self._endpoints = endpoints
        self._publisher = publisher
        self._siblings = siblings
        self._counts = counts
        self._on_data = on_data
        self._on_lost = on_lost
        self._on_up = on_up
        self._malformed = 0
        self._link: Link | None = None
        self._held = False
        self._same_clock = is_local(publisher)
        self._socket = endpoints.context.socket(zmq.SUB)
        set_options(self._socket, linger_ms=0)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._handshakes = FailedHandshakes(self._socket)
        try:
            connect(self._socket, publisher, endpoints.curve)
        except (zmq.ZMQError, ConfigError) as error:
            self._handshakes.close()
            close_quietly(self._socket)
            raise ConfigError(f"cannot connect to {publisher!r}: {error}") from error
        self._reader = SocketReader(self._socket, self._on_message)

    @property
    def credit(self) -> int:
        """Messages that the publisher may still send, as far as is known here."""
        return max(0, CREDIT - self.reassembly.unacknowledged)

    def refusal(self) -> str | None:
        """Why the publisher does not let us in, as far as is known; None once it has."""
        return None if self.up else self._handshakes.why()

    def settle(self) -> None:
        """Note that nobody asks for a refusal any more. Idempotent."""
        if not self._socket.closed:
            self._handshakes.close()
            self._reader.touch()

    def ask(self) -> None:
        """Subscribe again; the publisher, or another one in its place, answers.

        After an unsubscription: whoever passes subscriptions on counts them. What is published
        between the two is sent again.
        """
        if not self._socket.closed:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, self.topic)
            self._socket.setsockopt(zmq.SUBSCRIBE, self.topic)
            self._reader.touch()

    def cut_off(self, why: str) -> None:
        """Listen to the publisher no more. Idempotent."""
        if not self._socket.closed:
            log.error("publisher at %s is cut off: %s", self._publisher, why)
            self.close()
            self._on_lost(UpdatesLost(f"the publisher at {self._publisher} is cut off: {why}"))

    def note_malformed(self) -> None:
        """Count a message that is none."""
        self._counts.malformed += 1

    def replayed(self, message: Data, buffers: Sequence[Buffer], size: int) -> None:
        """Take a message that was sent again; one that must wait will be asked for again."""
        self._counts.replayed += 1
        if not self._held:
            self._take(message, buffers, size)

    def heard(self, epoch: int, first: int, next_sequence: int) -> None:
        """Take what a heartbeat says of our topic."""
        if not self.up:
            self.up = True
            self._on_up()
        self._hand_on(self.reassembly.heard(epoch, first, next_sequence, time.monotonic()))
        self._wake()

    def silent(self, seconds: float) -> None:
        """Note that the publisher has sent no heartbeat for so long."""
        what = f"the publisher at {self._publisher} has sent no heartbeat for {seconds:g} s"
        self._on_lost(UpdatesLost(what))

    def missing(self, now: float) -> tuple[int, int] | None:
        """Hand on what was waited for long enough, and say what to ask for."""
        out, wanted = self.reassembly.ask(now)
        self._hand_on(out)
        return wanted

    def hold(self, held: bool) -> None:
        """Leave the data socket unread, or read it again."""
        if held:
            self._reader.pause()
        self._held = held
        self.reassembly.hold(held, time.monotonic())
        self._wake()
        if not held:
            self._reader.resume()

    def close(self) -> None:
        """Leave the publisher. Idempotent."""
        self._leave()
        self._handshakes.close()
        self._reader.close()
        close_quietly(self._socket)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            # The context's prefix match lets nothing else through; a hostile publisher might.
            if len(frames) < 2 or frames[0] != self.topic:
                raise ProtocolError(f"{len(frames)} frames on topic {frames[0][:80]!r}")
            message = decode_data(frames[1], frames[2:])
            if isinstance(message, Subscribed):
                self._on_subscribed(message)
                return
        except ProtocolError as error:
            self.note_malformed()
            self._malformed += 1
            log.warning("message from %s dropped: %s", self._publisher, error)
            if self._malformed >= MAX_MALFORMED:
                self.cut_off(f"it has sent {MAX_MALFORMED} malformed messages")
            return
        self._take(message, frames[2:], sum(map(len, frames)))

    def _on_subscribed(self, message: Subscribed) -> None:
        now = time.monotonic()
        if message.epoch != self.reassembly.epoch and not self.reassembly.is_past(message.epoch):
            if any(f.reassembly.epoch == message.epoch for f in self._siblings if f is not self):
                raise ProtocolError(f"{self._publisher} is a publisher that is subscribed already")
            link = link_to(self._endpoints, message.delivery, message.epoch)
            self._leave()
            self._link = link
            link.join(self)
        self._hand_on(self.reassembly.subscribed(message.epoch, message.next_sequence, now))
        self._wake()

    def _take(self, message: Data, buffers: Sequence[Buffer], size: int) -> None:
        """Take a message of ``size`` bytes, from whichever socket."""
        reassembly = self.reassembly
        now = time.monotonic()
        epoch, sequence = message.epoch, message.sequence
        if reassembly.passes(epoch, sequence, now):
            self._give(message, buffers)
        else:
            self._hand_on(reassembly.take(epoch, sequence, (message, buffers), size, now))
        link = self._link
        if link is None:
            return  # closed by what it was handed, or not confirmed yet
        if reassembly.ack(now):
            link.ack([self.topic])
        if reassembly.ack_at < link.due or reassembly.ask_at < link.due:
            link.wake_at(reassembly.due)

    def _give(self, message: Data, buffers: Sequence[Buffer]) -> None:
        counts = self._counts
        counts.updates += len(message.updates)
        if self._same_clock:
            counts.hop(time.monotonic_ns() - message.stamp)
        self._on_data(message, buffers)

    def _hand_on(self, out: Iterable[Message | Gap]) -> None:
        for item in out:
            if self._link is None:
                return  # closed by what it was handed
            if isinstance(item, Gap):
                name = self.topic.rstrip(b"\0").decode()
                self._on_lost(UpdatesLost(f"{name} at {self._publisher}: {item.why}"))
            else:
                self._give(*item)

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake_at(self.reassembly.due)

    def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.leave(self)

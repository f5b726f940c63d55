"""The subscriber: one topic's updates, from every publisher that serves it, on the event loop.

It confirms its subscription, checks the sequence and tells its handler about every gap; what an
update means is the handler's business.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import anyio
import zmq

from omnistage.errors import ConfigError, ProtocolError, StartupError, UpdatesLost
from omnistage.transport.endpoints import close_quietly, set_options
from omnistage.transport.reader import SocketReader
from omnistage.wire import Data, Subscribed, Update, decode_data, sequence_of, topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Buffer

log = logging.getLogger(__name__)


class UpdateHandler(Protocol):
    """Who receives a topic's updates; called on the event loop, must not block."""

    def on_update(self, update: Update, buffers: Sequence[Buffer], stamp: int) -> None:
        """One request's update, in the order it was published.

        Args:
            update: What the request emitted.
            buffers: The message's buffers; ``update.tensors`` index into it.
            stamp: Publisher's monotonic clock in ns when the scheduler handed the step over.
        """
        ...

    def on_lost(self, error: UpdatesLost) -> None:
        """Updates are missing; which requests they belonged to cannot be known."""
        ...


class Subscriber:
    """Subscribes one topic at one or more publishers.

    Updates of one publisher arrive in order, each once; a gap is reported before the update behind
    it. Frames that are no message of this protocol are counted and dropped; the gap they leave is
    noticed.

    Args:
        endpoints: Whose context to use.
        channel: The channel to subscribe.
        subscriber: This subscriber's id; the topic is its own.
        handler: Receives the updates.

    Raises:
        ConfigError: A channel or subscriber id that cannot stand in a topic.
    """

    def __init__(
        self, endpoints: Endpoints, channel: str, subscriber: str, handler: UpdateHandler
    ) -> None:
        self.topic = topic(channel, subscriber)
        self.malformed = 0
        self._handler = handler
        self._expected: dict[int, tuple[int, int]] = {}  # dp index -> (epoch, next sequence)
        self._publishers = 0
        self._confirmed = asyncio.Event()
        self._socket = endpoints.context.socket(zmq.SUB)
        set_options(self._socket, linger_ms=0)
        self._socket.setsockopt(zmq.SUBSCRIBE, self.topic)
        self._reader = SocketReader(self._socket, self._on_message)

    async def connect(self, publishers: Sequence[str], *, within: float) -> None:
        """Connect to the publishers and wait until each has confirmed the subscription.

        Args:
            publishers: Their data endpoints, one a data-parallel rank.
            within: Seconds to wait.

        Raises:
            ConfigError: An endpoint that cannot be one.
            StartupError: Not all have confirmed in time.
        """
        self._publishers += len(publishers)
        for endpoint in publishers:
            try:
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot connect to {endpoint!r}: {error}") from error
        self._reader.touch()
        with anyio.move_on_after(within) as scope:
            await self._confirmed.wait()
        if scope.cancelled_caught:
            raise StartupError(
                f"{len(self._expected)} of {self._publishers} publishers confirmed the "
                f"subscription of {self.topic!r} within {within:g} s; is the AR stage running at "
                f"{list(publishers)}?"
            )

    def pause(self) -> None:
        """Leave messages in the socket, whose queue is bounded. Idempotent."""
        self._reader.pause()

    def resume(self) -> None:
        """Read again. Idempotent."""
        self._reader.resume()

    def close(self) -> None:
        """Stop reading and unsubscribe. Idempotent."""
        self._reader.close()
        close_quietly(self._socket)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            # The context's prefix match lets nothing else through; a hostile publisher might.
            if len(frames) < 2 or frames[0] != self.topic:
                raise ProtocolError(f"{len(frames)} frames on topic {frames[0][:80]!r}")
            message = decode_data(frames[1], frames[2:])
        except ProtocolError as error:
            self.malformed += 1
            log.warning("message dropped: %s (%d so far)", error, self.malformed)
            if len(frames) > 1 and frames[0] == self.topic:
                self._on_unreadable(frames[1], error)
            return
        if isinstance(message, Subscribed):
            self._on_subscribed(message)
        else:
            self._on_data(message, frames[2:])

    def _on_subscribed(self, message: Subscribed) -> None:
        before = self._expected.get(message.dp_index)
        now = (message.epoch, message.next_sequence)
        self._expected[message.dp_index] = now
        if len(self._expected) >= self._publishers:
            self._confirmed.set()
        if before is not None and before != now:
            what = "restarted" if before[0] != message.epoch else "was reconnected after a loss"
            self._handler.on_lost(UpdatesLost(f"publisher {message.dp_index} {what}"))

    def _on_data(self, message: Data, buffers: Sequence[Buffer]) -> None:
        expected = self._expected.get(message.dp_index)
        if expected is None or expected[0] != message.epoch:
            # Sent before our subscription was confirmed, or by a publisher that is gone.
            return
        if message.sequence < expected[1]:
            return
        self._expected[message.dp_index] = (message.epoch, message.sequence + 1)
        if message.sequence > expected[1]:
            missing = message.sequence - expected[1]
            self._handler.on_lost(UpdatesLost(f"{missing} messages of {self.topic!r} were lost"))
        for update in message.updates:
            try:
                self._handler.on_update(update, buffers, message.stamp)
            except Exception:
                log.exception("update of %s lost: its handler raised", update.request_id)

    def _on_unreadable(self, header: bytes, error: ProtocolError) -> None:
        """Charge a loss to those who are open now, not to who is when the gap shows."""
        known = sequence_of(header)
        if known is not None:
            epoch, dp_index, sequence = known
            if self._expected.get(dp_index, (None, 0))[0] == epoch:
                self._expected[dp_index] = (epoch, sequence + 1)
        self._handler.on_lost(UpdatesLost(f"a message could not be read: {error.message}"))

"""The subscriber: one topic's updates, from every publisher that serves it, on the event loop.

It confirms its subscription, hands updates on in order and tells its handler what was lost for
good; what an update means is the handler's business.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import zmq

from omnistage.errors import ConfigError, ProtocolError, StartupError
from omnistage.transport.endpoints import close_quietly, set_options
from omnistage.transport.link import Feed
from omnistage.transport.reader import SocketReader
from omnistage.wire import Subscribed, Update, decode_data, topic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.errors import UpdatesLost
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Buffer, Data

log = logging.getLogger(__name__)

_ASK_SECONDS: Final = 0.25
"""Until a subscription that is not confirmed is sent again; doubles each time."""
_SLOWEST_ASK_SECONDS: Final = 2.0


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

    Updates of one publisher arrive in order, each once: what was lost on its way is asked for
    again, and only what the publisher has not any more is reported as lost, before the update
    behind it. Frames that are no message of this protocol are counted and dropped, and what they
    were is asked for again.

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
        self._endpoints = endpoints
        self._feeds: dict[int, Feed] = {}  # by data-parallel index
        self._up: set[int] = set()
        self._publishers = 0
        self._held = False
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
            await self._wait_until_confirmed()
        if scope.cancelled_caught:
            raise StartupError(
                f"{len(self._up)} of {self._publishers} publishers confirmed the "
                f"subscription of {self.topic!r} within {within:g} s; is the AR stage running at "
                f"{list(publishers)}?"
            )

    def pause(self) -> None:
        """Leave messages in the socket, whose queue is bounded. Idempotent."""
        self._hold(True)
        self._reader.pause()

    def resume(self) -> None:
        """Read again. Idempotent."""
        self._hold(False)
        self._reader.resume()

    def close(self) -> None:
        """Stop reading and unsubscribe. Idempotent."""
        for feed in self._feeds.values():
            feed.close()
        self._reader.close()
        close_quietly(self._socket)

    async def _wait_until_confirmed(self) -> None:
        """Ask again from time to time: the confirmation, or what follows it, may be lost."""
        pause = _ASK_SECONDS
        while not self._confirmed.is_set():
            with anyio.move_on_after(pause):
                await self._confirmed.wait()
                return
            self._ask()
            pause = min(2 * pause, _SLOWEST_ASK_SECONDS)

    def _ask(self) -> None:
        """Subscribe again; every publisher answers.

        After an unsubscription: whoever passes subscriptions on counts them. What is published
        between the two is sent again.
        """
        self._socket.setsockopt(zmq.UNSUBSCRIBE, self.topic)
        self._socket.setsockopt(zmq.SUBSCRIBE, self.topic)
        self._reader.touch()

    def _hold(self, held: bool) -> None:
        if held != self._held:
            self._held = held
            for feed in self._feeds.values():
                feed.hold(held)

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
            self.malformed += 1
            log.warning("message dropped: %s (%d so far)", error, self.malformed)
            return
        feed = self._feeds.get(message.dp_index)
        if feed is not None:  # else it was sent before our subscription was confirmed
            feed.data(message, frames[2:], sum(map(len, frames)))

    def _on_subscribed(self, message: Subscribed) -> None:
        feed = self._feeds.get(message.dp_index)
        if feed is None:
            if len(self._feeds) >= self._publishers:
                raise ProtocolError(f"a publisher of rank {message.dp_index} that nobody asked for")
            feed = self._feeds[message.dp_index] = Feed(
                self._endpoints,
                self.topic,
                message.dp_index,
                on_data=self._on_data,
                on_lost=self._on_lost,
                on_up=self._on_up,
                ask=self._ask,
            )
        feed.subscribed(message)

    def _on_up(self, dp_index: int) -> None:
        self._up.add(dp_index)
        if len(self._up) >= self._publishers:
            self._confirmed.set()

    def _on_lost(self, error: UpdatesLost) -> None:
        try:
            self._handler.on_lost(error)
        except Exception:
            log.exception("a loss of %r was not taken: its handler raised", self.topic)

    def _on_data(self, message: Data, buffers: Sequence[Buffer]) -> None:
        for update in message.updates:
            try:
                self._handler.on_update(update, buffers, message.stamp)
            except Exception:
                log.exception("update of %s lost: its handler raised", update.request_id)

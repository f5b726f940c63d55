"""The subscriber: one topic's updates, from every publisher that serves it, on the event loop.

It confirms its subscription, hands updates on in order and tells its handler what was lost for
good; what an update means is the handler's business.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from omnistage.errors import ConfigError, StartupError
from omnistage.metrics import DeliveryCounts, Depths, delivery_metrics
from omnistage.transport.feed import Feed
from omnistage.wire import topic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.errors import UpdatesLost
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Buffer, Data, Update

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


def _nothing_unread() -> int:
    return 0


class Subscriber:
    """Subscribes one topic at one or more publishers.

    Updates of one publisher arrive in order, each once: what was lost on its way is asked for
    again, and only what the publisher has not any more is reported as lost, before the update
    behind it. Frames that are no message of this protocol are counted and dropped, and what they
    were is asked for again; a publisher that sends many of them is cut off.

    Args:
        endpoints: Whose context to use.
        channel: The channel to subscribe.
        subscriber: This subscriber's id; the topic is its own.
        handler: Receives the updates.
        unread: How many updates wait at the handler, for the metrics.

    Raises:
        ConfigError: A channel or subscriber id that cannot stand in a topic.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        channel: str,
        subscriber: str,
        handler: UpdateHandler,
        *,
        unread: Callable[[], int] = _nothing_unread,
    ) -> None:
        self.topic = topic(channel, subscriber)
        self.counts = DeliveryCounts(channel, subscriber, self._depths)
        self._unread = unread
        self._handler = handler
        self._endpoints = endpoints
        self._feeds: list[Feed] = []
        self._held = False
        self._changed = asyncio.Event()
        delivery_metrics().add(self.counts)

    async def connect(self, publishers: Sequence[str], *, within: float) -> None:
        """Connect to the publishers and wait until each has confirmed the subscription.

        Args:
            publishers: Their data endpoints, one a data-parallel rank.
            within: Seconds to wait.

        Raises:
            ConfigError: An endpoint that cannot be one, or is there twice.
            StartupError: Not all have confirmed in time.
        """
        if len(set(publishers)) < len(publishers):
            raise ConfigError(f"an endpoint is named twice: {list(publishers)}")
        for publisher in publishers:
            feed = Feed(
                self._endpoints,
                self.topic,
                publisher,
                self._feeds,
                self.counts,
                on_data=self._on_data,
                on_lost=self._on_lost,
                on_up=self._changed.set,
            )
            self._feeds.append(feed)
        try:
            with anyio.move_on_after(within) as scope:
                await self._wait_until_confirmed()
            if scope.cancelled_caught:
                refusals = [why for feed in self._feeds if (why := feed.refusal())]
                raise StartupError(
                    f"{sum(feed.up for feed in self._feeds)} of {len(self._feeds)} publishers "
                    f"confirmed the subscription of {self.topic!r} within {within:g} s; "
                    + (refusals or [f"is the AR stage running at {list(publishers)}?"])[0]
                )
        finally:
            for feed in self._feeds:
                feed.settle()

    def pause(self) -> None:
        """Leave messages in the sockets, whose queues are bounded. Idempotent."""
        self._hold(True)

    def resume(self) -> None:
        """Read again. Idempotent."""
        self._hold(False)

    def close(self) -> None:
        """Stop reading and unsubscribe. Idempotent."""
        for feed in self._feeds:
            feed.close()
        self.abandon()

    def abandon(self) -> None:
        """Take it out of the metrics, in any thread; all that is left to do without its loop."""
        delivery_metrics().remove(self.counts)

    async def _wait_until_confirmed(self) -> None:
        """Ask again from time to time: the confirmation, or what follows it, may be lost."""
        pause = _ASK_SECONDS
        while missing := [feed for feed in self._feeds if not feed.up]:
            self._changed.clear()
            with anyio.move_on_after(pause) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                for feed in missing:
                    feed.ask()
                pause = min(2 * pause, _SLOWEST_ASK_SECONDS)

    def _hold(self, held: bool) -> None:
        if held != self._held:
            self._held = held
            for feed in self._feeds:
                feed.hold(held)

    def _depths(self) -> Depths:
        feeds = self._feeds
        return Depths(
            unread=self._unread(),
            reordering=sum(feed.reassembly.waiting for feed in feeds),
            credit=min((feed.credit for feed in feeds), default=0),
        )

    def _on_lost(self, error: UpdatesLost) -> None:
        self.counts.lost += 1
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

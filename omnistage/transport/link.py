"""The subscribers' end of delivery: one connection a process and publisher, on the event loop.

All subscribers of one :class:`Endpoints` share it, so that there is one heartbeat however many
there are. What is in order and what is missing is the reassembly's business.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import zmq

from omnistage.errors import ProtocolError
from omnistage.transport.endpoints import close_quietly, connect, set_options
from omnistage.transport.malformed import MAX_MALFORMED
from omnistage.transport.reader import SocketReader
from omnistage.wire import (
    PROTOCOL_VERSION,
    Ack,
    Data,
    Heartbeat,
    Leave,
    Replay,
    decode_data,
    decode_delivery,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omnistage.transport.endpoints import Endpoints
    from omnistage.transport.feed import Feed
    from omnistage.wire import DeliveryMessage

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 3.0
"""A publisher that sends no heartbeat for so long is taken for gone."""
_PING_SECONDS: Final = 1.0  # how often one that is silent is told that we are here
_LIFE_SECONDS: Final = 1.9  # how often, at least, it is told so otherwise; it waits for 10
_LATE_SECONDS: Final = 0.5  # a timer later than this: the loop stood still, not the publisher
_LINGER_MS: Final = 100  # for the last acknowledgement; a publisher that is gone takes all of it

_links: WeakKeyDictionary[Endpoints, dict[tuple[str, int], Link]] = WeakKeyDictionary()


class Link:
    """A DEALER socket to one publisher's delivery socket.

    Args:
        endpoints: Whose context to use.
        endpoint: Where that is.
        epoch: The publisher's.

    Raises:
        ProtocolError: It is no endpoint.
    """

    def __init__(self, endpoints: Endpoints, endpoint: str, epoch: int) -> None:
        self.due = math.inf
        self._key = (endpoint, epoch)
        self._epoch = epoch
        self._endpoints = endpoints
        self._feeds: dict[bytes, list[Feed]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False
        self._said_at = 0.0
        self._malformed = 0
        self._silent_at = time.monotonic() + SILENT_SECONDS
        self._socket = endpoints.context.socket(zmq.DEALER)
        set_options(self._socket, linger_ms=_LINGER_MS)
        # The same after a cut, so that the publisher takes us for whom we are.
        self._socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
        try:
            connect(self._socket, endpoint, endpoints.curve)
        except zmq.ZMQError as error:
            close_quietly(self._socket)
            raise ProtocolError(f"no delivery endpoint: {endpoint[:80]!r}: {error}") from error
        self._reader = SocketReader(self._socket, self._on_message)

    def join(self, feed: Feed) -> None:
        """Serve one feed more."""
        self._feeds.setdefault(feed.topic, []).append(feed)
        self.wake_at(self._silent_at)

    def leave(self, feed: Feed) -> None:
        """Serve a feed no more; the last one closes the connection."""
        feeds = self._feeds[feed.topic]
        if len(feeds) == 1:
            self.ack([feed.topic])
            self._send(Leave(PROTOCOL_VERSION, self._epoch, feed.topic))
            del self._feeds[feed.topic]
        else:
            feeds.remove(feed)
        if not self._feeds:
            if self._timer is not None:
                self._timer.cancel()
            _links[self._endpoints].pop(self._key, None)
            self._reader.close()
            close_quietly(self._socket)

    def ack(self, topics: Iterable[bytes]) -> None:
        """Acknowledge what all feeds of these topics have."""
        positions = tuple(
            (topic, min(feed.reassembly.expected for feed in self._feeds[topic]))
            for topic in topics
        )
        self._send(Ack(PROTOCOL_VERSION, self._epoch, positions))

    def wake_at(self, due: float) -> None:
        """Look after the feeds at ``due``, or before."""
        if due >= self.due or not self._feeds:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.due = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._on_due)

    def _on_due(self) -> None:
        if self._socket.closed:
            return  # with its context, and the subscribers were not asked
        now = time.monotonic()
        late = now - self.due > _LATE_SECONDS
        self.due, self._timer = math.inf, None
        if now >= self._silent_at:
            self._on_silence(now, late=late)
        feeds = self._all()
        if topics := {feed.topic for feed in feeds if feed.reassembly.ack(now)}:
            self.ack(topics)
        for feed in feeds:
            if now >= feed.reassembly.ask_at and (wanted := feed.missing(now)) is not None:
                self._send(Replay(PROTOCOL_VERSION, self._epoch, feed.topic, *wanted))
        due = min((f.reassembly.due for fs in self._feeds.values() for f in fs), default=math.inf)
        self.wake_at(min(due, self._silent_at))

    def _on_silence(self, now: float, *, late: bool) -> None:
        if late and not self._silent:
            self._silent_at = now + _LATE_SECONDS  # its heartbeats may be there, unread
            return
        self._silent_at = now + _PING_SECONDS
        if not self._silent:
            self._silent = True
            for feed in self._all():
                feed.silent(SILENT_SECONDS)
        for feed in self._all():
            feed.ask()
        if self._feeds:
            self.ack(self._feeds)

    def _send(self, message: DeliveryMessage) -> None:
        self._said_at = time.monotonic()
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("publisher at %s cannot be reached: %s", self._key[0], error)
        self._reader.touch()

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            if len(frames) == 1:
                self._on_heartbeat(frames[0])
            else:
                self._on_replayed(frames)
        except ProtocolError as error:
            self._malformed += 1
            log.warning("delivery message from %s dropped: %s", self._key[0], error)
            for feed in self._all():
                feed.note_malformed()
                if self._malformed >= MAX_MALFORMED:
                    feed.cut_off(f"it has sent {MAX_MALFORMED} malformed messages")

    def _all(self) -> list[Feed]:
        return [feed for feeds in self._feeds.values() for feed in feeds]

    def _on_replayed(self, frames: list[bytes]) -> None:
        message = decode_data(frames[1], frames[2:])
        if not isinstance(message, Data):
            raise ProtocolError(f"a {type(message).__name__} message was sent again")
        size = sum(map(len, frames))
        for feed in list(self._feeds.get(frames[0], ())):
            feed.replayed(message, frames[2:], size)

    def _on_heartbeat(self, header: bytes) -> None:
        message = decode_delivery(header)
        if not isinstance(message, Heartbeat) or message.epoch != self._epoch:
            raise ProtocolError(f"a {type(message).__name__} message that is no heartbeat of ours")
        self._silent = False
        self._silent_at = time.monotonic() + SILENT_SECONDS
        wanted = []
        for topic, first, next_sequence in message.topics:
            for feed in list(self._feeds.get(topic, ())):
                if not first == next_sequence == feed.reassembly.expected or not feed.up:
                    feed.heard(message.epoch, first, next_sequence)
                    wanted.append(topic)
        if len(message.topics) < len(self._feeds):  # it has forgotten us, or not heard of some
            wanted += self._feeds.keys() - {topic for topic, _, _ in message.topics}
        # Nothing about topics it knows to be complete: then the answer is only a sign of life.
        if wanted or time.monotonic() - self._said_at > _LIFE_SECONDS:
            self.ack(topic for topic in dict.fromkeys(wanted) if topic in self._feeds)


def link_to(endpoints: Endpoints, endpoint: str, epoch: int) -> Link:
    """The link that these endpoints' subscribers share."""
    links = _links.setdefault(endpoints, {})
    link = links.get((endpoint, epoch))
    if link is None:
        link = links[endpoint, epoch] = Link(endpoints, endpoint, epoch)
    return link

"""Updates without a decoder: an AR stage's own messages, as an async iterator.

For a consumer that wants ids, not audio: a recorder, captions, a decoder with a life of its own.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self

from omnistage.config import AUDIO
from omnistage.errors import ConfigError, StreamClosed
from omnistage.request import TokenUpdate
from omnistage.stages.environment import check_event_loop
from omnistage.tensors import token_update
from omnistage.transport.endpoints import check_endpoint
from omnistage.transport.keys import Keys, load_keys
from omnistage.transport.shared import Share
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from omnistage.errors import UpdatesLost
    from omnistage.wire import Buffer, Update

MAX_UNREAD: Final = 4096
"""Updates that wait for the reader before the socket is left unread too."""


def subscribe(
    endpoints: str | Sequence[str],
    channel: str = AUDIO,
    *,
    subscriber: str = "tokens",
    within: float = 10.0,
    keys: str | Path | None = None,
) -> Subscription:
    """Subscribe to an AR stage's updates, in this process or another.

    Which requests are published to a subscriber is said when they are submitted, by its id
    (``submit(subscribers=["tokens"])``). A topic belongs to one subscriber: do not take the name of
    a decoder stage, nor an id that another reader has.

    Args:
        endpoints: The AR stage's data endpoints, :attr:`Pipeline.endpoints`: one for each
            data-parallel rank.
        channel: The channel.
        subscriber: The subscriber's id.
        within: Seconds to wait for the publishers' confirmations.
        keys: Directory of the keys to connect with over tcp, where the AR stage has keys.

    Returns:
        The updates; enter it with ``async with``, which returns when every publisher has confirmed,
        or iterate over it at once.

    Raises:
        ConfigError: A channel, subscriber id or endpoint that cannot be one, or keys that cannot be
            used.
    """
    given = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
    _check(given, within)
    topic(channel, subscriber)  # raises for names that cannot be
    return Subscription(given, channel, subscriber, within, load_keys(keys))


def _check(endpoints: tuple[Any, ...], within: Any) -> None:
    for endpoint in endpoints:
        check_endpoint(endpoint)
    if not endpoints:
        raise ConfigError("there is no endpoint to subscribe at")
    if not isinstance(within, int | float) or not 0 < within < math.inf:
        raise ConfigError(f"within must be a positive number of seconds, got {within!r}")


class Subscription:
    """An async iterator of :class:`~omnistage.request.TokenUpdate`.

    Updates of a request come in order, each once. A gap raises UpdatesLost where it is; reading on
    gives what came behind it. It has no end of its own: close it, or leave ``async with``. A reader
    that falls behind without end fails its requests with SubscriberStalled, not its memory.
    All those of an event loop share one connection a publisher for what is not data.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        channel: str,
        subscriber: str,
        within: float,
        keys: Keys | None = None,
    ) -> None:
        self._publishers = endpoints
        self._keys = keys
        self._topic = (channel, subscriber)
        self._within = within
        self._inbox: _Inbox | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        check_event_loop()
        if self._closed:
            raise StreamClosed("the subscription was closed; make another one")
        if self._inbox is None:
            self._inbox = _Inbox(*self._topic, self._keys)
            try:
                await self._inbox.connect(self._publishers, self._within)
            except BaseException:
                await self.aclose()
                raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[TokenUpdate]:
        return self

    async def __anext__(self) -> TokenUpdate:
        if not self._closed:
            await self.__aenter__()
        item = None if self._inbox is None else await self._inbox.next()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, TokenUpdate):
            return item
        raise item

    def __del__(self) -> None:
        if self._inbox is not None and not self._closed:
            self._inbox.close_threadsafe()
            # Last: it raises where warnings are errors.
            warnings.warn(
                f"a subscription of {self._topic} was dropped open; use `async with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def aclose(self) -> None:
        """Unsubscribe; what is unread is gone and a waiting reader's loop ends. Idempotent."""
        self._closed = True
        if self._inbox is not None:
            self._inbox.close()


class _Inbox:
    """What the event loop holds of a subscription, so that the subscription itself can be dropped.

    Args:
        channel: The channel.
        subscriber: The subscriber's id.
        keys: Those of its sockets.
    """

    def __init__(self, channel: str, subscriber: str, keys: Keys | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[TokenUpdate | UpdatesLost] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._share = Share(keys)
        self._subscriber = Subscriber(
            self._share.endpoints, channel, subscriber, self, unread=self._items.__len__
        )

    async def connect(self, publishers: tuple[str, ...], within: float) -> None:
        await self._subscriber.connect(publishers, within=within)

    async def next(self) -> TokenUpdate | UpdatesLost | None:
        """The next item; None once it is closed."""
        while not self._items:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        item = self._items.popleft()
        if len(self._items) <= MAX_UNREAD // 2:
            self._subscriber.resume()
        return item

    def close(self) -> None:
        self._closed = True
        self._items.clear()
        self._news.set()
        self._subscriber.close()
        self._share.close()

    def close_threadsafe(self) -> None:
        """As :meth:`close`, from a finalizer: any thread, any time."""
        if self._loop.is_closed():
            self._subscriber.abandon()
            self._share.close()
        else:
            self._loop.call_soon_threadsafe(self.close)

    def on_update(self, update: Update, buffers: Sequence[Buffer], stamp: int) -> None:
        """Take an update from the subscriber."""
        self._put(token_update(update, buffers, stamp))

    def on_lost(self, error: UpdatesLost) -> None:
        """Take the news of a gap from the subscriber."""
        self._put(error)

    def _put(self, item: TokenUpdate | UpdatesLost) -> None:
        self._items.append(item)
        self._news.set()
        if len(self._items) >= MAX_UNREAD:
            self._subscriber.pause()

"""Updates without a decoder: an AR stage's own messages, as an async iterator.

For a consumer that wants ids, not audio: a recorder, captions, a decoder with a life of its own.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from omnistage.config import AUDIO
from omnistage.errors import StreamClosed
from omnistage.request import Payload, TokenUpdate
from omnistage.stages.environment import check_event_loop
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import topic as make_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
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
) -> Subscription:
    """Subscribe to an AR stage's updates, in this process or another.

    Which requests are published to a subscriber is said when they are submitted, by its id
    (``submit(subscribers=["tokens"])``). The id of a decoder stage shares that stage's topic and
    sees what it is given.

    Args:
        endpoints: The AR stage's data endpoints, :attr:`Pipeline.endpoints`: one for each
            data-parallel rank.
        channel: The channel.
        subscriber: The subscriber's id.
        within: Seconds to wait for the publishers' confirmations.

    Returns:
        The updates; enter it with ``async with``, which returns when every publisher has confirmed,
        or iterate over it at once.

    Raises:
        ConfigError: A channel or subscriber id that cannot stand in a topic.
    """
    given = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
    return Subscription(given, channel, subscriber, within)


class Subscription:
    """An async iterator of :class:`~omnistage.request.TokenUpdate`.

    Updates of a request come in order, each once. A gap raises UpdatesLost where it is; reading on
    gives what came behind it. It has no end of its own: close it, or leave ``async with``. A reader
    that falls behind without end fails its requests with SubscriberStalled, not its memory.
    """

    def __init__(
        self, endpoints: tuple[str, ...], channel: str, subscriber: str, within: float
    ) -> None:
        self._publishers = endpoints
        self._topic = (channel, subscriber)
        self._within = within
        self._endpoints: Endpoints | None = None
        self._subscriber: Subscriber | None = None
        self._items: deque[TokenUpdate | UpdatesLost] = deque()
        self._news = asyncio.Event()
        self._closed = False
        make_topic(channel, subscriber)  # raises for one that cannot be

    async def __aenter__(self) -> Self:
        check_event_loop()
        if self._closed:
            raise StreamClosed("the subscription was closed; make another one")
        if self._subscriber is not None:
            return self
        self._endpoints = Endpoints()
        try:
            self._subscriber = Subscriber(self._endpoints, *self._topic, self)
            await self._subscriber.connect(self._publishers, within=self._within)
        except BaseException:
            self._close()
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
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        item = self._items.popleft()
        if self._subscriber is not None and len(self._items) <= MAX_UNREAD // 2:
            self._subscriber.resume()
        if isinstance(item, TokenUpdate):
            return item
        raise item

    def __del__(self) -> None:
        if self._endpoints is not None and not self._closed:
            warnings.warn(
                f"a subscription of {self._topic} was dropped open; use `async with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self._endpoints.close()

    async def aclose(self) -> None:
        """Unsubscribe; what is unread is gone and a waiting reader's loop ends. Idempotent."""
        self._close()

    def on_update(self, update: Update, buffers: Sequence[Buffer], stamp: int) -> None:
        """Take an update from the subscriber."""
        tensors = {
            info.name: Payload(info.dtype, info.shape, info.first_row, buffers[info.frame])
            for info in update.tensors
        }
        self._put(
            TokenUpdate(
                request_id=update.request_id,
                segment=update.segment,
                position=update.position,
                ids=update.ids,
                tensors=tensors,
                start=update.start,
                terminal=update.terminal,
                segment_end=update.segment_end,
                stamp=stamp,
            )
        )

    def on_lost(self, error: UpdatesLost) -> None:
        """Take the news of a gap from the subscriber."""
        self._put(error)

    def _put(self, item: TokenUpdate | UpdatesLost) -> None:
        self._items.append(item)
        self._news.set()
        if self._subscriber is not None and len(self._items) >= MAX_UNREAD:
            self._subscriber.pause()

    def _close(self) -> None:
        self._closed = True
        self._items.clear()
        self._news.set()
        if self._subscriber is not None:
            self._subscriber.close()
        if self._endpoints is not None:
            self._endpoints.close()

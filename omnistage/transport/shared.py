"""The endpoints that all subscriptions of an event loop share, for as long as there is one.

One context with one I/O thread, and so one delivery link a publisher, however many there are.
"""

from __future__ import annotations

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

from omnistage.transport.endpoints import Endpoints

_shared: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Endpoints, set[Share]]]] = (
    WeakKeyDictionary()
)


class Share:
    """A share in the running event loop's endpoints; with the last one they are closed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        known = _shared.get(self._loop)
        self.endpoints, self._shares = known or (Endpoints(), set())
        if known is None:
            _shared[self._loop] = self.endpoints, self._shares
        self._shares.add(self)

    def close(self) -> None:
        """Give the share back, after the sockets made with it. Idempotent."""
        self._shares.discard(self)
        # What is left of a loop that has ended serves nobody, whoever holds a share.
        if not self._shares or self._loop.is_closed():
            _shared.pop(self._loop, None)
            self.endpoints.close()

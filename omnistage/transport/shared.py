"""The endpoints that all subscriptions of an event loop share, for as long as there is one.

One context with one I/O thread, and so one delivery link a publisher, however many there are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from omnistage.transport.endpoints import Endpoints

if TYPE_CHECKING:
    from omnistage.transport.keys import Keys

_shared: Final[
    WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Keys | None, tuple[Endpoints, set[Share]]]]
] = WeakKeyDictionary()


class Share:
    """A share in the running event loop's endpoints; with the last one they are closed.

    Args:
        keys: Those of the tcp sockets: what has the same shares the endpoints.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys = keys
        of_loop = _shared.setdefault(self._loop, {})
        known = of_loop.get(keys)
        self.endpoints, self._shares = known or (Endpoints(keys=keys), set())
        if known is None:
            of_loop[keys] = self.endpoints, self._shares
        self._shares.add(self)

    def close(self) -> None:
        """Give the share back, after the sockets made with it. Idempotent."""
        self._shares.discard(self)
        # What is left of a loop that has ended serves nobody, whoever holds a share.
        if not self._shares or self._loop.is_closed():
            of_loop = _shared.get(self._loop, {})
            of_loop.pop(self._keys, None)
            if not of_loop:
                _shared.pop(self._loop, None)
            self.endpoints.close()

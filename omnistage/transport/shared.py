"""The endpoints that subscriptions of an event loop share, for as long as there is one.

One context with one I/O thread, and so one delivery link a publisher, however many there are; those
with other keys have another.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from omnistage.transport.endpoints import Endpoints

if TYPE_CHECKING:
    from omnistage.transport.keys import Keys

_Shared = dict["Keys | None", tuple[Endpoints, set["Share"]]]
_shared: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared]] = WeakKeyDictionary()


class Share:
    """A share in the running event loop's endpoints; with the last one they are closed.

    Args:
        keys: Those of their tcp sockets.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys = keys
        of_loop = _shared.setdefault(self._loop, {})
        if keys not in of_loop:
            of_loop[keys] = Endpoints(keys=keys), set()
        self.endpoints, self._shares = of_loop[keys]
        self._shares.add(self)

    def close(self) -> None:
        """Give the share back, after the sockets made with it. Idempotent."""
        self._shares.discard(self)
        # What is left of a loop that has ended serves nobody, whoever holds a share.
        if not self._shares or self._loop.is_closed():
            of_loop = _shared.get(self._loop, {})
            if of_loop.get(self._keys, (None,))[0] is self.endpoints:
                del of_loop[self._keys]
            if not of_loop:
                _shared.pop(self._loop, None)
            self.endpoints.close()

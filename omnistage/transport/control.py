"""The control socket: where engine cores say hello to their AR stage and report failed requests.

It is apart from the data sockets, so that nothing urgent queues behind audio.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio
import zmq

from omnistage.errors import ProtocolError, StartupError
from omnistage.transport.endpoints import IPC, close_quietly, listen, set_options
from omnistage.transport.reader import SocketReader
from omnistage.wire import Failed, Hello, decode_control

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.transport.endpoints import Endpoints

log = logging.getLogger(__name__)


class ControlServer:
    """The AR stage's end: a ROUTER that every engine core's publisher connects to.

    Args:
        endpoints: Whose context and directory to use.
        on_failed: Called on the event loop for each request that the engine side gave up.
    """

    def __init__(self, endpoints: Endpoints, on_failed: Callable[[Failed], None]) -> None:
        self._on_failed = on_failed
        self.hellos: dict[int, Hello] = {}
        self._changed = asyncio.Event()
        self._socket = endpoints.context.socket(zmq.ROUTER)
        set_options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = listen(self._socket, IPC, endpoints.directory)
        self._reader = SocketReader(self._socket, self._on_message)

    async def wait_for_hellos(self, count: int, *, within: float) -> list[Hello]:
        """Wait until ``count`` engine cores have said hello.

        Args:
            count: Number of data-parallel ranks.
            within: Seconds to wait.

        Returns:
            Their hellos, by rank.

        Raises:
            StartupError: Fewer came in time.
        """
        with anyio.move_on_after(within):
            while len(self.hellos) < count:
                self._changed.clear()
                await self._changed.wait()
        if len(self.hellos) < count:
            raise StartupError(
                f"{len(self.hellos)} of {count} engine cores said hello within {within:g} s; "
                "the engine's log says what the others did"
            )
        return [self.hellos[index] for index in sorted(self.hellos)]

    def close(self) -> None:
        """Stop reading and close. Idempotent."""
        self._reader.close()
        close_quietly(self._socket)

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames in a control message")
            message = decode_control(frames[1])
        except ProtocolError as error:
            log.warning("control message dropped: %s", error)
            return
        if isinstance(message, Hello):
            self.hellos[message.dp_index] = message
            self._changed.set()
        else:
            self._on_failed(message)

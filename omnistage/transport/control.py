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
from omnistage.transport.malformed import Malformed
from omnistage.transport.reader import SocketReader
from omnistage.wire import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Failed,
    Hello,
    Release,
    Released,
    decode_control,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.transport.endpoints import Endpoints

log = logging.getLogger(__name__)


def core_identity(rank: int) -> bytes:
    """The routing id of an engine core, by which a later server finds it again."""
    return f"core-{rank}".encode()


class ControlServer:
    """The AR stage's end: a ROUTER that every engine core's publisher connects to.

    Args:
        endpoints: Whose context and directory to use.
        on_failed: Called on the event loop for each request that the engine side gave up.
        bind: The endpoint that publishers were told; None makes one.
        hellos: Those that came to an earlier server at that endpoint; kept up to date.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        on_failed: Callable[[Failed], None],
        *,
        bind: str | None = None,
        hellos: dict[int, Hello] | None = None,
    ) -> None:
        self._on_failed = on_failed
        self.hellos = {} if hellos is None else hellos
        self._peers = {rank: core_identity(rank) for rank in self.hellos}
        self.malformed = Malformed("control message")
        self._releases: dict[str, tuple[set[int], asyncio.Event]] = {}
        self._changed = asyncio.Event()
        self._socket = endpoints.context.socket(zmq.ROUTER)
        set_options(self._socket, max_bytes=MAX_HEADER_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A core that starts again may come before the end of its former connection is noticed.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if bind is None:
            self.endpoint = listen(self._socket, IPC, endpoints.directory)
        else:
            self._socket.bind(bind)
            self.endpoint = bind
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

    async def release(self, request_id: str) -> None:
        """Have every engine core let go of a request, and return when all have.

        A core that is gone has let go. Waits without end otherwise: set a deadline around it.
        """
        done = asyncio.Event()
        self._releases[request_id] = (set(self._peers), done)
        message = encode(Release(PROTOCOL_VERSION, request_id))
        for rank, peer in list(self._peers.items()):
            try:
                self._socket.send_multipart([peer, message], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # EHOSTUNREACH or EAGAIN: gone, or so far behind that it will be.
                log.warning("engine core %d cannot be reached: %s", rank, error)
                self._on_released(request_id, rank)
        self._reader.touch()
        try:
            if self._releases[request_id][0]:  # not where no core has said hello yet
                await done.wait()
        finally:
            self._releases.pop(request_id, None)

    def close(self) -> None:
        """Stop reading and close. Idempotent."""
        self._reader.close()
        close_quietly(self._socket)

    def _on_released(self, request_id: str, rank: int) -> None:
        release = self._releases.get(request_id)
        if release is not None:
            waiting, done = release
            waiting.discard(rank)
            if not waiting:
                done.set()

    def _on_message(self, frames: list[bytes]) -> None:
        if self.malformed.ignores(frames[0]):
            return
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames in a control message")
            message = decode_control(frames[1])
        except ProtocolError as error:
            self.malformed.note(frames[0], error)
            return
        if isinstance(message, Hello):
            self.hellos[message.dp_index] = message
            self._peers[message.dp_index] = frames[0]
            self._changed.set()
        elif isinstance(message, Failed):
            self._on_failed(message)
        elif isinstance(message, Released):
            self._on_released(message.request_id, message.dp_index)

"""The publisher's delivery socket: acknowledgements in, what is missing and heartbeats out.

It belongs to the publisher's thread; what is owed to whom is the ledger's business.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import zmq

from omnistage.errors import ProtocolError
from omnistage.transport.malformed import Malformed
from omnistage.wire import (
    PROTOCOL_VERSION,
    Ack,
    Heartbeat,
    Leave,
    Replay,
    decode_delivery,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.transport.retained import Ledger
    from omnistage.wire import Buffer

log = logging.getLogger(__name__)

MAX_RECEIVED: Final = 1000
"""Messages between two looks at what the scheduler has handed over."""


class Delivery:
    """A ledger with its ROUTER socket.

    Args:
        socket: Bound, and used by nobody else.
        ledger: What is owed.
        epoch: The publisher's.
        dp_index: Its rank.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], ledger: Ledger, *, epoch: int, dp_index: int
    ) -> None:
        self.socket = socket
        self.malformed = Malformed("delivery message")
        self._ledger = ledger
        self._epoch = epoch
        self._dp_index = dp_index

    def receive(self) -> None:
        """Take what peers have sent so far; not all of it if they send too much."""
        for _ in range(MAX_RECEIVED):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer = frames[0]
            if self.malformed.ignores(peer):
                continue
            try:
                self._take(peer, frames[1:])
            except ProtocolError as error:
                if self.malformed.note(peer, error):
                    self._ledger.lose(peer)

    def beat(self) -> None:
        """Send heartbeats that are due, and let go of peers that are gone."""
        for peer in self._ledger.beat(time.monotonic()):
            self._send_heartbeat(peer)

    def wait_ms(self) -> int | None:
        """Milliseconds until :meth:`beat` is due; None if it is not before somebody comes."""
        seconds = self._ledger.wait(time.monotonic())
        return None if seconds is None else int(seconds * 1000) + 1

    def flush(self, seconds: float) -> None:
        """Serve until everything is acknowledged by whoever lives, at most so long."""
        end = time.monotonic() + seconds
        while self._ledger.owed and (left := end - time.monotonic()) > 0:
            if self.socket.poll(int(left * 1000) + 1):
                self.receive()
        if self._ledger.owed:
            log.warning("the publisher ends before everything was acknowledged")

    def _take(self, peer: bytes, frames: Sequence[bytes]) -> None:
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames in a delivery message")
        message = decode_delivery(frames[0])
        if message.epoch != self._epoch:
            return  # it means this endpoint's former publisher
        if isinstance(message, Ack):
            if self._ledger.ack(peer, message.positions, time.monotonic()):
                self._send_heartbeat(peer)
        elif isinstance(message, Replay):
            self._replay(peer, message)
        elif isinstance(message, Leave):
            self._ledger.leave(peer, message.topic)

    def _replay(self, peer: bytes, message: Replay) -> None:
        retained = self._ledger.topics.get(message.topic)
        if retained is None:
            return
        if message.first < retained.first:
            self._send_heartbeat(peer)  # it says so
        for frames in retained.replay(message.first, message.end):
            if not self._send(peer, [message.topic, *frames]):
                return

    def _send_heartbeat(self, peer: bytes) -> None:
        state = self._ledger.state(peer)
        header = encode(Heartbeat(PROTOCOL_VERSION, self._epoch, self._dp_index, state))
        self._send(peer, [header])

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        try:
            self.socket.send_multipart([peer, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH or EAGAIN: cut off or behind. It asks again, or is gone.
            if error.errno == zmq.EHOSTUNREACH:
                self._ledger.cut(peer, time.monotonic())
            log.debug("peer %r cannot be reached: %s", peer, error)
            return False
        return True

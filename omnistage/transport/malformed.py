"""Peers of a socket that send what is no message of the protocol: counted, and then ignored."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from omnistage.errors import ProtocolError

log = logging.getLogger(__name__)

MAX_MALFORMED: Final = 100
"""Malformed messages of a peer until it is not listened to any more.

Sockets do not garble what they carry: whoever sends so many speaks something else.
"""
MAX_OFFENDERS: Final = 4096
"""Peers remembered. They choose their ids, so this bounds accidents; whom you do not trust must not
reach the socket at all."""


class Malformed:
    """Counts malformed messages by peer.

    Args:
        what: What they should have been, for the log.
    """

    def __init__(self, what: str) -> None:
        self.total = 0
        self._what = what
        self._by_peer: dict[bytes, int] = {}

    def ignores(self, peer: bytes) -> bool:
        """Whether the peer has sent too many."""
        return self._by_peer.get(peer, 0) >= MAX_MALFORMED

    def note(self, peer: bytes, error: ProtocolError) -> bool:
        """Count one.

        Returns:
            Whether it was the one too many: from now on the peer is ignored.
        """
        self.total += 1
        count = self._by_peer.get(peer, 0) + 1
        self._by_peer[peer] = count
        if len(self._by_peer) > MAX_OFFENDERS:
            del self._by_peer[next(iter(self._by_peer))]
        log.warning("%s dropped: %s", self._what, error)
        if count == MAX_MALFORMED:
            log.error("peer %r is ignored: it has sent %d malformed messages", peer, count)
        return count == MAX_MALFORMED

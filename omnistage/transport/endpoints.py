"""Where sockets live: a private directory for ipc, loopback tcp, and the options all of them get.

An :class:`Endpoints` owns one ZeroMQ context and one directory; closing it removes both.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from omnistage.errors import ConfigError
from omnistage.wire import MAX_BUFFER_BYTES

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

IPC: Final = "ipc"
"""Bind to a fresh path in the private directory."""

# Steps that may wait on either side of a connection before the subscriber counts as stalled.
HIGH_WATER_MARK: Final = 1000
LINGER_MS: Final = 1000

_MAX_IPC_PATH: Final = 107  # sun_path holds 108 bytes, its terminator included
_LONGEST_NAME: Final = 37  # vLLM's own sockets are there too: a slash and a UUID


class Endpoints:
    """One process's ZeroMQ context and the directory of its ipc sockets.

    The directory has mode 0700, so that only this user can connect.

    Args:
        directory: Where to make the private directory; None for the system's temporary one.

    Raises:
        ConfigError: The directory's path is too long for a socket.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="omni-", dir=directory))
        if len(os.fsencode(self.directory)) + _LONGEST_NAME > _MAX_IPC_PATH:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise ConfigError(
                f"{self.directory} is too long for a socket path; set TMPDIR to a short directory"
            )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every socket of the context, end it, remove the directory. Idempotent."""
        self.context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def ipc(self) -> str:
        """A fresh ipc endpoint in the private directory."""
        return ipc_endpoint(self.directory)


def ipc_endpoint(directory: Path) -> str:
    """A fresh ipc endpoint in ``directory``."""
    return f"ipc://{directory}/{secrets.token_hex(5)}"


def check_bind(bind: str) -> str:
    """Return ``bind`` if a stage may listen there.

    Raises:
        ConfigError: It is neither ``ipc`` nor a tcp address on the loopback interface.
    """
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    if bind == IPC or (
        bind.startswith("tcp://") and host in {"127.0.0.1", "localhost", "[::1]"} and port.isdigit()
    ):
        return bind
    raise ConfigError(
        f"cannot bind to {bind!r}: use 'ipc', or 'tcp://127.0.0.1:PORT'; port 0 picks a free one"
    )


def is_local(endpoint: str) -> bool:
    """Whether a peer at ``endpoint`` is on this host, and so has the same monotonic clock."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("ipc://") or host in {"127.0.0.1", "localhost", "[::1]"}


def beside(bind: str) -> str:
    """Where a second socket binds beside one at ``bind``: a free port of the same host."""
    return bind if bind == IPC else f"{bind.rpartition(':')[0]}:0"


def listen(socket: zmq.Socket[bytes], bind: str, directory: Path) -> str:
    """Bind ``socket`` and return the endpoint that peers connect to.

    Args:
        socket: A socket that is not bound yet.
        bind: ``ipc``, or ``tcp://host:port``; port 0 is chosen by the system as it binds.
        directory: Where an ipc path is made.
    """
    if bind == IPC:
        socket.bind(ipc_endpoint(directory))
    else:
        host, _, port = bind.rpartition(":")
        socket.bind(f"{host}:*" if port == "0" else bind)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def set_options(
    socket: zmq.Socket[bytes], *, linger_ms: int = LINGER_MS, max_bytes: int = MAX_BUFFER_BYTES
) -> None:
    """Give ``socket`` the bounds that every socket of ours has, before it binds or connects.

    Args:
        socket: The socket.
        linger_ms: What it may send after it is closed.
        max_bytes: Of a frame; ZeroMQ disconnects whoever announces more, before it allocates.
    """
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)


def close_quietly(socket: zmq.Socket[bytes]) -> None:
    """Close ``socket``; an interrupted or already ended context is no reason to fail a shutdown."""
    with contextlib.suppress(zmq.ZMQError):
        socket.close()

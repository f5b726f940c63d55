"""Where sockets live: a private directory for ipc, tcp with keys, and the options all of them get.

An :class:`Endpoints` owns one ZeroMQ context and one directory; closing it removes both.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from omnistage.errors import ConfigError
from omnistage.transport.curve import Curve
from omnistage.wire import MAX_BUFFER_BYTES

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from omnistage.transport.keys import Keys

IPC: Final = "ipc"
"""Bind to a fresh path in the private directory."""

# Steps that may wait on either side of a connection before the subscriber counts as stalled.
HIGH_WATER_MARK: Final = 1000
LINGER_MS: Final = 1000

_LOCK: Final = ".omnistage-lock"
"""No other program's: whatever has a file of this name, and nobody who holds it, is removed."""
_LONGEST_ENDPOINT: Final = 512  # a name of DNS has 253 characters
_MAX_IPC_PATH: Final = 107  # sun_path holds 108 bytes, its terminator included
_LONGEST_NAME: Final = 37  # vLLM's own sockets are there too: a slash and a UUID


class Endpoints:
    """One process's ZeroMQ context and the directory of its ipc sockets.

    The directory has mode 0700, so that only this user can connect.

    Args:
        directory: Where to make the private directory; None for the system's temporary one.
        keys: The CURVE keys of its tcp sockets, which are plain without.

    Raises:
        ConfigError: The directory's path is too long for a socket, or a key cannot be used.
    """

    def __init__(self, directory: Path | None = None, *, keys: Keys | None = None) -> None:
        self.directory, self._lock = _make_directory(directory)
        if len(os.fsencode(self.directory)) + _LONGEST_NAME > _MAX_IPC_PATH:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            raise ConfigError(
                f"{self.directory} is too long for a socket path; set TMPDIR to a short directory"
            )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keys = keys
        self.curve: Curve | None = None
        if keys is not None:
            try:
                self.curve = Curve(self.context, keys)
            except ConfigError:
                self.close()
                raise

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
        if self.curve is not None:
            self.curve.join()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def ipc(self) -> str:
        """A fresh ipc endpoint in the private directory."""
        return ipc_endpoint(self.directory)


def _make_directory(parent: Path | None) -> tuple[Path, int]:
    """A private directory and the lock that says that we live, which ends with the process.

    Whoever makes one removes those that a killed process has left.
    """
    made = Path(tempfile.mkdtemp(prefix=".omni-", dir=parent))
    _sweep(made.parent)
    lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Named only now: without its lock it would look left behind.
    return made.rename(made.with_name(made.name.removeprefix("."))), lock


def _sweep(parent: Path) -> None:
    for found in parent.glob("omni-*"):
        with contextlib.suppress(OSError):  # another user's, or another process is faster
            if found.is_symlink() or found.stat().st_uid != os.geteuid():
                continue
            lock = os.open(found / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found, ignore_errors=True)
            finally:
                os.close(lock)


def ipc_endpoint(directory: Path) -> str:
    """A fresh ipc endpoint in ``directory``."""
    return f"ipc://{directory}/{secrets.token_hex(5)}"


def check_bind(bind: str, keys: Keys | None = None) -> str:
    """Return ``bind`` if a stage may listen there.

    Args:
        bind: ``ipc``, or ``tcp://ADDRESS:PORT``.
        keys: The keys that it would listen with.

    Raises:
        ConfigError: It is neither, its address is not the loopback interface's and there are no
            keys, or it is no single address: peers are told where to connect.
    """
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) < 2**16
    if bind != IPC and not (bind.startswith("tcp://") and is_port):
        raise ConfigError(
            f"cannot bind to {bind!r}: use 'ipc', or 'tcp://ADDRESS:PORT'; port 0 picks a free one"
        )
    if bind == IPC:
        return bind
    address = _address(host)
    if address is None or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"cannot bind to {bind!r}: peers are told where to connect, so give one address of "
            "this host, in digits"
        )
    if keys is None and not address.is_loopback:
        raise ConfigError(
            f"cannot bind to {bind!r} without keys, others can reach it: make some with "
            "`omnistage keys DIR` and give that directory as keys"
        )
    if keys is not None and not keys.can_listen:
        raise ConfigError(
            f"cannot bind to {bind!r}: {keys.directory} has no server.key_secret; it is where "
            "`omnistage keys` was run"
        )
    return bind


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host as ZeroMQ binds it: an IPv6 address in brackets, or the one name that is known."""
    try:
        if host.startswith("[") and host.endswith("]"):
            return ipaddress.IPv6Address(host[1:-1])
        return ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def check_endpoint(endpoint: object) -> str:
    """Return ``endpoint`` if it can be connected to.

    Raises:
        ConfigError: It is neither ``ipc://PATH`` nor ``tcp://HOST:PORT``.
    """
    if isinstance(endpoint, str) and len(endpoint) <= _LONGEST_ENDPOINT:
        _, _, rest = endpoint.partition("://")
        host, _, port = rest.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
        if endpoint.startswith("ipc://") and rest:
            return endpoint
        if endpoint.startswith("tcp://") and host and is_port:
            return endpoint
    raise ConfigError(f"an endpoint is ipc://PATH or tcp://HOST:PORT, got {endpoint!r:.200}")


def is_local(endpoint: str) -> bool:
    """Whether a peer at ``endpoint`` is on this host, and so has the same monotonic clock."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("ipc://") or host in {"127.0.0.1", "localhost", "[::1]"}


def beside(bind: str) -> str:
    """Where a second socket binds beside one at ``bind``: a free port of the same host."""
    return bind if bind == IPC else f"{bind.rpartition(':')[0]}:0"


def listen(
    socket: zmq.Socket[bytes], bind: str, directory: Path, curve: Curve | None = None
) -> str:
    """Bind ``socket`` and return the endpoint that peers connect to.

    Args:
        socket: A socket that is not bound yet.
        bind: ``ipc``, or ``tcp://host:port``; port 0 is chosen by the system as it binds.
        directory: Where an ipc path is made.
        curve: Admits known clients only, where it is tcp.
    """
    if bind == IPC:
        socket.bind(ipc_endpoint(directory))
    else:
        if curve is not None:
            curve.listen(socket)
        host, _, port = bind.rpartition(":")
        _allow_ipv6(socket, host)
        socket.bind(f"{host}:*" if port == "0" else bind)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: zmq.Socket[bytes], endpoint: str, curve: Curve | None = None) -> None:
    """Connect ``socket`` to what :func:`listen` returned, here or elsewhere.

    Raises:
        ConfigError: There are keys, but no client's.
        ZMQError: It is no endpoint.
    """
    if endpoint.startswith("tcp://"):
        if curve is not None:
            curve.connect(socket)
        _allow_ipv6(socket, endpoint)
    elif curve is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 0)  # libzmq's way to plain again, after one of tcp
    socket.connect(endpoint)


def _allow_ipv6(socket: zmq.Socket[bytes], host: str) -> None:
    # Only there: an IPv4 address would be bound, and named to peers, as one of IPv6.
    socket.setsockopt(zmq.IPV6, int("[" in host))


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

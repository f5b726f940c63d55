"""Health and metrics over HTTP, for what watches a process: Prometheus, an orchestrator, a person.

A thread with an event loop of its own answers, also while the application's is blocked.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from omnistage.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

log = logging.getLogger(__name__)

_SECONDS: Final = 5.0
"""For one request, from its first byte to the last of the answer."""
_MAX_HEAD: Final = 8192
_MAX_CONNECTIONS: Final = 64
_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a pipeline takes requests.

    Args:
        ok: Whether it does.
        reason: If not, why.
        running: Requests in it.
    """

    ok: bool
    reason: str | None
    running: int


def serve_metrics(
    address: str, health: Callable[[], Health], *, registry: CollectorRegistry = REGISTRY
) -> MetricsServer:
    """Answer ``GET /metrics`` and ``GET /health`` until closed.

    There is no encryption and no password: give an address that others can reach only where they
    may read it.

    Args:
        address: ``HOST:PORT``, or a port alone on the loopback interface; port 0 picks a free one.
        health: Says how the process is, in a thread of the server's; :meth:`Pipeline.health` does.
        registry: The metrics.

    Raises:
        ConfigError: What is no address.
        StartupError: It is taken, or not of this host.
    """
    host, port = parse_address(address)
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise StartupError(f"metrics cannot be served at {address}: {error}") from error
    return MetricsServer(listener, health, registry)


def parse_address(address: str) -> tuple[str, int]:
    """The host and port of ``HOST:PORT``, or of a port alone, which is the loopback interface's.

    Raises:
        ConfigError: It is neither.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"an address of metrics is HOST:PORT or PORT, got {address!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


class MetricsServer:
    """Answers in a daemon thread that sleeps while nobody asks.

    A request has five seconds and 8 KiB. Of more than 64 connections at a time the oldest is
    closed, so that those that say nothing keep nobody out.

    Args:
        listener: Bound, and closed by the server.
        health: Says how the process is.
        registry: The metrics.
    """

    def __init__(
        self, listener: socket.socket, health: Callable[[], Health], registry: CollectorRegistry
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = listener
        self._health = health
        self._registry = registry
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}  # the oldest first
        self._thread = threading.Thread(target=self._run, name="omnistage-metrics", daemon=True)
        self._thread.start()

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
        """Close every connection and return when the thread has ended. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=_MAX_HEAD)
        await self._stop.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()
        if ending := [task for task in self._open.values() if task is not None]:
            await asyncio.wait(ending)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()  # which its handler reads as an end
        self._open[writer] = asyncio.current_task()
        try:
            async with asyncio.timeout(_SECONDS):
                writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, EOFError, asyncio.LimitOverrunError, OSError) as error:
            log.debug("a request for metrics was not answered: %r", error)
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, target, *_ = [*head.split(b"\r\n", 1)[0].split(b" "), b""]
        status, kind, body = self._page(method, target.partition(b"?")[0])
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            "\r\n",
        )
        return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body)

    def _page(self, method: bytes, path: bytes) -> tuple[HTTPStatus, str, bytes]:
        if method not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"only GET and HEAD\n"
        if path == b"/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == b"/health":
            health = self._ask()
            status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
            return status, "application/json", msgspec.json.encode(health)
        return HTTPStatus.NOT_FOUND, _TEXT, b"there is /metrics and /health\n"

    def _ask(self) -> Health:
        try:
            return self._health()
        except Exception as error:
            log.exception("health could not be told")
            return Health(ok=False, reason=f"{type(error).__name__}: {error}", running=0)

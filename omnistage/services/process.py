"""A service's life as a process: start, serve, drain at the first signal, stop at the second."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from omnistage.stages.base import settled
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.keys import load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from omnistage.errors import StageClosed

log = logging.getLogger(__name__)


class Service(Protocol):
    """A stage that serves other processes."""

    @property
    def name(self) -> str:
        """The stage's name."""
        ...

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        ...

    @property
    def closed(self) -> StageClosed | None:
        """Why it takes no requests; None while it does."""
        ...

    def __len__(self) -> int:
        """Requests that it has."""
        ...

    async def start(self) -> None:
        """Come up."""
        ...

    async def serve(self) -> None:
        """Serve until cancelled; an error ends the process."""
        ...

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        ...

    async def aclose(self) -> None:
        """Fail what is running and give everything back. Idempotent."""
        ...


async def host(
    make: Callable[[Endpoints], Service],
    *,
    keys: str | Path | None = None,
    drain_seconds: float,
    on_ready: Callable[[Service], None],
) -> int:
    """Run a service in this process until it is told to stop.

    SIGTERM or SIGINT drains it: no new requests, and the running ones have ``drain_seconds`` to
    end. A second one fails them at once.

    Args:
        make: Makes the service.
        keys: Directory of the CURVE keys of its tcp sockets.
        drain_seconds: How long to wait for the running requests.
        on_ready: Called when it takes requests.

    Returns:
        0 if every request had ended, or 128 and the signal's number.

    Raises:
        OmniStageError: The service could not start, or its stage died.
    """
    signals = _Signals()
    tasks: list[asyncio.Task[None]] = []

    def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tasks.append(asyncio.get_running_loop().create_task(work))
        return tasks[-1]

    with Endpoints(keys=load_keys(keys)) as endpoints:
        service = make(endpoints)
        try:
            starting = begin(service.start())
            await signals.wait(1, starting)
            if not starting.done():
                return 128 + signals.last
            starting.result()
            on_ready(service)
            serving = begin(service.serve())
            await signals.wait(1, serving)
            if not serving.done():
                log.info("stage %s: draining, %d requests", service.name, len(service))
                with anyio.move_on_after(drain_seconds):
                    await signals.wait(2, serving, begin(service.drain()))
            if serving.done():
                serving.result()
            if len(service):
                log.warning("stage %s: %d requests did not end", service.name, len(service))
            return 128 + signals.last if len(service) else 0
        finally:
            for task in tasks:
                task.cancel()
            # Whatever comes meanwhile: half a shutdown would leave processes behind.
            await settled(asyncio.ensure_future(service.aclose()))
            await asyncio.gather(*tasks, return_exceptions=True)


class _Signals:
    """Counts the signals that ask to stop."""

    def __init__(self) -> None:
        self.last = 0
        self._count = 0
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)

    async def wait(self, count: int, *works: asyncio.Task[None]) -> None:
        """Return when so many have come, or one of ``works`` is done."""
        while self._count < count and not any(work.done() for work in works):
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait([news, *works], return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()

    def _take(self, number: int) -> None:
        self.last = number
        self._count += 1
        self._news.set()

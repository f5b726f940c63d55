"""Deadlines of a request in the decoder stage: who owes it something, and since when.

Nothing is timed while nobody owes: before the first update, while vLLM holds the request preempted,
while its reader does not read, and after its last update.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from omnistage.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.config import Deadlines

_GRACE_SECONDS: Final = 0.25


class Watch:
    """One request's deadlines, with one timer that is set again when it fires.

    Args:
        deadlines: How long each may take.
        upstream: Name of the stage that owes updates.
        stage: Name of the stage that owes audio.
        on_late: Called once with the error that names who was late.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        upstream: str,
        stage: str,
        on_late: Callable[[DeadlineExceeded], None],
    ) -> None:
        self._deadlines = deadlines
        self._upstream = upstream
        self._stage = stage
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._update_since: float | None = None
        self._chunk_since: float | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._first: asyncio.TimerHandle | None = None
        if deadlines.first_audio is not None:
            self._first = self._loop.call_later(deadlines.first_audio, self._no_first_audio_yet)

    def update_came(self, *, more_due: bool) -> None:
        """An update is here, and the next one is due, or not: paused, or it was the last."""
        self._update_since = self._loop.time() if more_due else None
        if self._ticking is None and self._deadlines.between_chunks is not None:
            self._tick(self._deadlines.between_chunks)

    def chunk_due(self, due: bool) -> None:
        """Whether the decoder stage owes a chunk from now on."""
        if not due:
            self._chunk_since = None
        elif self._chunk_since is None:
            self._chunk_since = self._loop.time()

    def chunk_came(self) -> None:
        """A chunk is on its way to the reader."""
        self._chunk_since = None
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        for timer in (self._ticking, self._first):
            if timer is not None:
                timer.cancel()

    def _tick(self, seconds: float) -> None:
        self._ticking = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        limit = self._deadlines.between_chunks
        if limit is None:
            return
        now = self._loop.time()
        since = {self._stage: self._chunk_since, self._upstream: self._update_since}
        waits = {name: now - start for name, start in since.items() if start is not None}
        for name, waited in waits.items():
            # A timer may fire a clock tick early.
            if waited >= limit - 0.001:
                self._confirm(name, limit)
                return
        self._tick(limit - max(waits.values(), default=0.0))

    def _confirm(self, name: str, limit: float) -> None:
        """Look again a moment later: if this loop was blocked, what was due waits in a socket."""
        is_audio = name == self._stage
        since = self._chunk_since if is_audio else self._update_since

        def look_again() -> None:
            if since != (self._chunk_since if is_audio else self._update_since):
                self._check()
                return
            self._late(f"no {'audio' if is_audio else 'update'} for {limit:g} s", name)

        self._ticking = self._loop.call_later(min(_GRACE_SECONDS, limit / 2), look_again)

    def _no_first_audio_yet(self) -> None:
        self._first = self._loop.call_later(_GRACE_SECONDS, self._no_first_audio)

    def _no_first_audio(self) -> None:
        late = self._upstream if self._chunk_since is None else self._stage
        self._late(f"no audio within {self._deadlines.first_audio:g} s of the request", late)

    def _late(self, message: str, name: str) -> None:
        self.close()
        self._on_late(
            DeadlineExceeded(f"{message}; the stage that was late is {name!r}", stage=name)
        )

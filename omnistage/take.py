"""One request on its way through the AR stage and every branch, until they agree on its end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from omnistage.errors import OmniStageError, ServerError, StreamClosed, UpdatesLost
from omnistage.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.request import AudioChunk, StageRequest, Terminal, Usage
    from omnistage.stages.base import AutoregressiveStage, RunningRequest
    from omnistage.stages.route import Consumer

# How long the last update may be behind vLLM's own answer, and the other way round.
_STRAGGLER_SECONDS: Final = 10.0


class Take:
    """A request while it runs, with the audio of it that nobody has read.

    It is complete when every branch has given all its audio and the AR stage its usage, and their
    counts agree; the first error ends it and aborts all the others.

    Args:
        number: Its place among the requests of its submission, from 0.
        branches: Those that decode it.
        on_news: Called with it and, if that is the news, a chunk of the first branch; otherwise
            another's chunk came, the AR stage is done with it, or it is over.
    """

    def __init__(
        self,
        number: int,
        branches: Sequence[Consumer],
        on_news: Callable[[Take, AudioChunk | None], None],
    ) -> None:
        self.number = number
        self.usage: Usage | None = None
        self.error: OmniStageError | None = None
        self.over = False
        self._request_id = ""
        self._more = False
        self._on_news = on_news
        self._branches = branches
        self._chunks: deque[tuple[_Part, AudioChunk]] = deque()
        self._parts: list[_Part] = []
        self._result: Usage | None = None
        self._ar: RunningRequest | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def sampled(self) -> bool:
        """Whether the AR stage is done with it."""
        return self._result is not None

    @property
    def has_audio(self) -> bool:
        """Whether :meth:`pop` has something to give."""
        return bool(self._chunks)

    @property
    def unread_seconds(self) -> float:
        """Audio that waits to be read, of the branch that has most."""
        return max((part.unread_seconds for part in self._parts), default=0.0)

    def start(self, ar: AutoregressiveStage, request: StageRequest) -> None:
        """Open every branch, then submit to the AR stage; a stage that refuses it ends the take.

        Args:
            ar: The AR stage.
            request: The request; the branches are consumers beside its own.
        """
        self._request_id, self._more = request.request_id, request.more
        consumers = []
        try:
            for branch in self._branches:
                part = _Part(self, branch)
                consumers.append(
                    branch.open(request.request_id, part, after=request.after, more=request.more)
                )
                self._parts.append(part)
            consumers += request.consumers
            request = replace(request, consumers=tuple(consumers), final_stage=not consumers)
            self._ar = ar.submit(request, on_done=self._on_ar_done)
        except OmniStageError as error:
            self.fail(error)

    def pop(self) -> AudioChunk:
        """The oldest chunk that nobody has read."""
        part, chunk = self._chunks.popleft()
        part.unread_seconds -= chunk.seconds
        part.branch.resume(self._request_id)
        return chunk

    def fail(self, error: OmniStageError) -> None:
        """End it with ``error`` unless it is over, and abort it in every stage."""
        was_over = self.over
        if not was_over:
            self.error = error
            self._chunks.clear()
        self._drop(error)  # in any case: they may wait for what would continue this one
        if not was_over:
            self._end()

    def nothing_follows(self) -> None:
        """Tell the stages of a take that is over, if they expect another one to continue it."""
        if self._more:
            self._drop(StreamClosed("nothing follows", request_id=self._request_id))

    async def abort(self) -> None:
        """Return when the stages have let go; :meth:`fail` comes first and makes them."""
        for part in self._parts:
            await part.branch.release(self._request_id)
        if self._ar is not None:
            await self._ar.abort()

    def on_chunk(self, part: _Part, chunk: AudioChunk) -> None:
        """The next piece of a branch's audio."""
        self._chunks.append((part, chunk))
        self._on_news(self, chunk if part is self._parts[0] else None)

    def complete(self) -> None:
        """Finish if every side has reported; otherwise give the late ones a bounded time."""
        if self.over:
            return
        result = self._result
        terminals = [part.terminal for part in self._parts if part.terminal is not None]
        if len(terminals) < len(self._parts) or result is None:
            if result is not None or len(terminals) == len(self._parts):
                self._wait_for_stragglers()
            return
        reason = terminals[0].reason if terminals else result.finish_reason
        wrong = next((t.tokens for t in terminals if t.tokens != result.output_tokens), None)
        if wrong is not None:
            message = f"vLLM sampled {result.output_tokens} ids, {wrong} were published"
            self.fail(UpdatesLost(message, request_id=self._request_id))
        elif reason in {FinishReason.ABORT, FinishReason.ERROR}:
            message = f"vLLM ended the request with {reason!s}"
            self.fail(ServerError(message, request_id=self._request_id))
        else:
            dropped = terminals[0].dropped if terminals else 0
            self.usage = replace(result, finish_reason=reason, dropped_tokens=dropped)
            self._end()

    def _on_ar_done(self, outcome: Usage | OmniStageError) -> None:
        if isinstance(outcome, OmniStageError):
            self.fail(outcome)
            return
        self._result = outcome
        self.complete()
        if not self.over:
            self._on_news(self, None)

    def _drop(self, error: OmniStageError) -> None:
        for part in self._parts:
            part.branch.drop(self._request_id)
        if self._ar is not None:
            self._ar.fail(error)

    def _end(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_news(self, None)

    def _wait_for_stragglers(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_STRAGGLER_SECONDS, self._on_straggler)

    def _on_straggler(self) -> None:
        missing = [part for part in self._parts if part.terminal is None]
        if missing and all(part.branch.has_ended(self._request_id) for part in missing):
            return  # all ids are here, decoding them just takes longer
        what = "the last update" if missing else "vLLM's answer"
        self.fail(
            UpdatesLost(
                f"{what} did not come within {_STRAGGLER_SECONDS:g} s of the other side's end",
                request_id=self._request_id,
            )
        )


class _Part:
    """A take's share of one branch: what that branch has given of it."""

    def __init__(self, take: Take, branch: Consumer) -> None:
        self.branch = branch
        self.terminal: Terminal | None = None
        self.unread_seconds = 0.0
        self._take = take

    def on_chunk(self, chunk: AudioChunk) -> None:
        self.unread_seconds += chunk.seconds
        self._take.on_chunk(self, chunk)

    def on_end(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._take.complete()

    def on_error(self, error: OmniStageError) -> None:
        self._take.fail(error)

"""A submission's pieces: the requests that it becomes, cut at once or from a text as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from omnistage.errors import DeadlineExceeded, InvalidRequest, OmniStageError, ServerError
from omnistage.sentences import SentenceCutter, is_spoken

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence

    from omnistage.request import StageInput
    from omnistage.stages.base import AutoregressiveStage

log = logging.getLogger(__name__)

_AHEAD: Final = 2
"""Pieces that may wait to be submitted before no more of the text is read."""
_CLOSE_SECONDS: Final = 10.0
_SLICE: Final = 4096  # characters that are cut at a time, though there may be a book of them


class Pieces:
    """What waits to be submitted, and the task that makes it.

    A prompt is what the AR stage's input adapter makes of it, all at once. A text that comes, or
    one to be run sentence by sentence, is read no further than is needed; each sentence goes to the
    input adapter as soon as it is complete, and one without a letter or digit is left out. The
    iterator is closed at the end, whatever that is.

    Args:
        request_id: Whose they are, for logs.
        asked: What was submitted.
        text: The prompt, if it comes as an iterator.
        on_change: Called when a piece is there, or no more will come.
        on_failure: Called, perhaps after the end, with what went wrong.
    """

    def __init__(
        self,
        request_id: str,
        asked: StageInput,
        text: AsyncIterable[str] | None,
        *,
        on_change: Callable[[], None],
        on_failure: Callable[[OmniStageError], None],
    ) -> None:
        self._request_id = request_id
        self._asked = asked
        self._text = text
        self._iterator: object = text  # once it is read, what reads it
        self._on_change = on_change
        self._on_failure = on_failure
        self._waiting: deque[StageInput] = deque()
        self._room = asyncio.Event()
        self._given = False
        self._complete = False
        self._cancelled = False
        self._reading = False
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._waiting)

    @property
    def more(self) -> bool:
        """Whether another one waits, or may come."""
        return bool(self._waiting) or not self._complete

    def take(self) -> StageInput:
        """The next one, to be submitted now."""
        self._room.set()
        return self._waiting.popleft()

    async def start(self, ar: AutoregressiveStage) -> None:
        """Begin; return when a prompt's pieces are there or, of a text that comes, at once.

        Args:
            ar: Cuts the prompt, or each sentence.
        """
        # On its own: its end may be another process's or nobody's, and the request must not wait.
        task = asyncio.get_running_loop().create_task(
            self._run(ar), name=f"omnistage-text-{self._request_id}"
        )
        self._task = task
        if self._text is None and not self._asked.by_sentence:
            await asyncio.wait([task])

    def cancel(self) -> None:
        """Read no more. Idempotent."""
        self._cancelled = True
        if self._task is not None and not self._task.done():
            # Later: it may be the one that says so.
            asyncio.get_running_loop().call_soon(self._interrupt)

    async def aclose(self) -> None:
        """Return when the text's iterator is closed; :meth:`cancel` comes first.

        Raises:
            DeadlineExceeded: It does not let itself be closed.
        """
        if self._task is None:
            await self._close()
        elif self._task is not asyncio.current_task():
            done, _ = await asyncio.wait([self._task], timeout=_CLOSE_SECONDS)
            if not done:
                self._task.cancel()
                raise DeadlineExceeded(
                    f"the text's iterator did not let itself be closed in {_CLOSE_SECONDS:g} s",
                    request_id=self._request_id,
                )

    def _interrupt(self) -> None:
        if self._reading and self._task is not None:
            self._task.cancel()

    async def _run(self, ar: AutoregressiveStage) -> None:
        text = self._text
        if text is None and self._asked.by_sentence:
            text = _once(str(self._asked.prompt))
        try:
            self._reading = not self._cancelled
            if self._reading:
                await (self._cut_at_once(ar) if text is None else self._read(ar, text))
        except OmniStageError as error:
            self._on_failure(error)
        except asyncio.CancelledError as error:
            self._on_failure(_caused(ServerError("the text's reader was cancelled"), error))
        except Exception as error:
            log.exception("request %s could not be started", self._request_id)
            what = f"starting the request raised {type(error).__name__}: {error}"
            self._on_failure(_caused(ServerError(what), error))
        finally:
            self._reading = False
            await self._close()

    async def _cut_at_once(self, ar: AutoregressiveStage) -> None:
        self._add(await ar.split(self._asked), complete=True)

    async def _read(self, ar: AutoregressiveStage, text: AsyncIterable[str]) -> None:
        cutter = SentenceCutter()
        self._iterator = parts = aiter(text)
        while (part := await self._next(parts)) is not None:
            for start in range(0, len(part), _SLICE):
                for sentence in cutter.feed(part[start : start + _SLICE]):
                    self._add(await self._split(ar, sentence))
                    await self._wait_for_room()
        rest = cutter.flush()
        if not rest and not self._given:
            raise InvalidRequest("the text is empty; give at least one word", parameter="prompt")
        last = [piece for sentence in rest for piece in await self._split(ar, sentence)]
        self._add(last, complete=True)

    async def _wait_for_room(self) -> None:
        while len(self._waiting) >= _AHEAD:
            self._room.clear()
            await self._room.wait()

    async def _next(self, parts: AsyncIterator[str]) -> str | None:
        """The next part of the text; None at its end."""
        try:
            part = await anext(parts)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # we are cancelled, and not something that the iterator waited for
            raise ServerError("the text's iterator was cancelled") from error
        except Exception as error:
            raise ServerError(
                f"the text's iterator raised {type(error).__name__}: {error}"
            ) from error
        if self._cancelled:
            raise asyncio.CancelledError  # the iterator has swallowed it
        if not isinstance(part, str):
            raise InvalidRequest(
                f"a text comes in parts of str, got {type(part).__name__}", parameter="prompt"
            )
        return part

    async def _split(self, ar: AutoregressiveStage, sentence: str) -> Sequence[StageInput]:
        if not is_spoken(sentence):
            return ()
        return await ar.split(replace(self._asked, prompt=sentence, by_sentence=True))

    def _add(self, pieces: Sequence[StageInput], *, complete: bool = False) -> None:
        self._waiting.extend(pieces)
        self._given = self._given or bool(pieces)
        self._complete = complete
        if complete and not self._given:
            what = "the input adapter made no request of it; give at least one word"
            raise InvalidRequest(what, parameter="prompt")
        self._on_change()

    async def _close(self) -> None:
        """Close the iterator if it can be closed; nobody is there to hear what goes wrong."""
        iterator, self._iterator = self._iterator, None
        aclose = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        try:
            await aclose()
        except Exception:
            log.warning(
                "request %s: closing its text's iterator failed", self._request_id, exc_info=True
            )


async def _once(text: str) -> AsyncIterator[str]:
    yield text


def _caused(error: OmniStageError, cause: BaseException) -> OmniStageError:
    error.__cause__ = cause
    return error

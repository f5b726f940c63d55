"""A request's text while it is being written, for whoever reads it beside the audio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, Self

from omnistage.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from omnistage.errors import OmniStageError
    from omnistage.request import StageInput
    from omnistage.stages.base import AutoregressiveStage


class Text:
    """A submission's text so far; it is kept, so that each reader gets all of it at any time.

    It ends once: complete, or with what went wrong.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._is_written = False
        self._over = False
        self._error: OmniStageError | None = None
        self._news = asyncio.Event()

    def expect(self, ar: AutoregressiveStage, asked: StageInput) -> None:
        """Be written by the requests of a submission, if the AR stage has text.

        Raises:
            InvalidRequest: It has none, and nothing else was asked for.
        """
        self._is_written = getattr(ar, "has_text", False)
        if not self._is_written:
            self.close(ConfigError("the pipeline has no thinker, whose text this would be"))
            if not asked.wants_audio:
                raise InvalidRequest(
                    "the pipeline has no thinker that could answer in text alone",
                    parameter="modalities",
                )

    def part(self, *, last: bool) -> TextPart | None:
        """What the next request of the submission writes its text to, if it does."""
        return TextPart(self, last=last) if self._is_written else None

    def write(self, piece: str) -> None:
        """Add a piece."""
        if not self._over:
            self._pieces.append(piece)
            self._wake()

    def close(self, error: OmniStageError | None = None) -> None:
        """End it; what comes later is not heard."""
        if not self._over:
            self._over, self._error = True, error
            self._wake()

    async def piece(self, index: int) -> str | None:
        """A piece, as soon as it is there; None behind the last one.

        Raises:
            OmniStageError: There is no such piece, because of this.
        """
        while index >= len(self._pieces):
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            await self._news.wait()
        return self._pieces[index]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written."""
        return not self._pieces

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()  # readers wait for the one that they have found


class TextPart:
    """One request's share of a text; between two requests is a space, as in their usage."""

    def __init__(self, text: Text, *, last: bool) -> None:
        self._text = text
        self._last = last
        self._begun = False

    def write(self, piece: str) -> None:
        """Add a piece."""
        if not self._begun and not self._text.is_empty:
            piece = f" {piece}"
        self._begun = True
        self._text.write(piece)

    def end(self) -> None:
        """The request has written all; that of the last one is the end."""
        if self._last:
            self._text.close()


class Starts(Protocol):
    """A stream: entering it starts its request, once."""

    async def __aenter__(self) -> Self:
        """Start."""
        ...


class TextReader:
    """An async iterator over a text from its first piece on, that starts the request if need be.

    Args:
        stream: Whose text it is. Held, because a stream that nobody holds is aborted.
        text: The text.
    """

    def __init__(self, stream: Starts, text: Text) -> None:
        self._stream = stream
        self._text = text
        self._next = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        await self._stream.__aenter__()
        piece = await self._text.piece(self._next)
        if piece is None:
            raise StopAsyncIteration
        self._next += 1
        return piece

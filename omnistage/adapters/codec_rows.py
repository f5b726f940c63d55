"""Codec frames out of a model's rows, for models that predict all codebooks of a frame at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from omnistage.adapters.processor import Emission
from omnistage.errors import ConfigError
from omnistage.payload import numbers
from omnistage.request import FinishReason

if TYPE_CHECKING:
    from omnistage.adapters.processor import Step
    from omnistage.request import Payload, Start


class _Frames(msgspec.Struct):
    """A request's state.

    Args:
        first: Position of its first row that is a frame; None while its prompt is computed.
        next: Position of the row that is due, once the first is known.
        held: A frame that may be a stop id's.
    """

    first: int | None = None
    next: int = 0
    held: list[int] | None = None


class CodecRows(msgspec.Struct, frozen=True, kw_only=True):
    """Turns a model's rows, [rows, codebooks] of an integer dtype, into codec frames.

    Rows of a prompt are none. Of a request's N sampled ids, each has the frame that the model gives
    at one position:

    * ``of="sampled"``: a row is the frame of the id that was sampled from it, as where parallel
      heads, or a depth transformer in the same pass, predict the whole frame. The first is that of
      the prompt's last position, which comes with the first id; the row that a stop id was sampled
      from is no frame.
    * ``of="read"``: a row is the frame of the id that the model read there, as where a code
      predictor completes the last sampled codebook at the start of the next step. It comes a step
      later, and the last id, a stop id or not, has none.

    A frame with an index outside ``[0, codebook_size)`` is removed, and counted as one id.

    Args:
        codebooks: Indices a frame.
        codebook_size: Indices a codebook.
        key: The key of the rows.
        of: Which id a row is the frame of.
        end_ids: Ids that end a request; for ``of="sampled"``. Without them the latest frame waits
            for the next step, which shows that its id was no stop id; with them none waits, and one
            of an id that stops a request and is not among them is taken for audio.

    Raises:
        ConfigError: No codebooks, or nothing in them, or another ``of``.
    """

    codebooks: int
    codebook_size: int
    key: str = "codes"
    of: Literal["sampled", "read"] = "sampled"
    end_ids: frozenset[int] = frozenset()

    requires_token_updates = False  # each step that samples brings rows
    wants_payload = True

    def __post_init__(self) -> None:
        if self.codebooks < 1 or self.codebook_size < 1:
            raise ConfigError(
                "codec rows need codebooks >= 1 and codebook_size >= 1, got "
                f"{self.codebooks} and {self.codebook_size}"
            )
        if self.of not in ("sampled", "read"):
            raise ConfigError(f"codec rows are of 'sampled' or 'read' ids, got {self.of!r}")

    @property
    def payload_keys(self) -> tuple[str, ...]:
        """The keys that the model must give."""
        return (self.key,)

    @property
    def row_keys(self) -> tuple[str, ...]:
        """None of the rows are passed on."""
        return ()

    def open(self, request_id: str, start: Start) -> _Frames:
        """The state: where the frames begin, and one that waits."""
        return _Frames()

    def update(self, state: _Frames, step: Step) -> Emission | None:
        """The frames of a step, flat.

        Raises:
            ValueError: The rows are not what was declared, or some are missing.
        """
        rows = step.tensors.get(self.key)
        if rows is None:
            if step.ids:
                raise ValueError(f"a step sampled ids and brought no rows of {self.key!r}")
            return None
        end = rows.first_row + rows.shape[0]
        if state.first is None:
            if not step.ids:
                return None  # of a prompt whose end is not computed yet
            # The rows of a step end with the one that its last id was sampled from.
            sampled_from = end - step.position - len(step.ids)
            state.first = state.next = sampled_from + (self.of == "read")
        first, state.next = state.next, max(end, state.next)
        if rows.first_row > first:
            raise ValueError(f"rows {first} to {rows.first_row - 1} of {self.key!r} are missing")
        return self._emit(state, step, self._read(rows, first - rows.first_row), first)

    def finish(self, state: _Frames, reason: FinishReason) -> Emission | None:
        """The frame that waited, if its id was no stop id."""
        held, state.held = state.held, None
        if held is None:
            return None
        return Emission(dropped=1) if reason is FinishReason.STOP else self._checked([held])

    def _read(self, rows: Payload, start: int) -> list[list[int]]:
        """The frames from a row on."""
        array = numbers(rows)
        if array.ndim != 2 or array.shape[1] != self.codebooks or array.dtype.kind not in "iu":
            raise ValueError(
                f"rows of {self.key!r} are {rows.dtype} {list(rows.shape)}, expected integers "
                f"[rows, {self.codebooks}]"
            )
        frames: list[list[int]] = array[start:].tolist()
        return frames

    def _emit(
        self, state: _Frames, step: Step, frames: list[list[int]], first: int
    ) -> Emission | None:
        """Check frames, and hold back the one that may be a stop id's."""
        if self.of == "read" or state.first is None:
            return self._checked(frames)
        if self.end_ids:
            ids = step.ids[first - state.first - step.position :]
            kept = [f for f, i in zip(frames, ids, strict=True) if i not in self.end_ids]
            return self._checked(kept, dropped=len(frames) - len(kept))
        if state.held is not None:
            frames = [state.held, *frames]
        state.held = frames.pop() if frames else None
        return self._checked(frames)

    def _checked(self, frames: list[list[int]], dropped: int = 0) -> Emission | None:
        size = self.codebook_size
        kept = [frame for frame in frames if min(frame) >= 0 and max(frame) < size]
        dropped += len(frames) - len(kept)
        if not (kept or dropped):
            return None
        return Emission([index for frame in kept for index in frame], {}, dropped)

"""Cuts streams of frames into the windows a decoder needs and keeps the audio that is new.

The one place that knows about overlap, lookahead and the final flush; it knows no request and no
clock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from omnistage.decoders.base import Renderer, Rows
from omnistage.decoders.frames import FrameFormat, declared
from omnistage.errors import ConfigError, DecoderError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.decoders.base import AnyDecoder
    from omnistage.decoders.frames import Frames
    from omnistage.request import Pcm

_T = TypeVar("_T")
_SILENCE: Pcm = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one decode call does for one stream."""

    window: Frames  # [context + fresh + lookahead, ...]
    context: int
    fresh: int
    final: bool


class WindowedStream:
    """One request's frames between their arrival and their audio.

    Holds the decoder's left context and the pending frames, nothing older. Frames may be pushed in
    one thread while another decodes; a stream is decoded by one thread at a time.
    """

    def __init__(self, decoder: AnyDecoder, frames: FrameFormat, seed: int) -> None:
        self._decoder = decoder
        self._format = frames
        self._lock = threading.Lock()
        self._frames: Frames = frames.zeros(0)  # context, then pending
        self._context = 0
        self._decoded = 0
        self._samples = 0
        self._finished = False
        self._flushed = False
        self._no_rows: Rows | None = None
        self._audio: list[Pcm] = []
        self._error: DecoderError | None = None
        self._state: Any = decoder.open(seed) if isinstance(decoder, Renderer) else None

    @property
    def pending(self) -> int:
        """Frames pushed and not decoded yet, those that still serve as lookahead included."""
        return len(self._frames) - self._context

    @property
    def done(self) -> bool:
        """Whether no frames will come and all audio has been handed out."""
        return self._flushed and not self._audio

    def push(self, frames: Frames) -> None:
        """Take the stream's next frames.

        Args:
            frames: Codebook indices, [n, codebooks], or rows, [n, ...]; n may be 0.

        Raises:
            DecoderError: Wrong shape or dtype, an index out of range, or a finished stream.
        """
        checked = self._format.checked(frames)
        with self._lock:
            if self._finished:
                raise DecoderError("frames arrived after the stream was finished")
            self._frames = np.concatenate([self._frames, checked])

    def finish(self) -> None:
        """Say that no more frames will come; doing it twice is harmless."""
        with self._lock:
            self._finished = True
            # A renderer that has seen rows may hold samples back, so it needs one more call.
            self._flushed |= self.pending == 0 and (self._state is None or self._decoded == 0)

    def ready(self, size: int) -> bool:
        """Whether ``size`` new frames and their lookahead are there, or the end and work left."""
        with self._lock:
            if self._finished:
                return not self.done
            return self.pending >= max(size, 1) + self._decoder.right_context

    def _cut(self, size: int) -> _Piece:
        with self._lock:
            lookahead = self._decoder.right_context
            fresh = max(0, min(size, self.pending - (0 if self._finished else lookahead)))
            window = self._frames[: self._context + fresh + lookahead].copy()
            final = self._finished and fresh == self.pending
            return _Piece(window, self._context, fresh, final)

    def _advance(self, piece: _Piece) -> None:
        with self._lock:
            past = self._context + piece.fresh
            self._context = min(past, self._decoder.left_context)
            # Copied, so that the frames before it are freed.
            self._frames = self._frames[past - self._context :].copy()
            self._decoded += piece.fresh
            self._flushed |= piece.final

    def _render(self, rows: Rows | None, final: bool) -> None:
        decoder = self._decoder
        if isinstance(decoder, Renderer):
            new = self._no_rows if rows is None else rows
            if new is None:
                return
            self._no_rows = new[:0]
            pcm = _guard(decoder, lambda: decoder.render(self._state, new, final=final))
        elif rows is None:
            return
        else:
            pcm = rows
        _check_array(decoder, pcm, ndim=1)
        self._samples += len(pcm)
        expected = self._decoded * decoder.hop_length
        if self._samples > expected or (final and self._samples < expected):
            raise DecoderError(
                f"{_name(decoder)} made {self._samples} samples from {self._decoded} frames, "
                f"its hop length promises {expected}"
            )
        # Codecs overshoot full scale a little; Pcm promises [-1, 1].
        self._audio.append(np.clip(pcm, -1.0, 1.0))

    def _take(self) -> Pcm:
        audio, self._audio = self._audio, []
        return audio[0] if len(audio) == 1 else np.concatenate([_SILENCE, *audio])


class WindowedDecoder:
    """A decoder behind overlapping windows.

    Whatever the chunks and the batch mates, a stream's audio is that of its whole clip.

    Args:
        decoder: The decoder, perhaps a :class:`Renderer` too.

    Attributes:
        frames: The format of its frames.

    Raises:
        ConfigError: What the decoder declares cannot be.
    """

    def __init__(self, decoder: AnyDecoder) -> None:
        self.frames = FrameFormat(decoder)
        _check_declaration(decoder)
        self._decoder = decoder

    def open(self, seed: int = 0) -> WindowedStream:
        """A new stream; whatever is random in its audio comes from ``seed``."""
        return _guard(self._decoder, lambda: WindowedStream(self._decoder, self.frames, seed))

    def decode(self, batch: Sequence[tuple[WindowedStream, int]]) -> list[Pcm]:
        """Decode each stream's next frames, all in one call of the decoder.

        A stream gives at most the frames asked for and at most those whose lookahead is there; the
        call that takes a finished stream's last frame also flushes it.

        Args:
            batch: Different streams of this decoder, each with the most new frames to take.

        Returns:
            The samples that are now final, one array a stream, perhaps empty.

        Raises:
            DecoderError: The decoder failed or broke its declaration. Nothing is lost: each stream
                may be tried again on its own, and only the one at fault fails again.
        """
        streams = [stream for stream, _ in batch]
        if len({id(stream) for stream in streams}) != len(streams):
            raise DecoderError("a stream stands twice in one batch")
        for stream in streams:
            if stream._error is not None:
                raise stream._error
        pieces = [stream._cut(size) for stream, size in batch]
        fresh = iter(self._fresh_rows([piece for piece in pieces if piece.fresh]))
        errors = []
        for stream, piece in zip(streams, pieces, strict=True):
            stream._advance(piece)
            try:
                stream._render(next(fresh) if piece.fresh else None, piece.final)
            except DecoderError as error:
                stream._error = error
                errors.append(error)
        if errors:
            raise errors[0]
        return [stream._take() for stream in streams]

    def decode_clip(self, frames: Frames, seed: int = 0) -> Pcm:
        """The audio of a whole clip in one window, which is what streaming must equal.

        Args:
            frames: All of them, codes [frames, codebooks] or rows [frames, ...].
            seed: As in :meth:`open`.

        Returns:
            Samples [frames * hop_length].

        Raises:
            DecoderError: As in :meth:`WindowedStream.push` and :meth:`decode`.
        """
        stream = self.open(seed)
        stream.push(frames)
        stream.finish()
        return self.decode([(stream, len(frames))])[0]

    def _fresh_rows(self, pieces: list[_Piece]) -> list[Rows]:
        if not pieces:
            return []
        decoder = self._decoder
        results = _guard(decoder, lambda: list(decoder.decode([p.window for p in pieces])))
        if len(results) != len(pieces):
            raise DecoderError(
                f"{_name(decoder)} returned {len(results)} results for {len(pieces)} windows"
            )
        renders = isinstance(decoder, Renderer)
        scale = decoder.rows_per_frame if isinstance(decoder, Renderer) else decoder.hop_length
        fresh = []
        for piece, rows in zip(pieces, results, strict=True):
            _check_array(decoder, rows, ndim=None if renders else 1)
            if len(rows) != len(piece.window) * scale:
                raise DecoderError(
                    f"{_name(decoder)} returned {len(rows)} {'rows' if renders else 'samples'} for "
                    f"{len(piece.window)} frames, its declaration promises {scale} a frame"
                )
            fresh.append(rows[piece.context * scale : (piece.context + piece.fresh) * scale])
        return fresh


def _name(decoder: AnyDecoder) -> str:
    return f"decoder {type(decoder).__name__}"


def _guard(decoder: AnyDecoder, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except (DecoderError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Whatever it is: it must fail its streams, not the thread or the loop that called.
        try:
            what = repr(error)
        except Exception:
            what = type(error).__name__
        raise DecoderError(f"{_name(decoder)} failed: {what[:500]}") from error


def _check_array(decoder: AnyDecoder, array: object, ndim: int | None) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise DecoderError(f"{_name(decoder)} must return float32 numpy arrays, got {kind}")
    if array.ndim == 0 or ndim not in (None, array.ndim):
        raise DecoderError(f"{_name(decoder)} returned an array of shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise DecoderError(f"{_name(decoder)} returned samples that are not finite")


def _check_declaration(decoder: AnyDecoder) -> None:
    least = {"sample_rate": 1, "hop_length": 1, "left_context": 0, "right_context": 0}
    if isinstance(decoder, Renderer):
        least["rows_per_frame"] = 1
    for name, low in least.items():
        declared(decoder, name, low)
    if not callable(getattr(decoder, "decode", None)):
        raise ConfigError(f"{_name(decoder)} has no decode method")
    if not isinstance(getattr(decoder, "deterministic", None), bool):
        raise ConfigError(f"{_name(decoder)} must declare whether it is deterministic")

"""Cheap decoders with every kind of context, and ways to stream clips through them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from omnistage.decoders.window import WindowedDecoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omnistage.decoders.base import Decoder, Rows
    from omnistage.decoders.frames import Frames
    from omnistage.decoders.window import WindowedStream
    from omnistage.request import Codes, Pcm


class Mixer:
    """Each frame's samples are a weighted sum of its neighbours' patterns, zeros past the ends."""

    sample_rate = 8000
    deterministic = True

    def __init__(
        self,
        *,
        left: int = 3,
        right: int = 2,
        hop: int = 4,
        codebooks: int = 2,
        codebook_size: int = 16,
    ) -> None:
        self.left_context = left
        self.right_context = right
        self.hop_length = hop
        self.codebooks = codebooks
        self.codebook_size = codebook_size
        self.windows: list[int] = []  # the length of each window it was given
        self._reach = (left, right)
        rng = np.random.default_rng(0)
        self._patterns = rng.standard_normal((codebooks, codebook_size, hop)) / 50
        self._weights = rng.uniform(0.5, 1.0, left + 1 + right)

    def decode(self, windows: Sequence[Codes]) -> list[Rows]:
        self.windows += [len(window) for window in windows]
        return [self._mix(window) for window in windows]

    def _mix(self, window: Codes) -> Rows:
        pattern = sum(self._patterns[book][window[:, book]] for book in range(self.codebooks))
        padded = np.pad(pattern, (self._reach, (0, 0)))
        mixed = sum(
            weight * padded[at : at + len(window)] for at, weight in enumerate(self._weights)
        )
        return np.asarray(mixed, np.float32).reshape(-1)


class RowMixer:
    """As a :class:`Mixer`, of rows: each frame's samples are a weighted sum of rows around it."""

    sample_rate = 8000
    deterministic = True
    rows_key = "hidden"
    row_shape = (3, 2)
    hop_length = 6

    def __init__(self, *, left: int = 3, right: int = 2) -> None:
        self.left_context = left
        self.right_context = right
        self.windows: list[int] = []
        self.dtypes: set[np.dtype] = set()

    def decode(self, windows: Sequence[Rows]) -> list[Rows]:
        self.windows += [len(window) for window in windows]
        self.dtypes |= {window.dtype for window in windows}
        return [self._mix(window) for window in windows]

    def _mix(self, window: Rows) -> Rows:
        flat = window.reshape(len(window), -1) / 50
        padded = np.pad(flat, ((self.left_context, self.right_context), (0, 0)))
        reach = self.left_context + 1 + self.right_context
        mixed = sum(padded[at : at + len(window)] / (at + 1) for at in range(reach))
        return np.asarray(mixed, np.float32).reshape(-1)


@dataclass
class Oscillation:
    """A stream's phase, noise and the row that waits for the next one."""

    noise: np.random.Generator
    phase: float = 0.0
    rows: Rows = field(default_factory=lambda: np.zeros((0, 2), np.float32))


class Oscillator:
    """A renderer: frames give pitches, two rows each; a row sounds once the next one is known."""

    sample_rate = 8000
    hop_length = 8
    codebooks = 1
    codebook_size = 32
    left_context = 2
    right_context = 1
    deterministic = True
    rows_per_frame = 2

    def decode(self, windows: Sequence[Codes]) -> list[Rows]:
        rows = []
        for window in windows:
            padded = np.pad(window[:, 0].astype(np.float32), (2, 1))
            pitch = padded[:-3] / 8 + padded[1:-2] / 4 + padded[2:-1] / 2 + padded[3:] / 8
            rows.append(
                np.repeat(np.stack([pitch, pitch * 0.5], axis=1), 2, axis=0).astype(np.float32)
            )
        return rows

    def open(self, seed: int) -> Oscillation:
        return Oscillation(np.random.default_rng(seed))

    def render(self, state: Oscillation, rows: Rows, *, final: bool) -> Pcm:
        state.rows = np.concatenate([state.rows, rows])
        count = len(state.rows) if final else max(0, len(state.rows) - 1)
        known = np.concatenate([state.rows, state.rows[-1:]])
        steps = np.repeat((known[:count, 0] + known[1 : count + 1, 0]) / 2, 4) / 50
        phases = state.phase + np.cumsum(steps, dtype=np.float64)
        state.phase = float(phases[-1]) if count else state.phase
        state.rows = state.rows[count:]
        noise = state.noise.standard_normal(4 * count) / 100
        return (0.5 * np.sin(phases) + noise).astype(np.float32)


def random_rows(decoder: RowMixer, frames: int, seed: int = 0) -> Rows:
    """Rows of small numbers."""
    shape = (frames, *decoder.row_shape)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def random_codes(decoder: Decoder, frames: int, seed: int = 0) -> Codes:
    """Frames that use every index of the decoder's codebooks."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, decoder.codebook_size, (frames, decoder.codebooks))


@dataclass
class Clip:
    """A clip on its way through a stream."""

    codes: Frames
    stream: WindowedStream
    pieces: list[Pcm] = field(default_factory=list)
    pushed: int = 0
    ended: bool = False

    def push(self, frames: int) -> None:
        """Give the stream its next frames, and its end with the last."""
        if not self.ended:
            self.stream.push(self.codes[self.pushed : self.pushed + frames])
            self.pushed += frames
            self.ended = self.pushed >= len(self.codes)
        if self.ended:
            self.stream.finish()

    @property
    def audio(self) -> Pcm:
        return np.concatenate([np.zeros(0, np.float32), *self.pieces])


def stream_together(
    windowed: WindowedDecoder, clips: Sequence[Frames], draw: Iterator[int], most: int
) -> list[Pcm]:
    """Stream clips side by side; ``draw`` decides how much is pushed and decoded, and when.

    Returns:
        Each clip's audio. The k-th stream has seed k.
    """
    running = [Clip(codes, windowed.open(seed)) for seed, codes in enumerate(clips)]
    while not all(clip.stream.done for clip in running):
        for clip in running:
            clip.push(next(draw) % (most + 1))
        sizes = [(clip, 1 + next(draw) % most) for clip in running]
        batch = [(clip, size) for clip, size in sizes if clip.stream.ready(size)]
        for (clip, _), pcm in zip(
            batch, windowed.decode([(clip.stream, size) for clip, size in batch]), strict=True
        ):
            clip.pieces.append(pcm)
    return [clip.audio for clip in running]


def endless(seed: int) -> Iterator[int]:
    """Numbers for :func:`stream_together`."""
    rng = random.Random(seed)
    while True:
        yield rng.randrange(1 << 16)


def streaming_deviation(
    decoder: Decoder, lengths: Sequence[int], most: int = 9, seed: int = 0
) -> float:
    """How far the audio of clips streamed side by side is from that of whole clips.

    Args:
        decoder: Behind a window wrapper; it may declare less context than it needs.
        lengths: Frames of each clip.
        most: The most frames that are pushed or decoded at once.
        seed: Where codes, chunks and interleaving come from.

    Returns:
        The largest difference of two samples.
    """
    windowed = WindowedDecoder(decoder)
    clips = [random_codes(decoder, length, seed + k) for k, length in enumerate(lengths)]
    worst = 0.0
    for pcm, clip in zip(stream_together(windowed, clips, endless(seed), most), clips, strict=True):
        whole = windowed.decode_clip(clip)
        assert pcm.dtype == np.float32
        assert len(pcm) == len(whole) == len(clip) * decoder.hop_length
        worst = max(worst, float(np.abs(pcm - whole).max(initial=0.0)))
    return worst

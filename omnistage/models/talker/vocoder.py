"""The talker's vocoder: spectra and pitch, one row for 12.5 ms, to samples.

Plain numpy on one stream at a time; it knows no codes and no network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from omnistage.decoders.base import Rows
    from omnistage.request import Pcm

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

SAMPLE_RATE = 24000
ROW = 300
"""Samples of a row."""
BANDS = 56
"""Bands of the harmonic part, and as many of the noise."""
COLUMNS = 2 * BANDS + 1
"""What a row holds: log magnitudes of the harmonic bands, then of the noise, then pitch in Hz."""

_WINDOW = 1200
_BLOCKS = _WINDOW // ROW
_BINS = _WINDOW // 2 + 1
_LOWEST_PITCH = 40.0
_HIGHEST_HARMONIC = 11000.0


@dataclass(slots=True)
class VocoderState:
    """What a stream remembers: some rows, the oscillator's phase and the overlap of its windows.

    Attributes:
        noise: The source of the stream's noise.
        rows: Rows that no window has used.
        pitch: Pitch of the row before the next to be excited and of all later rows.
        phase: The oscillator's, in cycles.
        pulses: Excitation from the start of the next window on.
        overlap: Sum of the windows so far where later ones add to it, [_BLOCKS - 1, ROW].
        weight: Sum of the squared window there.
        skip: Blocks to leave out, since the first windows begin before the first sample.
    """

    noise: np.random.Generator
    rows: Array = field(default_factory=lambda: np.zeros((0, COLUMNS), np.float32))
    pitch: Doubles = field(default_factory=lambda: np.zeros(0))
    phase: float = 0.0
    pulses: Array = field(default_factory=lambda: np.zeros(_WINDOW // 2, np.float32))
    overlap: Array = field(default_factory=lambda: np.zeros((_BLOCKS - 1, ROW), np.float32))
    weight: Array = field(default_factory=lambda: np.zeros((_BLOCKS - 1, ROW), np.float32))
    skip: int = _BLOCKS // 2


class Vocoder:
    """A source and a filter: pulses shaped by the harmonic bands, noise by the others.

    Each row shapes one window of 50 ms around its start; windows overlap and add. Four rows are
    held back: half a window, and the row whose pitch the last pulses glide to. What comes out does
    not depend on how the rows are cut: noise is drawn value by value, the phase is kept in double
    precision, and the pulses are continuous in the pitch.
    """

    def __init__(self) -> None:
        self._window: Array = np.hanning(_WINDOW + 1)[:-1].astype(np.float32)
        self._basis = _band_basis()
        self._glide: Doubles = (np.arange(ROW) + 0.5) / ROW

    def open(self, seed: int) -> VocoderState:
        """A new stream's state; its noise comes from ``seed`` alone."""
        return VocoderState(noise=np.random.Generator(np.random.PCG64(seed)))

    def render(self, state: VocoderState, rows: Rows, *, final: bool) -> Pcm:
        """The samples that rows complete; over a whole stream ``ROW`` for each row.

        Args:
            state: The stream's, changed in place.
            rows: The next rows, [n, COLUMNS], perhaps none.
            final: Whether these are the last.
        """
        state.rows = np.concatenate([state.rows, rows])
        self._excite(state, rows[:, -1].astype(np.float64), final)
        available = max(0, len(state.pulses) - _WINDOW) // ROW + (len(state.pulses) >= _WINDOW)
        count = min(len(state.rows), available)
        blocks, weight = self._overlap_add(state, self._windows(state, count))
        state.rows = state.rows[count:].copy()
        state.pulses = state.pulses[count * ROW :].copy()
        # Of the three blocks that later windows would add to, two lie before the last row's end.
        done = count + (_BLOCKS // 2 if final else 0)
        skipped = min(state.skip, done)
        state.skip -= skipped
        state.overlap, state.weight = blocks[count:], weight[count:]
        audio: Pcm = blocks[skipped:done] / np.maximum(weight[skipped:done], np.float32(1e-3))
        return audio.reshape(-1)

    def _excite(self, state: VocoderState, pitch: Doubles, final: bool) -> None:
        """Add the pulses of every row whose next row's pitch is known."""
        known = [state.pitch, pitch]
        if len(pitch) and not len(state.pitch):
            known.insert(0, pitch[:1])
        if final:
            known.append(np.concatenate(known)[-1:])
        state.pitch = np.concatenate(known)
        count = len(state.pitch) - 2
        if count > 0:
            pulses = self._pulses(state, state.pitch[:-2], state.pitch[1:-1], state.pitch[2:])
            state.pulses = np.concatenate([state.pulses, pulses])
            state.pitch = state.pitch[count:]
        if final:
            state.pulses = np.concatenate([state.pulses, np.zeros(_WINDOW // 2, np.float32)])

    def _pulses(self, state: VocoderState, before: Doubles, at: Doubles, after: Doubles) -> Array:
        """Pulses of one row for each pitch in ``at``, gliding between the rows' centres."""
        half = ROW // 2
        rising, falling = self._glide[:half] + 0.5, self._glide[half:] - 0.5
        pitch = np.concatenate(
            [
                np.outer(before, 1 - rising) + np.outer(at, rising),
                np.outer(at, 1 - falling) + np.outer(after, falling),
            ],
            axis=1,
        ).reshape(-1)
        voiced = np.maximum(pitch, _LOWEST_PITCH)
        cycles = state.phase + np.cumsum(voiced) / SAMPLE_RATE
        state.phase = float(cycles[-1] % 1.0)
        angle = 2 * math.pi * (cycles % 1.0)
        # A sum of cosines up to the highest harmonic, in closed form. The harmonic that is about to
        # pass the limit fades, as does the voice at its lowest pitch: a step there would turn a
        # rounding difference of the network into an audible one.
        harmonics = np.floor(_HIGHEST_HARMONIC / voiced)
        fading = _HIGHEST_HARMONIC / voiced - harmonics
        half_sine = np.sin(angle / 2)
        at_peak = np.abs(half_sine) < 1e-9
        ratio = np.sin((harmonics + 0.5) * angle) / np.where(at_peak, 1.0, 2 * half_sine)
        total = np.where(at_peak, harmonics + 0.5, ratio) - 0.5
        total += fading * np.cos((harmonics + 1) * angle)
        total *= np.clip((pitch - _LOWEST_PITCH) / 8, 0.0, 1.0)
        return total.astype(np.float32)

    def _windows(self, state: VocoderState, count: int) -> Array:
        """The next windows of audio, [count, _WINDOW]."""
        if count == 0:
            return np.zeros((0, _WINDOW), np.float32)
        rows = state.rows[:count]
        pulses = sliding_window_view(state.pulses, _WINDOW)[::ROW][:count]
        voice = np.fft.rfft(pulses * (self._window * np.float32(4 / _WINDOW)))
        noise = state.noise.standard_normal((count, _BINS, 2), np.float32).view(np.complex64)
        spectrum = voice * np.exp(rows[:, :BANDS] @ self._basis)
        spectrum += noise[..., 0] * (
            np.exp(rows[:, BANDS : 2 * BANDS] @ self._basis) * np.float32(math.sqrt(0.5))
        )
        return (np.fft.irfft(spectrum, _WINDOW) * self._window).astype(np.float32)

    def _overlap_add(self, state: VocoderState, windows: Array) -> tuple[Array, Array]:
        """Blocks of ROW samples and of their weight, the carried overlap first."""
        count = len(windows)
        blocks = np.zeros((count + _BLOCKS - 1, ROW), np.float32)
        weight = np.zeros_like(blocks)
        blocks[: _BLOCKS - 1] = state.overlap
        weight[: _BLOCKS - 1] = state.weight
        parts = windows.reshape(count, _BLOCKS, ROW)
        squares = (self._window**2).reshape(_BLOCKS, ROW)
        for index in range(_BLOCKS):
            blocks[index : index + count] += parts[:, index]
            weight[index : index + count] += squares[index]
        return blocks, weight


def _band_basis() -> Array:
    """How much a band counts in a frequency bin, [BANDS, _BINS]: lines between mel centres."""
    low, high = (2595 * math.log10(1 + edge / 700) for edge in (40.0, 11800.0))
    centres = 700 * (10 ** (np.linspace(low, high, BANDS) / 2595) - 1)
    bins = np.arange(_BINS) * (SAMPLE_RATE / _WINDOW)
    return np.stack([np.interp(bins, centres, band) for band in np.eye(BANDS)]).astype(np.float32)

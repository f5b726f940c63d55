from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.models.talker.vocoder import BANDS, COLUMNS, ROW, SAMPLE_RATE, Array, Vocoder

VOCODER = Vocoder()
SILENT = -30.0


def steady(rows: int, *, pitch: float = 0.0, voice: float = SILENT, noise: float = SILENT) -> Array:
    """Rows of one pitch and flat spectra, [rows, COLUMNS]; levels are natural logarithms."""
    made = np.empty((rows, COLUMNS), np.float32)
    made[:, :BANDS], made[:, BANDS:-1], made[:, -1] = voice, noise, pitch
    return made


def render(rows: Array, *cuts: int, seed: int = 0) -> Array:
    state = VOCODER.open(seed)
    edges = [0, *cuts, len(rows)]
    parts = [
        VOCODER.render(state, rows[start:end], final=k == len(cuts))
        for k, (start, end) in enumerate(pairwise(edges))
    ]
    return np.concatenate(parts)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    seed=st.integers(0, 10**6),
)
def test_any_cut_gives_the_same_samples(rows: int, cuts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = rng.normal(-3, 1, (rows, COLUMNS)).astype(np.float32)
    made[:, -1] = np.where(rng.random(rows) < 0.3, 0, rng.uniform(60, 400, rows))
    pieces = sorted(min(cut, rows) for cut in cuts)
    whole = render(made, seed=seed)
    assert whole.shape == (rows * ROW,)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(render(made, *pieces, seed=seed), whole, atol=1e-5)


def test_four_rows_are_held_back() -> None:
    state = VOCODER.open(0)
    made = steady(20, pitch=200, voice=0)
    counts = [len(VOCODER.render(state, made[k : k + 1], final=False)) for k in range(20)]
    assert counts == [0] * 4 + [ROW] * 16
    assert len(VOCODER.render(state, made[:0], final=True)) == 4 * ROW


def test_a_voice_has_its_pitch_and_the_harmonics_below_the_limit() -> None:
    audio = render(steady(80, pitch=250, voice=0))[4800:19200]
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    hertz = np.fft.rfftfreq(len(audio), 1 / SAMPLE_RATE)
    peaks = hertz[spectrum > spectrum.max() / 4]
    np.testing.assert_allclose(peaks / 250, np.round(peaks / 250), atol=0.02)
    assert peaks.max() == pytest.approx(10750, abs=300)


def test_without_pitch_there_is_noise_alone() -> None:
    assert np.abs(render(steady(20, voice=0))).max() < 1e-6
    hiss = render(steady(400, noise=0))
    spectrum = np.abs(np.fft.rfft(hiss[: 400 * ROW].reshape(-1, 2400), axis=1)).mean(0)[5:1180]
    assert spectrum.std() / spectrum.mean() < 0.2


def test_a_step_of_the_pitch_by_one_rounding_error_is_not_heard() -> None:
    made = steady(60, pitch=220, voice=0)
    made[:, -1] += np.random.default_rng(0).uniform(-100, 100, 60).astype(np.float32)
    nudged = made.copy()
    nudged[:, -1] = np.nextafter(made[:, -1], np.float32(1e9))
    level = np.abs(render(made)).max()
    assert np.abs(render(nudged) - render(made)).max() / level < 1e-2


@pytest.mark.parametrize("pitch", [0.0, 30.0, 40.0, 11_000.0, 1e6])
def test_no_pitch_breaks_it(pitch: float) -> None:
    assert np.isfinite(render(steady(10, pitch=pitch, voice=0, noise=-3))).all()

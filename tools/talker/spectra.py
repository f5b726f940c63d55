"""The teacher's spectra as rows of the talker's vocoder: bands of voice and noise, and pitch."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from omnistage.models.talker import vocoder

FLOOR = -9.0
"""Log magnitude of a band in which nothing is."""
LOWEST_PITCH = 60.0
"""Below it, in Hz, a row counts as voiceless."""

_LOUDEST = 7.0  # hibari cuts its log magnitudes there
_TINY = 1e-12

Floats = npt.NDArray[np.float32]


def bands(spectra: list[Floats], pitch: Floats) -> tuple[Floats, Floats]:
    """Reduce one utterance's spectra to bands that hold the same energy.

    hibari makes a bin of ``exp(voice) * pulses + exp(noise) * z + exp(free) * unit``, where z has
    two real normal parts; the vocoder's noise has the power of one.

    Args:
        spectra: Log magnitudes of voice, noise and the part of free phase, each [bins, rows].
        pitch: In Hz, [rows].

    Returns:
        The bands, [rows, 2 * BANDS], voice first; and the pitch, zero where there is no voice.
    """
    voice, noise, free = (np.exp(2 * np.minimum(part, _LOUDEST)) for part in spectra)
    pulses = _pulses(pitch)
    basis = vocoder._band_basis()
    harmonic = (basis @ (voice * pulses)) / (basis @ pulses)
    breath = (basis @ (2 * noise + free)) / basis.sum(1, keepdims=True)
    rows = 0.5 * np.log(np.concatenate([harmonic, breath]).T + _TINY)
    voiced = pitch > LOWEST_PITCH
    rows[~voiced, : vocoder.BANDS] = FLOOR
    return np.maximum(rows, FLOOR).astype(np.float32), np.where(voiced, pitch, 0).astype(np.float32)


def _pulses(pitch: Floats) -> Floats:
    """Power of the pulse train that the teacher filters, [bins, rows]."""
    dsp: Any = importlib.import_module("hibari.dsp")
    spectrum = dsp.stft(dsp.pulses(pitch), len(pitch))
    power: Floats = spectrum.real**2 + spectrum.imag**2 + np.float32(_TINY)
    return power

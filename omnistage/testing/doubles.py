"""A decoder whose audio says what it decoded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omnistage.request import AudioChunk, Codes, Pcm

_MAX_CODEBOOK: Final = 1 << 20  # float32 tells that many levels apart


class FakeDecoder:
    """Writes each index into the samples of its frame; :meth:`indices` reads them back.

    Args:
        codebook_size: Every index is below it; at most 2**20.
        codebooks: Indices a frame.
        sample_rate: Samples a second.
        repeat: Samples an index, so that a frame has ``codebooks * repeat``.
        seconds: Time that a decode takes, whatever the number of streams.
        fails_on: An index that makes a decode of it raise RuntimeError.

    Raises:
        ValueError: A codebook too large to be told apart.
    """

    left_context = 0
    right_context = 0
    deterministic = True

    def __init__(
        self,
        *,
        codebook_size: int = 65_536,
        codebooks: int = 1,
        sample_rate: int = 24_000,
        repeat: int = 4,
        seconds: float = 0.0,
        fails_on: int | None = None,
    ) -> None:
        if not 1 <= codebook_size <= _MAX_CODEBOOK:
            raise ValueError(f"codebook_size must be 1 to {_MAX_CODEBOOK}, got {codebook_size}")
        self.codebook_size = codebook_size
        self.codebooks = codebooks
        self.sample_rate = sample_rate
        self.hop_length = codebooks * repeat
        self._repeat = repeat
        self._seconds = seconds
        self._fails_on = fails_on

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        """Samples of [frames, codebooks] windows, each float32 [frames * hop_length]."""
        if self._seconds:
            time.sleep(self._seconds)
        if self._fails_on is not None and any((w == self._fails_on).any() for w in windows):
            raise RuntimeError(f"index {self._fails_on}")
        return [
            np.repeat(w.reshape(-1) / self.codebook_size, self._repeat).astype(np.float32)
            for w in windows
        ]

    def indices(self, chunks: Iterable[AudioChunk | Pcm]) -> list[int]:
        """The indices in chunks, or in arrays, of this decoder's audio, frame after frame."""
        pieces = [np.asarray(getattr(chunk, "pcm", chunk)) for chunk in chunks]
        pcm = np.concatenate([np.zeros(0, np.float32), *pieces])
        return [int(i) for i in np.rint(pcm[:: self._repeat] * self.codebook_size)]

"""The teacher's speech in memory, and random windows of it for the codec's training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from omnistage.models.talker.layout import read_layout
from tools.talker import teacher
from tools.talker.network import UNKNOWN_PHONE
from tools.talker.settings import SEED, StageError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from torch import Tensor

    from tools.talker.settings import Run

QUIET = -6.0
"""Log magnitude below which the codec tells no difference."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A batch of windows, each from one utterance.

    Attributes:
        bands: [batch, 2 * frames, 2 * BANDS].
        pitch: [batch, 2 * frames].
        phones: [batch, frames].
        codes: [batch, frames]; zeros where the speech has none yet.
        inside: [batch, frames, 1]; 0 past an utterance's end.
        counted: [batch, frames]; 0 also at a start that is none of the utterance's.
    """

    bands: Tensor
    pitch: Tensor
    phones: Tensor
    codes: Tensor
    inside: Tensor
    counted: Tensor


def shards(run: Run, most: int | None = None) -> list[Path]:
    """What the teacher has said, in the corpus's order.

    Args:
        run: The run.
        most: Only the first so many shards.

    Raises:
        StageError: It has not said all of that yet.
    """
    texts = len(run.corpus.read_text().splitlines()) if run.corpus.exists() else 0
    paths = teacher.shards(run, texts)[:most]
    if not paths or not all(path.exists() for path in paths):
        raise StageError("the teacher has not said everything yet: run the stage `teacher` first")
    return paths


class Speech:
    """Utterances, one behind the other.

    Args:
        paths: The teacher's shards.
        device: Where to keep it.
        codes: The codes of these frames, and perhaps of more, if they are known already.
    """

    def __init__(
        self,
        paths: list[Path],
        device: torch.device,
        codes: npt.NDArray[np.int16] | None = None,
    ) -> None:
        first = read_layout().first_phone
        bands, pitch, phones, lengths = [], [], [], []
        for path in paths:
            for said in teacher.read(path):
                bands.append(said.bands)
                pitch.append(said.pitch)
                # A word's index is silence, phone 0.
                phones.append(np.repeat(np.maximum(said.units - first, 0), said.frames))
                lengths.append(int(said.frames.sum()))
        self.bands = torch.from_numpy(np.concatenate(bands)).to(device)
        self.pitch = torch.from_numpy(np.concatenate(pitch)).to(device)
        self.phones = torch.from_numpy(np.concatenate(phones).astype(np.int64)).to(device)
        if codes is None:
            self.codes = torch.zeros_like(self.phones)
        else:
            self.codes = torch.from_numpy(codes[: len(self.phones)].astype(np.int64)).to(device)
        self.ends = np.cumsum(np.asarray(lengths, np.int64))
        self.starts = self.ends - np.asarray(lengths, np.int64)

    @property
    def hours(self) -> float:
        """How much there is."""
        return float(self.ends[-1]) / 40 / 3600

    def windows(
        self, step: int, *, count: int, frames: int, lead: int, hidden: float, among: slice
    ) -> Windows:
        """Random windows, the same for the same step.

        A third begin where their utterance begins and a third end where it ends, since the decoder
        meets both with nothing beyond them.

        Args:
            step: What the choice depends on, besides the arguments.
            count: How many.
            frames: Their length; a shorter utterance is followed by zeros.
            lead: Frames that do not count at a start amid an utterance.
            hidden: Part of the windows whose phones are not told.
            among: The utterances to choose from.
        """
        rng = np.random.default_rng((SEED, step))
        starts, ends = self.starts[among], self.ends[among]
        # By frame, so that a long utterance comes as much more often as it is longer.
        which = np.searchsorted(ends, rng.integers(starts[0], ends[-1], count), side="right")
        first, last = starts[which], ends[which]
        latest: npt.NDArray[np.int64] = np.maximum(first, last - frames)
        start = np.choose(
            rng.integers(3, size=count), [first, latest, rng.integers(first, latest + 1)]
        )
        unknown = rng.random(count) < hidden
        at = start[:, None] + np.arange(frames)
        inside = at < last[:, None]
        counted = inside & ((at >= start[:, None] + lead) | (start == first)[:, None])
        place = self.bands.device
        index = torch.from_numpy(np.minimum(at, last[:, None] - 1)).to(place)
        rows = torch.stack([2 * index, 2 * index + 1], -1).flatten(1)
        within = torch.from_numpy(inside).to(place)
        of_rows = within.repeat_interleave(2, dim=1)
        bands = self.bands[rows].float().clamp(min=QUIET)
        phones = self.phones[index].masked_fill(
            torch.from_numpy(unknown).to(place)[:, None], UNKNOWN_PHONE
        )
        return Windows(
            bands.masked_fill(~of_rows[..., None], QUIET),
            self.pitch[rows].float() * of_rows,
            phones * within,
            self.codes[index] * within,
            within[..., None].float(),
            torch.from_numpy(counted).to(place).float(),
        )

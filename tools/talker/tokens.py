"""The teacher's speech as the talker's ids: units and, behind each, the codes of its frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from omnistage.models.talker.layout import read_layout
from tools.talker import teacher, training
from tools.talker.network import load_codec
from tools.talker.settings import StageError, written
from tools.talker.speech import QUIET, shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from omnistage.models.talker.layout import Layout
    from tools.talker.network import Codec
    from tools.talker.settings import Run

Ids = npt.NDArray[np.int16]

_BATCH = 32
_SILENCE_AFTER = 8  # rows that the encoder sees behind an utterance, as in its training


@dataclass(frozen=True, slots=True)
class Sequence:
    """One utterance as the talker sees it.

    Attributes:
        ids: Prompt and output.
        prompt: How many of them are the prompt.
    """

    ids: Ids
    prompt: int


def make(run: Run) -> None:
    """Encode all speech and write the ids.

    Raises:
        StageError: The codec is not trained.
    """
    if _path(run).exists():
        return run.log("tokens", f"{_path(run)} is there already")
    layout, device = read_layout(), training.device()
    codec = load_codec(run).to(device)
    used = torch.zeros(layout.codes, dtype=torch.long)
    ids, prompts, lengths, codes = [], [], [], []
    for path in shards(run):
        spoken = list(teacher.read(path))
        for said, code in zip(spoken, _encode(codec, spoken, device), strict=True):
            used += torch.bincount(torch.from_numpy(code), minlength=layout.codes)
            sequence = lay_out(layout, said.units, said.frames, code)
            ids.append(sequence.ids)
            prompts.append(sequence.prompt)
            lengths.append(len(sequence.ids))
            codes.append(code.astype(np.int16))
    with written(_path(run)) as draft, draft.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate(ids),
            prompts=np.asarray(prompts),
            lengths=np.asarray(lengths),
            codes=np.concatenate(codes),
        )
    share = used[used > 0] / used.sum()
    run.log(
        "tokens",
        f"{len(ids)} utterances, {sum(lengths)} ids, {sum(prompts)} of them in prompts; "
        f"{len(share)} codes used, entropy {-(share * share.log2()).sum().item():.2f} bits",
    )


def lay_out(
    layout: Layout,
    units: npt.NDArray[np.int16],
    frames: npt.NDArray[np.int16],
    codes: npt.NDArray[np.int64],
) -> Sequence:
    """The ids of one utterance: its units as the prompt, then each unit with its codes."""
    ids, at = [layout.bos, *units.tolist(), layout.audio], 0
    for unit, count in zip(units.tolist(), frames.tolist(), strict=True):
        ids.append(unit)
        ids += (codes[at : at + count] + layout.first_code).tolist()
        at += count
    return Sequence(np.asarray([*ids, layout.eos], np.int16), len(units) + 2)


def read(run: Run) -> list[Sequence]:
    """All utterances, in the corpus's order.

    Raises:
        StageError: They are not made.
    """
    file = _read(run)
    ends = np.cumsum(file["lengths"])
    return [
        Sequence(ids, int(prompt))
        for ids, prompt in zip(np.split(file["ids"], ends[:-1]), file["prompts"], strict=True)
    ]


def read_codes(run: Run) -> npt.NDArray[np.int16]:
    """Every frame's code, the utterances one behind the other.

    Raises:
        StageError: They are not made.
    """
    return _read(run)["codes"]


def _path(run: Run) -> Path:
    return run.folder / "tokens.npz"


def _read(run: Run) -> dict[str, npt.NDArray[np.int16]]:
    if not _path(run).exists():
        raise StageError("there are no ids yet: run the stage `tokens` first")
    with np.load(_path(run)) as file:
        return {name: file[name] for name in file.files}


def _encode(
    codec: Codec, spoken: list[teacher.Utterance], device: torch.device
) -> Iterator[npt.NDArray[np.int64]]:
    """Each frame's code, utterance by utterance."""
    for start in range(0, len(spoken), _BATCH):
        batch = spoken[start : start + _BATCH]
        features = [_features(codec, said, device) for said in batch]
        silence = features[0].new_zeros(_SILENCE_AFTER, features[0].shape[1])
        padded = pad_sequence([torch.cat([one, silence]) for one in features], batch_first=True)
        with torch.inference_mode():
            codes = codec.enc.codes(padded).cpu().numpy()
        for row, said in zip(codes, batch, strict=True):
            yield row[: len(said.pitch) // 2]


def _features(codec: Codec, said: teacher.Utterance, device: torch.device) -> Tensor:
    bands = torch.from_numpy(said.bands).to(device).float().clamp(min=QUIET)
    features: Tensor = codec.st(bands, torch.from_numpy(said.pitch).to(device).float())
    return features

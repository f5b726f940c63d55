"""The teacher speaks the corpus: hibari's spectra, and which phone each 25 ms belong to.

Shards of a few hundred utterances, each written whole by a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import math
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from omnistage.errors import InvalidRequest
from omnistage.models.talker.layout import read_layout
from omnistage.models.talker.text import TextStep
from tools.talker import spectra
from tools.talker.settings import StageError, written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.talker.settings import Run

FRAMES_BEFORE = 3
"""Frames of silence left before the first phone; the teacher's own silence is longer."""
FRAMES_AFTER = 2
_ROWS = 2  # of a frame
_MOST_WORDS = 24  # a text whose numbers read longer than this is left out
_DURATIONS = "/Clip_output_0"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """What the teacher said.

    Args:
        text: The text.
        units: Its words' and phones' ids, as a prompt lists them.
        frames: How many frames each unit lasts.
        bands: The vocoder's bands, [2 * frames, 2 * BANDS].
        pitch: In Hz, zero without voice, [2 * frames].
    """

    text: str
    units: npt.NDArray[np.int16]
    frames: npt.NDArray[np.int16]
    bands: npt.NDArray[np.float16]
    pitch: npt.NDArray[np.float16]


class Teacher:
    """hibari's network, with the durations that it keeps to itself.

    Raises:
        StageError: hibari is another one than this was written for.
    """

    def __init__(self) -> None:
        runtime: Any = importlib.import_module("onnxruntime")
        assets = Path(str(importlib.import_module("hibari").__file__)).parent / "assets"
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = runtime.InferenceSession(
                (assets / "hibari.onnx").read_bytes() + _also_output(_DURATIONS),
                options,
                providers=["CPUExecutionProvider"],
            )
        except Exception as error:
            raise StageError(f"this knows the network of hibari-tts 0.2.1: {error}") from error
        self._characters = json.loads((assets / "vocab.json").read_text())
        self._layout = read_layout()
        self._text = TextStep(self._layout)

    def speak(self, text: str) -> Utterance | None:
        """Say a text; None for one that cannot be said or is too long."""
        layout = self._layout
        try:
            units = self._text.prompt_ids(text)[1:-1]
        except InvalidRequest:
            return None
        if sum(unit < layout.first_phone for unit in units) > _MOST_WORDS:
            return None
        # A word's index is the space before it; the first word has the silence at the start.
        names = [
            layout.phones[unit - layout.first_phone] if unit >= layout.first_phone else " "
            for unit in units
        ][1:]
        ids = [0, *(self._characters[character] for name in names for character in name), 0]
        voice, _, noise, free, _, pitch, durations = self._session.run(
            None, {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
        )
        frames, start = _frames_of_units(durations.reshape(-1).astype(int), names)
        rows = slice(_ROWS * start, _ROWS * (start + frames.sum()))
        bands, hertz = spectra.bands([voice[0], noise[0], free[0]], pitch[0])
        return Utterance(
            text=text,
            units=np.asarray(units, np.int16),
            frames=frames.astype(np.int16),
            bands=bands[rows].astype(np.float16),
            pitch=hertz[rows].astype(np.float16),
        )


def speak(run: Run) -> None:
    """Speak what no shard has yet.

    Raises:
        StageError: There is no corpus, or another hibari than this was written for.
    """
    if not run.corpus.exists():
        raise StageError("there is no corpus yet: run the stage `corpus` first")
    texts, size = run.corpus.read_text().splitlines(), run.settings.shard
    jobs = [
        (path, texts[index * size : (index + 1) * size])
        for index, path in enumerate(shards(run, len(texts)))
        if not path.exists()
    ]
    if not jobs:
        return run.log("teacher", f"all shards are in {run.shards} already")
    Teacher()
    began, frames = time.monotonic(), 0
    # Forking would copy the threads' locks of the libraries that are loaded here.
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, len(jobs)),
        multiprocessing.get_context("spawn"),
        _die_with_the_parent,
    ) as pool:
        spoken = [pool.submit(_shard, path, part) for path, part in jobs]
        for done, future in enumerate(as_completed(spoken), 1):
            frames += future.result()
            if done % 10 == 0 or done == len(jobs):
                hours, elapsed = frames / 40 / 3600, time.monotonic() - began
                run.log("teacher", f"{done}/{len(jobs)} shards, {hours:.2f} h, {elapsed:.0f} s")


def shards(run: Run, texts: int) -> list[Path]:
    """Where the speech of so many texts is or will be."""
    count = math.ceil(texts / run.settings.shard)
    return [run.shards / f"{index:04d}.npz" for index in range(count)]


def read(path: Path) -> Iterator[Utterance]:
    """The utterances of a shard."""
    with np.load(path) as file:
        shard = {name: file[name] for name in file.files}
    unit = frame = 0
    for text, count in zip(shard["texts"], shard["counts"], strict=True):
        frames = shard["frames"][unit : unit + count]
        rows = slice(_ROWS * frame, _ROWS * (frame + int(frames.sum())))
        yield Utterance(
            text=str(text),
            units=shard["units"][unit : unit + count],
            frames=frames,
            bands=shard["bands"][rows],
            pitch=shard["pitch"][rows],
        )
        unit += count
        frame += int(frames.sum())


def _shard(path: Path, texts: list[str]) -> int:
    """Speak a shard in a process of its own; returns its frames."""
    logging.getLogger("omnistage").setLevel(logging.ERROR)  # warns of each long text
    teacher = _teacher()
    said = [utterance for text in texts if (utterance := teacher.speak(text))]
    with written(path) as draft, draft.open("wb") as file:
        np.savez(
            file,
            texts=np.asarray([utterance.text for utterance in said]),
            counts=np.asarray([len(utterance.units) for utterance in said], np.int32),
            units=np.concatenate([utterance.units for utterance in said]),
            frames=np.concatenate([utterance.frames for utterance in said]),
            bands=np.concatenate([utterance.bands for utterance in said]),
            pitch=np.concatenate([utterance.pitch for utterance in said]),
        )
    return sum(int(utterance.frames.sum()) for utterance in said)


def _die_with_the_parent() -> None:
    """A worker that outlived a killed stage would wait for work for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_loaded: list[Teacher] = []


def _teacher() -> Teacher:
    if not _loaded:
        _loaded.append(Teacher())
    return _loaded[0]


def _frames_of_units(
    durations: npt.NDArray[np.int_], names: list[str]
) -> tuple[npt.NDArray[np.int_], int]:
    """Each unit's frames, the first word's index before them, and how many frames to skip."""
    skipped = max(0, int(durations[0]) - FRAMES_BEFORE)
    frames, at = [int(durations[0]) - skipped], 1
    for name in names:
        frames.append(int(durations[at : at + len(name)].sum()))
        at += len(name)
    frames[-1] += min(FRAMES_AFTER, int(durations[at]))
    return np.asarray(frames), skipped


def _also_output(tensor: str) -> bytes:
    """What to append to an ONNX file so that an inner tensor of floats becomes an output.

    In the protobuf encoding a message that occurs twice is merged, and ONNX's field 7 is the graph,
    12 in it an output, with 1 its name and 2 its type; that saves the onnx package.
    """

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    element_is_float = bytes([1 << 3, 1])
    value = field(1, tensor.encode()) + field(2, field(1, element_is_float))
    return field(7, field(12, value))

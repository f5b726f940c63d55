"""``omnistage speak`` to its end: the file it writes and what it says about it."""

from __future__ import annotations

import json
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from omnistage.request import Pcm
from tests.cli.sandbox import COMMAND, Done, Sandbox

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

TEXT = "The kettle is boiling."


class Spoken(NamedTuple):
    """One run of the command."""

    sandbox: Sandbox
    done: Done

    @property
    def wav(self) -> Path:
        return self.sandbox.output / "out.wav"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Spoken, Spoken]:
    """The same text and seed as an argument with ``--json``, and from standard input without."""
    boxes = [Sandbox(tmp_path_factory.mktemp("speak")) for _ in range(2)]
    options = ("-o", "out.wav", "--seed", "7")
    with ThreadPoolExecutor() as pool:
        drawn = ("--json", "--timeline", "when.png")
        first = pool.submit(boxes[0].run, COMMAND, "speak", TEXT, *options, *drawn)
        second = pool.submit(boxes[1].run, COMMAND, "speak", "-", *options, stdin=f"{TEXT}\n")
        return Spoken(boxes[0], first.result()), Spoken(boxes[1], second.result())


def read(path: Path) -> tuple[int, Pcm]:
    """A mono 16-bit wav's rate and samples."""
    with wave.open(str(path)) as wav:
        assert (wav.getnchannels(), wav.getsampwidth()) == (1, 2)
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2")
        return wav.getframerate(), samples.astype(np.float32) / np.float32(32767)


def voiced_share(pcm: Pcm, rate: int) -> float:
    """Of the frames of 40 ms that are not silent, those that repeat themselves at a voice's pitch.

    White noise has 0 and a steady vowel 1.
    """
    frames = pcm[: len(pcm) // 960 * 960].reshape(-1, 960)
    loud = frames[np.sqrt((frames**2).mean(axis=1)) > 0.01]
    lags = range(rate // 400, rate // 90)
    best = [
        max(float(np.corrcoef(frame[lag:], frame[:-lag])[0, 1]) for lag in lags) for frame in loud
    ]
    return float(np.mean(np.array(best) > 0.6))


def test_both_succeed(runs: tuple[Spoken, Spoken]) -> None:
    assert [run.done.code for run in runs] == [0, 0]


def test_the_file_is_24_khz_mono_and_sounds_like_speech(runs: tuple[Spoken, Spoken]) -> None:
    rate, pcm = read(runs[0].wav)
    assert rate == 24_000
    assert 1.0 < len(pcm) / rate < 3.0
    assert 0.02 < float(np.sqrt(np.mean(pcm**2))) < 0.3
    assert 0.3 < voiced_share(pcm, rate) < 0.98
    noise = np.random.default_rng(0).normal(0, 0.1, len(pcm)).astype(np.float32)
    assert voiced_share(noise, rate) < 0.1


def test_json_describes_the_file_on_one_line(runs: tuple[Spoken, Spoken]) -> None:
    done = runs[0].done
    assert done.stdout.count("\n") == 1
    said: dict[str, Any] = json.loads(done.stdout)
    assert set(said) == {
        "output",
        "prompt_tokens",
        "output_tokens",
        "finish_reason",
        "audio_seconds",
        "start_seconds",
        "first_audio_seconds",
        "slack_seconds",
        "total_seconds",
        "real_time_factor",
    }
    rate, pcm = read(runs[0].wav)
    assert said["output"] == "out.wav"
    assert said["audio_seconds"] == pytest.approx(len(pcm) / rate, abs=1e-3)
    assert said["finish_reason"] == "stop"
    assert said["prompt_tokens"] > 10
    # One code makes 25 ms; markers and the end come on top.
    assert said["output_tokens"] > len(pcm) / 600
    assert 0 < said["first_audio_seconds"] <= said["total_seconds"]
    assert said["real_time_factor"] == pytest.approx(
        said["total_seconds"] / said["audio_seconds"], rel=0.02
    )


def test_without_json_there_is_one_sentence_on_standard_error(runs: tuple[Spoken, Spoken]) -> None:
    done = runs[1].done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("out.wav: ")
    for words in ("s of audio", "tokens", "first audio after", "real-time factor", "ready after"):
        assert words in done.stderr


def test_one_seed_makes_the_same_speech_again(runs: tuple[Spoken, Spoken]) -> None:
    assert runs[0].wav.read_bytes() == runs[1].wav.read_bytes()


def test_nothing_is_left_but_the_file(runs: tuple[Spoken, Spoken]) -> None:
    for run, files in zip(runs, (["out.wav", "when.png"], ["out.wav"]), strict=True):
        assert run.sandbox.leftovers() == []
        assert sorted(path.name for path in run.sandbox.output.iterdir()) == files


def test_the_timeline_is_a_picture(runs: tuple[Spoken, Spoken]) -> None:
    picture = (runs[0].sandbox.output / "when.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.slow
def test_a_picture_that_cannot_be_drawn_ends_with_1_and_leaves_the_wav(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sandbox = Sandbox(tmp_path_factory.mktemp("full"))
    (sandbox.output / "full.png").symlink_to("/dev/full")
    text = "It costs $5, not $6."
    options = ("-o", "[red]out.wav", "--timeline", "full.png", "--json")
    done = sandbox.run(COMMAND, "speak", text, *options)
    assert done.code == 1
    assert done.stderr == (
        "error: full.png could not be drawn: [Errno 28] No space left on device\n"
    )
    assert json.loads(done.stdout)["output"] == "[red]out.wav"
    assert read(sandbox.output / "[red]out.wav")[0] == 24_000

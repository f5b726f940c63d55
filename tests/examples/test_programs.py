"""The programs that users read first, run as they are: the examples and the README's ten lines."""

from __future__ import annotations

import itertools
import random
import re
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import custom_decoder, in_app, thinker_talker
from omnistage.decoders.base import Decoder
from omnistage.decoders.window import WindowedDecoder
from omnistage.models.talker.layout import read_layout
from omnistage.models.talker.text import TRAINED_WORDS
from tests.cli.sandbox import Done, Sandbox
from tests.decoders.factories import random_codes, stream_together
from tests.examples.documents import ROOT, python_blocks

EXAMPLES = ROOT / "examples"
# A program as it stands, except that vLLM is forked: that takes a third of the time, and in_app.py
# shows the other way.
FORKED = """
import dataclasses, runpy, sys
from omnistage import models
load = models.load_preset
def forked(name, /, **changes):
    return load(name, **{"start_method": "fork", **changes})
models.load_preset = forked
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Sandbox, Done]]:
    """All of them, two at a time: each costs a start of vLLM."""
    (ten_lines,) = (block for block in python_blocks(ROOT / "README.md") if "__main__" in block)
    readme = tmp_path_factory.mktemp("readme") / "ten_lines.py"
    readme.write_text(ten_lines)
    commands: dict[str, tuple[str | Path, ...]] = {
        "in_app": (sys.executable, EXAMPLES / "in_app.py"),
        "custom_decoder": (sys.executable, EXAMPLES / "custom_decoder.py"),
        "custom_stage": (sys.executable, "-c", FORKED, EXAMPLES / "custom_stage.py"),
        "streamed_text": (sys.executable, "-c", FORKED, EXAMPLES / "streamed_text.py"),
        "thinker_talker": (sys.executable, "-c", FORKED, EXAMPLES / "thinker_talker.py"),
        "readme": (sys.executable, "-c", FORKED, readme),
    }
    boxes = [
        Sandbox(tmp_path_factory.mktemp(name), VLLM_LOGGING_LEVEL="ERROR") for name in commands
    ]
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda box, command: box.run(*command), boxes, commands.values())
        return dict(zip(commands, zip(boxes, done, strict=True), strict=True))


pytestmark = pytest.mark.timeout(300)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name",
    ["in_app", "custom_decoder", "custom_stage", "streamed_text", "thinker_talker", "readme"],
)
def test_it_succeeds_and_leaves_nothing_but_its_output(
    runs: dict[str, tuple[Sandbox, Done]], name: str
) -> None:
    sandbox, done = runs[name]
    assert done.code == 0, done.stderr
    assert sandbox.leftovers() == []


@pytest.mark.vllm
def test_the_application_speaks_every_sentence_into_a_file_of_its_own(
    runs: dict[str, tuple[Sandbox, Done]],
) -> None:
    sandbox, done = runs["in_app"]
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == len(in_app.SENTENCES)
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(
            rf"sentence-{number}\.wav: first audio after \d+ ms, \d+ tokens, finish reason stop",
            line,
        )
        samples, rate = read(sandbox.output / f"sentence-{number}.wav")
        assert 0.5 < len(samples) / rate < 8
        assert float(np.sqrt(np.mean(samples**2))) > 0.02
    assert all(len(sentence.split()) <= TRAINED_WORDS for sentence in in_app.SENTENCES)


@pytest.mark.vllm
def test_the_melody_has_a_tone_for_each_code(runs: dict[str, tuple[Sandbox, Done]]) -> None:
    sandbox, done = runs["custom_decoder"]
    samples, rate = read(sandbox.output / "melody.wav")
    said = re.search(r"output_tokens=(\d+), .*dropped_tokens=(\d+)", done.stdout)
    assert said is not None
    assert len(samples) == 600 * (int(said[1]) - int(said[2]))
    assert (rate, float(np.abs(samples).max()) > 0.1) == (24_000, True)


@pytest.mark.vllm
def test_the_call_is_resampled_to_8_khz(runs: dict[str, tuple[Sandbox, Done]]) -> None:
    sandbox, done = runs["custom_stage"]
    samples, rate = read(sandbox.output / "call.wav")
    assert rate == 8000
    assert 0.7 < len(samples) / rate < 3
    assert float(np.sqrt(np.mean(samples**2))) > 0.02
    assert re.fullmatch(r"call\.wav: \d\.\d\d s at 8000 Hz, stop\n", done.stdout)


@pytest.mark.vllm
def test_the_answer_is_spoken_while_it_is_written(runs: dict[str, tuple[Sandbox, Done]]) -> None:
    sandbox, done = runs["streamed_text"]
    first, complete, last = done.stdout.splitlines()
    assert re.fullmatch(r"first audio after \d\.\d\d s", first)
    assert complete == "the text is complete"
    samples, rate = read(sandbox.output / "answer.wav")
    assert last == f"answer.wav: {len(samples) / rate:.2f} s"
    assert 6 < len(samples) / rate < 14
    assert float(np.sqrt(np.mean(samples**2))) > 0.02


@pytest.mark.vllm
def test_the_answer_is_written_and_spoken_and_the_other_one_written_alone(
    runs: dict[str, tuple[Sandbox, Done]],
) -> None:
    sandbox, done = runs["thinker_talker"]
    first, said, second = done.stdout.splitlines()
    assert first.strip() == thinker_talker.ANSWERS["hello"]
    assert second.strip() == thinker_talker.ANSWERS["weather"]
    assert re.fullmatch(r"answer\.wav: \d\.\d\d s of audio, Usage\(.*thinker=Usage\(.*\)\)", said)
    samples, _ = read(sandbox.output / "answer.wav")
    assert 1.5 < len(samples) / 24_000 < 5  # eight words
    assert float(np.sqrt(np.mean(samples**2))) > 0.02


@pytest.mark.vllm
def test_the_ten_lines_print_each_chunk_and_the_usage(
    runs: dict[str, tuple[Sandbox, Done]],
) -> None:
    *chunks, usage = runs["readme"][1].stdout.splitlines()
    assert len(chunks) > 1
    assert all(re.fullmatch(r"\d\.\d\d s of audio at 24000 Hz", line) for line in chunks)
    assert usage.startswith("Usage(prompt_tokens=14, ")


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    most=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_the_examples_decoder_declares_the_context_it_needs(
    lengths: list[int], most: int, seed: int
) -> None:
    tones = custom_decoder.Tones()
    assert isinstance(tones, Decoder)
    windowed = WindowedDecoder(tones)
    clips = [random_codes(tones, length, seed + k) for k, length in enumerate(lengths)]
    draw = itertools.cycle(random.Random(seed).randbytes(997))
    for clip, pcm in zip(clips, stream_together(windowed, clips, draw, most), strict=True):
        np.testing.assert_allclose(pcm, windowed.decode_clip(clip), atol=1e-5)


def test_the_examples_codes_are_the_talkers() -> None:
    assert read_layout().codes == custom_decoder.CODES


def read(path: Path) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], int]:
    with wave.open(str(path)) as wav:
        assert (wav.getnchannels(), wav.getsampwidth()) == (1, 2)
        return np.frombuffer(wav.readframes(wav.getnframes()), "<i2") / 32767, wav.getframerate()

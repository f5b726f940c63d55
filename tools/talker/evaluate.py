"""`python -m tools.talker.evaluate`: what the talker's speech is worth, measured on its real path.

Text goes through the preset's pipeline (text step, vLLM, ZeroMQ, streaming decoder), the four demo
sentences through the command; Whisper base says what it understood. The report is made of the
utterances that are spoken here and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from omnistage import Pipeline
from omnistage.cli.timeline import Timeline, draw
from omnistage.models.talker.layout import CHECKPOINT
from omnistage.request import Pcm
from omnistage.speech import save_wav
from tools.talker.recogniser import Errors, Recogniser, rate
from tools.talker.settings import HELD_OUT, ROOT, StageError

Sound = tuple[Pcm, int]
"""Samples, float32 [samples], and their rate."""

Say = Callable[[str], object]

CACHE: Final = ROOT / ".cache" / "talker"
DEMO: Final = 4
"""The first lines of the held-out sentences are the demo's, spoken through the command."""

STREAMS: Final = (1, 4, 8)
LONG: Final = 5
"""Words from which on an utterance counts as long."""

_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Utterance:
    """One sentence, spoken and understood.

    Args:
        text: What was to be said.
        understood: What Whisper made of it.
        errors: Word errors.
        words: Words of the text, normalised.
        seconds: Length of the audio.
        teacher_errors: The teacher's word errors on the same text.
        teacher_seconds: Length of the teacher's audio.
    """

    text: str
    understood: str
    errors: int
    words: int
    seconds: float
    teacher_errors: int
    teacher_seconds: float

    @property
    def ratio(self) -> float:
        """Length over the teacher's."""
        return self.seconds / self.teacher_seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """Warm figures at a number of concurrent streams.

    Args:
        streams: That number.
        real_time_factor: Seconds to speak over seconds of audio of one stream, median.
        first_audio_ms: From a request to its first chunk, median.
        first_audio_p95_ms: The same, 95th percentile.
        least_slack_ms: The least audio that a player had left as a chunk came, over all streams.
    """

    streams: int
    real_time_factor: float
    first_audio_ms: float
    first_audio_p95_ms: float
    least_slack_ms: float


def sentences(path: Path = HELD_OUT) -> list[str]:
    """The held-out sentences, the demo's first."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


async def speak_all(pipeline: Pipeline, texts: Sequence[str]) -> list[Sound]:
    """Speak every text once, some at a time, each with a seed of its own."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int, text: str) -> Sound:
        async with free:
            speech = await pipeline.submit(text, seed=number + 1).collect()
            return speech.pcm, speech.sample_rate

    return list(await asyncio.gather(*(one(n, text) for n, text in enumerate(texts))))


async def measure_speed(pipeline: Pipeline, texts: Sequence[str], streams: int) -> list[Timeline]:
    """Have so many readers speak one text after the other, three each; the first is a warm-up."""

    async def reader(number: int) -> list[Timeline]:
        taken = []
        for turn in range(4):
            text = texts[(number * 4 + turn) % len(texts)]
            timeline = Timeline(label=text if len(text) < 34 else f"{text[:32]}…")
            timeline.start()
            async for chunk in pipeline.submit(text):
                timeline.heard(chunk)
            taken.append(timeline)
        return taken[1:]

    return [t for taken in await asyncio.gather(*map(reader, range(streams))) for t in taken]


def speed_of(timelines: Sequence[Timeline], streams: int) -> Speed:
    """What timelines say about speed."""
    firsts = sorted(1000 * timeline.chunks[0][0] for timeline in timelines)
    factors = [t.chunks[-1][0] / sum(s for _, s in t.chunks) for t in timelines]
    slacks = [slack for t in timelines if (slack := t.least_slack) is not None]
    return Speed(
        streams=streams,
        real_time_factor=round(statistics.median(factors), 3),
        first_audio_ms=round(statistics.median(firsts), 1),
        first_audio_p95_ms=round(firsts[int(0.95 * (len(firsts) - 1))], 1),
        least_slack_ms=round(1000 * min(slacks, default=0.0), 1),
    )


def speak_with_the_command(text: str, path: Path) -> Sound:
    """Speak one text as a user at a shell does."""
    command = Path(sys.executable).with_name("omnistage")
    arguments = (command, "speak", text, "-o", path, "--seed", "1")
    subprocess.run(arguments, check=True, capture_output=True, timeout=180)
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return samples.astype(np.float32) / np.float32(32767), file.getframerate()


async def through_the_pipeline(
    model: Path, texts: Sequence[str], streams: Sequence[int], folder: Path
) -> tuple[list[Sound], list[Speed]]:
    """All speech, then the speed at each number of streams."""
    async with Pipeline.from_preset("talker", model=str(model), start_method="fork") as pipeline:
        spoken = await speak_all(pipeline, texts)
        speeds = []
        for count in streams:
            timelines = await measure_speed(pipeline, texts[-40:], count)
            speeds.append(speed_of(timelines, count))
            if count == max(streams):
                # One of each reader's: the last, when all were busy.
                shown = timelines[2::3]
                draw(shown, folder / f"timeline-{count}.png", f"{count} streams at once")
    return spoken, speeds


def judge(
    texts: Sequence[str], spoken: Sequence[Sound], recogniser: Recogniser, say: Say
) -> list[Utterance]:
    """Have every utterance and its teacher's understood."""
    from hibari import SAMPLE_RATE, Hibari

    teacher, count, judged = Hibari(), Errors(), []
    for number, (text, (pcm, sample_rate)) in enumerate(zip(texts, spoken, strict=True)):
        understood = recogniser(pcm, sample_rate)
        errors, words = count(text, understood)
        model = teacher(text, seed=number + 1)
        teachers, _ = count(text, recogniser(model, SAMPLE_RATE))
        judged.append(
            Utterance(
                text,
                understood,
                errors,
                words,
                round(len(pcm) / sample_rate, 3),
                teachers,
                round(len(model) / SAMPLE_RATE, 3),
            )
        )
        if (number + 1) % 20 == 0:
            say(f"{number + 1} of {len(texts)} understood")
    return judged


def report(
    utterances: Sequence[Utterance], demo: Sequence[Utterance], speeds: Sequence[Speed]
) -> str:
    """What was measured, as the model card has it."""
    lines = [
        "| utterances | words | word error rate | the teacher's |",
        "| --- | ---: | ---: | ---: |",
    ]
    groups = {
        f"{LONG} words and more": [u for u in utterances if u.words >= LONG],
        f"1 to {LONG - 1} words": [u for u in utterances if u.words < LONG],
        "all": list(utterances),
    }
    for name, group in groups.items():
        if not group:
            continue
        ours = rate([(u.errors, u.words) for u in group])
        teachers = rate([(u.teacher_errors, u.words) for u in group])
        words = sum(u.words for u in group)
        lines.append(f"| {len(group)} of {name} | {words} | {ours:.1%} | {teachers:.1%} |")
    ratios = [u.ratio for u in utterances]
    lines += [
        "",
        f"Length over the teacher's: {min(ratios):.2f} to {max(ratios):.2f}, "
        f"median {statistics.median(ratios):.2f}.",
        "",
        "| streams | real-time factor | first audio, median | 95% | least left to play |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {s.streams} | {s.real_time_factor:.2f} | {s.first_audio_ms:.0f} ms "
        f"| {s.first_audio_p95_ms:.0f} ms | {s.least_slack_ms:.0f} ms |"
        for s in speeds
    ]
    lines += ["", "The demo's sentences, through the command:", ""]
    lines += [f"- {u.text!r} understood as {u.understood!r}: {u.errors} errors" for u in demo]
    lines += ["", "The ten worst:", ""]
    worst = sorted(utterances, key=lambda u: u.errors / u.words, reverse=True)[:10]
    lines += [f"- {u.text!r} as {u.understood!r}: {u.errors} of {u.words}" for u in worst]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.talker.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a talker's directory")
    parser.add_argument("--folder", type=Path, default=CACHE / "evaluation", help="for results")
    parser.add_argument("--most", type=int, default=None, help="only the first so many sentences")
    parser.add_argument("--keep", action="store_true", help="keep every utterance as a wav file")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    try:
        texts = sentences()[: options.most]
        options.folder.mkdir(parents=True, exist_ok=True)
        recogniser = Recogniser(CACHE)
        say(f"speaking {len(texts)} sentences")
        spoken, speeds = asyncio.run(
            through_the_pipeline(options.model, texts, STREAMS, options.folder)
        )
        if options.keep:
            for number, sound in enumerate(spoken):
                save_wav(options.folder / f"{number:03}.wav", *sound)
        utterances = judge(texts, spoken, recogniser, say)
        demo: list[Utterance] = []
        if options.model == CHECKPOINT:  # the command speaks with the shipped one
            say("the demo's sentences through the command")
            paths = [options.folder / f"demo-{n}.wav" for n in range(DEMO)]
            commanded = [
                speak_with_the_command(text, path)
                for text, path in zip(texts[:DEMO], paths, strict=False)
            ]
            demo = judge(texts[:DEMO], commanded, recogniser, say)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    text = report(utterances, demo, speeds)
    (options.folder / "report.md").write_text(text + "\n")
    whole = {
        "model": str(options.model),
        "utterances": [asdict(u) for u in utterances],
        "demo": [asdict(u) for u in demo],
        "speeds": [asdict(s) for s in speeds],
    }
    (options.folder / "report.json").write_text(json.dumps(whole, indent=1))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``omnistage speak``: text in, a wav file out, with what it took."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from rich.console import Console

from omnistage.cli.settings import parse_settings
from omnistage.cli.terminal import STARTUP, USAGE, complain, prepare
from omnistage.cli.timeline import SUBSCRIBER, Timeline, check_drawable, draw, recording
from omnistage.errors import (
    ClientError,
    ConfigError,
    OmniStageError,
    StartupError,
    UnsupportedEnvironment,
)
from omnistage.pipeline import Pipeline
from omnistage.speech import save_wav
from omnistage.stages.environment import is_cpu_build

if TYPE_CHECKING:
    from omnistage.request import Pcm

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Spoken:
    """What one utterance took.

    Args:
        output: The file written.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens sampled.
        finish_reason: Why the model stopped.
        audio_seconds: Length of the audio.
        start_seconds: From the command's start to a pipeline that takes requests.
        first_audio_seconds: From the request to its first chunk.
        slack_seconds: The least audio that a player had left as a chunk came; negative for a pause
            that a listener would have heard. None with fewer than two chunks.
        total_seconds: From the request to its last chunk.
        real_time_factor: Generation time over audio time; below 1 keeps up with a listener.
    """

    output: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    audio_seconds: float
    start_seconds: float
    first_audio_seconds: float
    slack_seconds: float | None
    total_seconds: float
    real_time_factor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command was told.

    Args:
        text: What to say; ``-`` for standard input.
        output: The wav file.
        model: A preset's name, or a model's directory or hub id; None for the talker.
        settings: Pieces of the preset to replace, FIELD=VALUE.
        voice: A voice of the model's.
        by_sentence: Whether a long text is said sentence by sentence.
        seed: Seeds sampling and noise.
        timeline: A picture of how it went.
        connect: AR services that speak in place of an engine of our own.
        keys: Directory of the keys for those.
        json: Whether to report in JSON.
    """

    text: str
    output: Path
    model: str | None
    settings: Sequence[str]
    voice: str | None
    by_sentence: bool
    seed: int | None
    timeline: Path | None
    connect: Sequence[str]
    keys: Path | None
    json: bool


def run(asked: Asked) -> int:
    """Speak, and draw how it went where that is asked for.

    What cannot be drawn is complained about when the speech is written and reported.

    Returns:
        The exit code.
    """
    prepare()
    console = Console(stderr=True)
    stopped: list[int] = []
    timeline = asked.timeline
    try:
        if asked.text == "-":
            asked = replace(asked, text=_standard_input())
        _check_input(asked.text, asked.output)
        if timeline is not None:
            _check_picture(timeline, asked.output)
        work = _speak(_pipeline(asked), asked, console)
        spoken, times = asyncio.run(_stoppable(work, stopped))
    except (ConfigError, StartupError, UnsupportedEnvironment) as error:
        return complain(console, error, STARTUP)
    except ClientError as error:
        return complain(console, error, USAGE)
    except (OmniStageError, OSError) as error:
        return complain(console, error, 1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        number = stopped[0] if stopped else signal.SIGINT
        console.print(f"stopped by {signal.Signals(number).name}")
        return 128 + number
    _report(console, spoken, json=asked.json)
    if timeline is not None:
        try:
            draw([times], timeline, " ".join(asked.text.split())[:80])
        except (OSError, ValueError) as error:
            return complain(console, f"{timeline} could not be drawn: {error}", 1)
    return 0


async def _stoppable(work: Coroutine[None, None, _T], stopped: list[int]) -> _T:
    """Run ``work``; SIGINT and SIGTERM cancel it once, so that the pipeline closes in order."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return await task


async def _speak(stages: Pipeline, asked: Asked, console: Console) -> tuple[Spoken, Timeline]:
    began = time.monotonic()
    record = asked.timeline is not None
    timeline = Timeline()
    with console.status("starting vLLM") as status:
        async with stages as pipeline:
            started = time.monotonic()
            status.update("speaking")
            pieces: list[Pcm] = []
            recorder = recording(pipeline, timeline, asked.keys) if record else nullcontext()
            subscribers = [SUBSCRIBER] if record else []
            async with recorder as complete:
                timeline.start()
                request = pipeline.submit(
                    asked.text,
                    seed=asked.seed,
                    voice=asked.voice,
                    by_sentence=asked.by_sentence,
                    subscribers=subscribers,
                )
                async with request as stream:
                    async for chunk in stream:
                        timeline.heard(chunk)
                        pieces.append(chunk.pcm)
                        seconds = sum(map(len, pieces)) / chunk.sample_rate
                        status.update(f"speaking: {seconds:.1f} s of audio")
                usage = await stream.finished()
                ended = time.monotonic()
                if complete is not None:
                    await complete(usage.output_tokens)
            pcm = np.concatenate([np.zeros(0, np.float32), *pieces])
            save_wav(asked.output, pcm, pipeline.sample_rate)
            audio = len(pcm) / pipeline.sample_rate
            status.update("stopping")
    took = ended - started
    slack = timeline.least_slack
    return Spoken(
        output=os.fsencode(asked.output).decode(
            errors="replace"
        ),  # a name need not be UTF-8, JSON must
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        finish_reason=str(usage.finish_reason),
        audio_seconds=round(audio, 3),
        start_seconds=round(started - began, 3),
        first_audio_seconds=round(timeline.chunks[0][0] if timeline.chunks else took, 3),
        slack_seconds=None if slack is None else round(slack, 3),
        total_seconds=round(took, 3),
        real_time_factor=round(took / audio, 3) if audio else None,
    ), timeline


def _pipeline(asked: Asked) -> Pipeline:
    settings = parse_settings(asked.settings)
    if asked.connect:
        if asked.model is not None or settings:
            raise ClientError("--connect speaks with the model of the service; leave --model out")
        return Pipeline.connect(*asked.connect, keys=asked.keys)
    # Nothing has run in this process that a fork could break, and spawning takes 14 s longer.
    start = {"start_method": "fork"} if is_cpu_build() else {}
    return Pipeline.from_preset(asked.model or "talker", **{**start, **settings})


def _standard_input() -> str:
    if sys.stdin is None:
        raise ClientError("standard input is closed; give the text as an argument, or pipe it in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ClientError(f"standard input is no UTF-8: {error.reason}") from error


def _check_input(text: str, output: Path) -> None:
    """Fail before the engine starts, not after it has spoken."""
    if not text.strip():
        raise ClientError("the text is empty; give at least one word")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ClientError("the text is no UTF-8; give it in that encoding") from error
    _check_output(output)


def _check_picture(timeline: Path, output: Path) -> None:
    check_drawable(timeline)
    _check_output(timeline)
    if timeline.resolve() == output.resolve():
        raise ClientError(f"{timeline} and {output} are the same file; choose another for one")


def _check_output(output: Path) -> None:
    if not output.parent.is_dir():
        raise ClientError(f"{output.parent} is no directory; create it or choose another output")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ClientError(f"{output} cannot be written; choose another output")


def _report(console: Console, spoken: Spoken, *, json: bool) -> None:
    if json:
        sys.stdout.write(msgspec.json.encode(asdict(spoken)).decode() + "\n")
        return
    factor = "no audio" if spoken.real_time_factor is None else f"{spoken.real_time_factor:.2f}"
    console.print(
        f"{spoken.output}: {spoken.audio_seconds:.2f} s of audio from {spoken.output_tokens} "
        f"tokens, first audio after {spoken.first_audio_seconds * 1000:.0f} ms, "
        f"real-time factor {factor} "
        f"(ready after {spoken.start_seconds:.1f} s)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )

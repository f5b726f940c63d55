"""A speaker ends with the program that made it, and belongs to one process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnistage import DecoderStageConfig, Pipeline, Speaker
from omnistage.errors import StageClosed, StartupError
from omnistage.testing import FakeDecoder, Script, ScriptedARStage, scripted
from tests.cli.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[1]

SETUP = """
import os, signal, sys, threading, time
from omnistage import DecoderStageConfig, Pipeline, Speaker
from omnistage.errors import StageClosed
from omnistage.testing import FakeDecoder, Script, scripted

script = Script(ids=range(100), step_after=0.001)
Pipeline.from_preset = lambda name, **changes: Pipeline(
    ar=scripted(script), decoder=DecoderStageConfig(build=FakeDecoder)
)
"""


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A program with a scripted model, to its end: that it comes is what is tested."""
    return subprocess.run(
        [sys.executable, *options, "-c", SETUP + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("end", ["", "sys.exit(4)", "raise KeyError('end')"])
def test_a_speaker_that_is_never_left_ends_with_the_program(end: str) -> None:
    program = f"s = Speaker()\ns.__enter__()\nprint(len(s.speak('Hi.').pcm))\n{end}\n"
    done = run(program, "-W", "default::ResourceWarning")
    assert (done.stdout, done.returncode) == ("400\n", {"": 0, "sys.exit(4)": 4}.get(end, 1))
    assert done.stderr.count("ResourceWarning: a Speaker was never left; it ends with") == 1
    assert "could not be closed" not in done.stderr


def test_a_warning_that_is_an_error_ends_it_too() -> None:
    done = run("s = Speaker().__enter__()\n", "-W", "error::ResourceWarning")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_outlives_the_main_one_keeps_what_it_entered() -> None:
    program = """
def work():
    with Speaker() as s:
        threading.main_thread().join()
        print(len(s.speak("Hi.").pcm))

threading.Thread(target=work).start()
"""
    done = run(program, "-W", "default::ResourceWarning")
    assert (done.stdout, done.stderr, done.returncode) == ("400\n", "", 0)


def test_in_a_fork_a_speaker_is_not_running_and_leaving_it_is_nothing() -> None:
    program = """
def fork(end):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        print("parent", len(s.speak("Hi.").pcm), flush=True)
        return
    signal.alarm(10)
    try:
        s.speak("Hi.")
    except StageClosed as error:
        print("fork", error, flush=True)
    end()

with Speaker() as s:
    fork(lambda: os._exit(0))
    fork(lambda: sys.exit(0))
"""
    done = run(program)
    assert (done.stderr, done.returncode) == ("", 0)
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["parent 400"] * 2
    assert all("fork the speaker runs in the process that entered it" in x for x in lines[::2])


def test_ctrl_c_while_speaking_leaves_in_order() -> None:
    program = """
script = Script(stalls=True)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    with Speaker() as s:
        s.speak("Hi.")
except KeyboardInterrupt:
    print([t.name for t in threading.enumerate() if "speaker" in t.name])
"""
    done = run(program)
    assert (done.stdout, done.returncode) == ("[]\n", 0)
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_process_or_directory_of_an_engines_is_left(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sandbox = Sandbox(tmp_path_factory.mktemp("end"), VLLM_LOGGING_LEVEL="ERROR")
    program = (
        "from omnistage import Speaker; s = Speaker(start_method='fork').__enter__(); "
        "print(s.speak('Hi.').seconds > 0.1)"
    )
    done = sandbox.run(sys.executable, "-c", program)
    assert (done.stdout, done.code) == ("True\n", 0), done.stderr
    assert sandbox.leftovers() == []


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what the scripted preset says."""

    def use(script: Any) -> None:
        def make(name: str, **changes: Any) -> Pipeline:
            return Pipeline(ar=scripted(script), decoder=DecoderStageConfig(build=FakeDecoder))

        monkeypatch.setattr(Pipeline, "from_preset", make)

    return use


async def test_leaving_it_ends_what_other_threads_speak(preset: Any) -> None:
    spoken = threading.Event()

    def script(_: object) -> Script:
        spoken.set()
        return Script(stalls=True)

    preset(script)

    def work() -> list[str]:
        ends: list[str] = []

        def speak() -> None:
            try:
                speaker.speak("Hi.")
            except StageClosed as error:
                ends.append(str(error))

        with Speaker() as speaker:
            threads = [threading.Thread(target=speak) for _ in range(4)]
            for thread in threads:
                thread.start()
            assert spoken.wait(10)
        for thread in threads:
            thread.join(10)
        with pytest.raises(StageClosed, match="use it as `with`"):
            speaker.speak("Hi.")
        with pytest.raises(StageClosed, match="entered once"):
            speaker.__enter__()
        return ends

    assert len(await asyncio.to_thread(work)) == 4


async def test_what_fails_a_start_is_raised_and_leaves_no_thread(
    preset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset(Script())

    async def fail(_: object) -> None:
        raise StartupError("on purpose")

    monkeypatch.setattr(ScriptedARStage, "start", fail)

    def work() -> None:
        with pytest.raises(StartupError, match="on purpose"):
            Speaker().__enter__()

    await asyncio.to_thread(work)
    assert not [t for t in threading.enumerate() if t.name == "omnistage-speaker"]

"""Stages as processes: joined by ``omnistage speak --connect``, stopped and killed in turn."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.sandbox import COMMAND, PATIENCE_SECONDS, Sandbox
from tests.examples.documents import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LONG = "Please close the window before it starts to rain and bring the washing in. " * 5


class Process:
    """A stage, or a client, as a process of its own whose output is read from files."""

    def __init__(self, sandbox: Sandbox, name: str, *command: str | Path) -> None:
        self._out, self._err = sandbox.output / f"{name}.out", sandbox.output / f"{name}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.program = sandbox.start(*command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Return when the process has printed or logged something."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (match := re.search(pattern, self.out + self.err)):
            assert self.program.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.02)
        return match

    def end(self, number: signal.Signals | None = None) -> int:
        """Wait for its end, after a signal if one is given."""
        if number is not None:
            self.program.send_signal(number)
        return self.program.wait(PATIENCE_SECONDS)


class Services:
    """An AR stage and a decoder, started once and again after a test has stopped one."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._count = 0
        self.ar = self.start("ar", "--bind", "tcp://127.0.0.1:0")
        self.endpoint = self.ar.wait_for(r'"(tcp://[^"]+)"')[1]
        self.decoder = self.start_decoder()

    def start(self, kind: str, *options: str) -> Process:
        self._count += 1
        return Process(
            self.sandbox, f"{kind}-{self._count}", COMMAND, "stage", kind, "--json", *options
        )

    def start_decoder(self) -> Process:
        decoder = self.start("decoder", "--connect", self.endpoint, "--bind", "tcp://127.0.0.1:0")
        decoder.wait_for('"endpoint"')
        return decoder

    def restart_ar(self) -> None:
        self.ar = self.start("ar", "--bind", self.endpoint)
        self.ar.wait_for('"endpoint"')

    def speak(self, text: str, *options: str | Path) -> Process:
        self._count += 1
        name = f"speak-{self._count}"
        output = self.sandbox.output / f"{name}.wav"
        return Process(
            self.sandbox,
            name,
            *(COMMAND, "speak", text, "-o", output, "--connect", self.endpoint, "--json"),
            *options,
        )


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    sandbox = Sandbox(tmp_path_factory.mktemp("services"))
    try:
        services = Services(sandbox)
        yield services
        for process in (services.decoder, services.ar):
            if process.program.poll() is None:  # a test may have stopped it last
                assert process.end(signal.SIGTERM) == 0, process.err
        assert not sandbox.leftovers()
    finally:
        for process in sandbox.processes():
            process.kill()


@pytest.fixture
def healthy(services: Services) -> Services:
    """The services, those that a test has stopped started again."""
    if services.ar.program.poll() is not None:
        services.restart_ar()
    if services.decoder.program.poll() is not None:
        services.decoder = services.start_decoder()
    return services


def spoken(process: Process) -> dict[str, Any]:
    assert process.end() == 0, process.err
    report: dict[str, Any] = json.loads(process.out)
    return report


def test_a_ready_stage_says_where_it_listens(healthy: Services) -> None:
    for process, stage in ((healthy.ar, "ar"), (healthy.decoder, "decoder")):
        ready = json.loads(process.out)
        assert ready["stage"] == stage
        assert ready["endpoint"].startswith("tcp://127.0.0.1:")


def test_speech_through_services_is_the_same_as_in_one_process(healthy: Services) -> None:
    text, seed = "Hello world.", ("--seed", "3")
    here = healthy.sandbox.output / "here.wav"
    alone = Process(healthy.sandbox, "alone", COMMAND, "speak", text, "-o", here, *seed)
    assert alone.end() == 0, alone.err
    report = spoken(healthy.speak(text, *seed))
    with wave.open(str(here)) as one, wave.open(report["output"]) as other:
        assert one.getnframes() == other.getnframes()
        assert one.readframes(one.getnframes()) == other.readframes(other.getnframes())


def test_a_client_that_is_killed_frees_its_request(healthy: Services) -> None:
    client = healthy.speak(LONG)
    began = healthy.ar.err.count("is gone")
    time.sleep(2)
    assert client.end(signal.SIGKILL) == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_SECONDS
    while healthy.ar.err.count("is gone") == began:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert spoken(healthy.speak("Hello world."))["finish_reason"] == "stop"


def test_ctrl_c_at_a_client_ends_its_request_only(healthy: Services) -> None:
    client = healthy.speak(LONG)
    other = healthy.speak("Hello world.")
    time.sleep(1.5)
    assert client.end(signal.SIGINT) == 128 + signal.SIGINT
    assert spoken(other)["finish_reason"] == "stop"


@pytest.mark.parametrize("stage", ["ar", "decoder"])
def test_a_stage_that_is_killed_fails_its_requests_and_can_be_replaced(
    healthy: Services, stage: str
) -> None:
    client = healthy.speak(LONG)
    time.sleep(2.5)
    assert client.program.poll() is None, client.err
    process: Process = getattr(healthy, stage)
    assert process.end(signal.SIGKILL) == -signal.SIGKILL
    assert client.end() == 1
    assert "error:" in client.err
    if stage == "ar":
        healthy.restart_ar()
    else:
        healthy.decoder = healthy.start_decoder()
    assert spoken(healthy.speak("Hello world."))["finish_reason"] == "stop"


def test_a_decoder_that_stands_still_fails_its_requests_and_is_used_again(
    healthy: Services,
) -> None:
    client = healthy.speak(LONG)
    time.sleep(2.5)
    assert client.program.poll() is None, client.err
    healthy.decoder.program.send_signal(signal.SIGSTOP)
    try:
        assert client.end() == 1
        assert "was cut" in " ".join(client.err.split())
    finally:
        healthy.decoder.program.send_signal(signal.SIGCONT)
    assert spoken(healthy.speak("Hello world."))["finish_reason"] == "stop"


def test_an_engine_that_is_killed_ends_its_service_and_is_named_to_clients(
    healthy: Services,
) -> None:
    client = healthy.speak(LONG)
    time.sleep(2.5)
    assert client.program.poll() is None, client.err
    children = psutil.Process(healthy.ar.program.pid).children()
    (engine,) = (child for child in children if child.name().startswith("VLLM::Engine"))
    engine.kill()
    assert healthy.ar.end() == 1
    assert client.end() == 1
    for process in (healthy.ar, client):
        assert "engine process is gone" in " ".join(process.err.split())
    healthy.restart_ar()
    assert spoken(healthy.speak("Hello world."))["finish_reason"] == "stop"


def test_a_second_signal_fails_what_runs(healthy: Services) -> None:
    client = healthy.speak(LONG)
    time.sleep(2.5)
    assert client.program.poll() is None, client.err
    healthy.decoder.program.send_signal(signal.SIGTERM)
    healthy.decoder.wait_for(r"draining, \d requests")
    assert healthy.decoder.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert client.end() == 1


def test_the_example_speaks(healthy: Services, tmp_path: Path) -> None:
    example, output = ROOT / "examples/microservices/client.py", tmp_path / "hello.wav"
    client = Process(healthy.sandbox, "example", sys.executable, example, healthy.endpoint, output)
    assert client.end() == 0, client.err
    assert re.search(r"first audio after \d+ ms\n\d+ chunks, [\d.]+ s of audio", client.out)
    with wave.open(str(output)) as written:
        assert written.getnframes() > 24_000 // 2


@pytest.mark.parametrize("stage", ["decoder", "ar"])
def test_a_stage_that_is_told_to_stop_ends_what_runs(healthy: Services, stage: str) -> None:
    client = healthy.speak(LONG)
    time.sleep(2.5)
    assert client.program.poll() is None, client.err
    process: Process = getattr(healthy, stage)
    assert process.end(signal.SIGTERM) == 0, process.err
    assert spoken(client)["finish_reason"] == "stop"


REFUSALS = {
    "model": (["ar", "--model", "nobody"], 3, "unknown preset 'nobody'"),
    "settings": (["ar", "--config", "os:sep", "--set", "a=1"], 3, "leave one out"),
    "bind": (["ar", "--bind", "tcp://8.8.8.8:1"], 3, "cannot bind"),
    "config": (["ar", "--config", "nowhere"], 3, "MODULE:NAME"),
    "module": (["ar", "--config", "nowhere:it"], 3, "No module named 'nowhere'"),
    "kind": (["ar", "--config", "os:sep"], 3, "is no ARStageConfig"),
    "decoder kind": (
        ["decoder", "--connect", "tcp://127.0.0.1:9", "--config", "os:getcwd"],
        3,
        "is no DecoderStageConfig",
    ),
    "endpoint": (["decoder", "--connect", "here"], 3, "an endpoint is"),
    "nothing to connect": (["decoder"], 2, "--connect"),
    "drain": (["ar", "--drain", "-1"], 2, "--drain"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_refused_with_a_sentence(case: str, tmp_path: Path) -> None:
    options, code, sentence = REFUSALS[case]
    sandbox = Sandbox(tmp_path)
    done = sandbox.run(COMMAND, "stage", *options)
    assert done.code == code, done.stderr
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not sandbox.leftovers()


def test_nobody_to_connect_to_is_said_in_bounded_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sandbox = Sandbox(tmp_path_factory.mktemp("alone"))  # a short path, for sockets
    done = sandbox.run(
        *(COMMAND, "stage", "decoder", "--within", "1", "--connect", "tcp://127.0.0.1:9")
    )
    assert done.code == 3
    assert "no service answers at tcp://127.0.0.1:9" in " ".join(done.stderr.split())
    assert not sandbox.leftovers()

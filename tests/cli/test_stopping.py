"""Ctrl-C, SIGTERM and SIGKILL at several moments of ``omnistage speak``: what is left afterwards.

The command runs on a terminal of its own and is stopped by what it shows there, not by the clock.
"""

from __future__ import annotations

import os
import signal
import time
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.sandbox import COMMAND, PATIENCE_SECONDS, Sandbox, Terminal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TEXT = "Please close the window before it starts to rain and bring the washing in."
CTRL_C = b"\x03"


class Stopped(NamedTuple):
    """A run that was stopped: how it ended and what it had been using."""

    sandbox: Sandbox
    code: int
    shown: str
    shared_memory: set[str]


def starting(terminal: Terminal, sandbox: Sandbox) -> None:
    """VLLM is being imported; it has no process yet."""
    terminal.wait_for("starting vLLM")


def engine_up(terminal: Terminal, sandbox: Sandbox) -> None:
    """VLLM's engine process exists and loads the model."""
    terminal.wait_for("starting vLLM")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(sandbox.processes()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def speaking(terminal: Terminal, sandbox: Sandbox) -> None:
    """The first chunk has arrived, later ones have not."""
    terminal.wait_for("speaking: ")


def press_ctrl_c(terminal: Terminal) -> None:
    terminal.type(CTRL_C)


def send(number: signal.Signals) -> Callable[[Terminal], None]:
    return lambda terminal: terminal.program.send_signal(number)


CASES: dict[str, tuple[Callable[[Terminal, Sandbox], None], Callable[[Terminal], None], int]] = {
    "Ctrl-C while vLLM is imported": (starting, press_ctrl_c, 130),
    "SIGTERM while the engine starts": (engine_up, send(signal.SIGTERM), 143),
    "Ctrl-C while speaking": (speaking, press_ctrl_c, 130),
    "SIGTERM while speaking": (speaking, send(signal.SIGTERM), 143),
    "SIGKILL while speaking": (speaking, send(signal.SIGKILL), -signal.SIGKILL),
}
IN_ORDER = [name for name in CASES if "SIGKILL" not in name]


def stop(name: str, root: Path) -> Stopped:
    moment, end, _ = CASES[name]
    sandbox = Sandbox(root)
    with Terminal(sandbox, COMMAND, "speak", TEXT, "-o", "out.wav") as terminal:
        moment(terminal, sandbox)
        shared = sandbox.shared_memory()
        end(terminal)
        code = terminal.wait()
    return Stopped(sandbox, code, terminal.shown, shared)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stopped]:
    """All cases, two at a time: each costs a start of vLLM."""
    roots = [tmp_path_factory.mktemp("stop") for _ in CASES]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(stop, CASES, roots), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_exit_code_names_the_signal(runs: dict[str, Stopped], name: str) -> None:
    assert runs[name].code == CASES[name][2], runs[name].shown


@pytest.mark.parametrize("name", IN_ORDER)
def test_no_process_socket_or_partial_file_is_left(runs: dict[str, Stopped], name: str) -> None:
    sandbox = runs[name].sandbox
    assert sandbox.leftovers() == []
    for path in sandbox.output.iterdir():
        # Only if the speech was complete before the signal arrived.
        with wave.open(str(path)) as wav:
            assert path.stat().st_size == 44 + 2 * wav.getnframes()


@pytest.mark.parametrize("name", CASES)
def test_no_shared_memory_is_left(runs: dict[str, Stopped], name: str) -> None:
    if "speaking" in name:
        assert runs[name].shared_memory
    assert [path for path in runs[name].shared_memory if os.path.exists(path)] == []


@pytest.mark.parametrize("name", IN_ORDER)
def test_the_terminal_says_what_stopped_it_without_a_traceback(
    runs: dict[str, Stopped], name: str
) -> None:
    shown = runs[name].shown
    assert f"stopped by {'SIGINT' if 'Ctrl-C' in name else 'SIGTERM'}" in shown
    assert "Traceback" not in shown


def test_the_engine_ends_with_its_owner(runs: dict[str, Stopped]) -> None:
    sandbox = runs["SIGKILL while speaking"].sandbox
    deadline = time.monotonic() + PATIENCE_SECONDS
    while processes := sandbox.processes():
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)

"""The set-up script in a folder of its own: it refuses, waits, names what failed, starts over."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "setup_env.py"


@pytest.fixture
def setup_env(tmp_path: Path) -> Any:
    """The script as a module that believes `tmp_path` to be the checkout."""
    copy = tmp_path / "tools" / "setup_env.py"
    copy.parent.mkdir()
    copy.write_bytes(SCRIPT.read_bytes())
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".cache").mkdir()
    spec = importlib.util.spec_from_file_location("setup_env", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def finish(setup_env: Any) -> None:
    """Leaves what a finished set-up leaves."""
    setup_env.PYTHON.parent.mkdir(parents=True)
    setup_env.PYTHON.symlink_to(sys.executable)
    setup_env.STAMP.write_text(json.dumps(setup_env.fingerprint()))


def call(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "tools" / "setup_env.py"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("platform", "version"), [("darwin", (3, 12)), ("linux", (3, 10))])
def test_another_system_or_an_old_python_is_refused_in_a_sentence(
    setup_env: Any, platform: str, version: tuple[int, int]
) -> None:
    assert setup_env.refuse(platform, version).endswith((".", "`."))


def test_linux_and_python_3_11_are_accepted(setup_env: Any) -> None:
    assert setup_env.refuse("linux", (3, 11)) is None


def test_a_finished_setup_has_nothing_to_do_and_says_nothing(
    setup_env: Any, tmp_path: Path
) -> None:
    finish(setup_env)
    ended = call(tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_changed_requirements_are_not_ready(setup_env: Any, tmp_path: Path) -> None:
    finish(setup_env)
    (tmp_path / "pyproject.toml").write_text("[project]\ndependencies = ['other']\n")
    assert not setup_env.is_ready(setup_env.fingerprint())


def test_a_changed_lint_rule_reinstalls_nothing(setup_env: Any, tmp_path: Path) -> None:
    finish(setup_env)
    (tmp_path / "pyproject.toml").write_text("[project]\n[tool.ruff]\nline-length = 99\n")
    assert setup_env.is_ready(setup_env.fingerprint())


def test_a_broken_pyproject_is_told_in_a_sentence(setup_env: Any, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project")
    ended = call(tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("omnistage: set-up failed: ")


def test_a_missing_python_is_not_ready(setup_env: Any) -> None:
    finish(setup_env)
    setup_env.PYTHON.unlink()
    assert not setup_env.is_ready(setup_env.fingerprint())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"inputs": 1}'])
def test_an_unreadable_stamp_is_not_ready(setup_env: Any, content: str) -> None:
    finish(setup_env)
    setup_env.STAMP.write_text(content)
    assert not setup_env.is_ready(setup_env.fingerprint())


def test_an_unfinished_environment_is_made_anew(
    setup_env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = setup_env.VENV / "lib" / "half-installed"
    half.mkdir(parents=True)
    steps: list[str] = []
    monkeypatch.setattr(setup_env, "run", lambda step, command, lock: steps.append(step))
    setup_env.LOG.touch()
    setup_env.create(lock=0)
    assert not half.exists()
    assert steps == ["creating .venv"]


def test_a_failed_step_is_named_with_what_it_said(
    setup_env: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(wanted: dict[str, str], lock: int) -> None:
        setup_env.run("buying milk", ["sh", "-c", "echo the shop is closed; exit 3"], lock)

    monkeypatch.setattr(setup_env, "build", fail)
    assert setup_env.main() == 1
    said = capsys.readouterr().err
    assert "failed while buying milk (exit code 3)" in said
    assert "the shop is closed" in said
    assert str(setup_env.LOG) in said


def test_pytorchs_index_is_asked_only_if_pip_has_no_cpu_torch(
    setup_env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(step: str, command: list[str], lock: int) -> None:
        commands.append(command)
        if len(commands) == 1:
            with setup_env.LOG.open("a") as log:
                log.write("ERROR: No matching distribution found for torch==2.13.0+cpu\n")
            raise setup_env.StepFailed(step, 1)

    monkeypatch.setattr(setup_env, "run", run)
    setup_env.LOG.touch()
    setup_env.install_torch(lock=0)
    assert [setup_env.TORCH_CPU_INDEX in command for command in commands] == [False, True]


def test_another_failure_of_torch_is_final(setup_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(step: str, command: list[str], lock: int) -> None:
        raise setup_env.StepFailed(step, 1)

    monkeypatch.setattr(setup_env, "run", run)
    setup_env.LOG.write_text("ERROR: No space left on device\n")
    with pytest.raises(setup_env.StepFailed):
        setup_env.install_torch(lock=0)


def test_a_second_call_waits_for_the_first(setup_env: Any, tmp_path: Path) -> None:
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    second = subprocess.Popen(
        [sys.executable, tmp_path / "tools" / "setup_env.py"], stdout=subprocess.PIPE, text=True
    )
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    finish(setup_env)
    os.close(lock)
    assert second.wait() == 0
    second.stdout.close()


def test_a_killed_setup_takes_its_step_along_and_frees_the_lock(tmp_path: Path) -> None:
    running = tmp_path / "running"
    os.mkfifo(running)
    script = tmp_path / "tools" / "setup_env.py"
    script.parent.mkdir()
    script.write_bytes(SCRIPT.read_bytes())
    (tmp_path / ".cache").mkdir()
    step = ["sh", "-c", f"echo > {running}; exec sleep 600"]
    program = (
        "import setup_env\n"
        "with setup_env.only_one_setup() as lock:\n"
        f"    setup_env.run('sleeping', {step!r}, lock)\n"
    )
    setup = subprocess.Popen(
        [sys.executable, "-c", program], cwd=script.parent, stdout=subprocess.DEVNULL
    )
    running.read_text()
    setup.send_signal(signal.SIGKILL)
    setup.wait()
    # The step holds the same lock, so that taking it shows that the step has ended too.
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(lock)

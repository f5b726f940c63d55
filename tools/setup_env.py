"""Brings `.venv` to the state that pyproject.toml asks for, from whatever state it is in.

Standard library only, and it runs under any Python 3 so that an old one is refused with a sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".omnistage-ready"
LOG = ROOT / ".cache" / "setup.log"

OLDEST = (3, 11)
EXTRAS = "cpu,codecs,snac,phonemes,talker,cli,audio,plot,dev"
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM depends on them, a text and audio-token stage imports none, and built for another torch than
# the one installed they break `import transformers`.
OPTIONAL = ("torchvision", "torchaudio", "torchcodec")

PIP = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input")
INSTALL = (*PIP, "install", "--progress-bar", "off")
PR_SET_PDEATHSIG = 1


class StepFailed(Exception):
    """One step of the set-up ended badly; `step` reads after "failed while"."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"set-up failed while {step} (exit code {code})")


def main() -> int:
    """Makes `.venv` ready and returns the exit code; says nothing where nothing is to do."""
    refusal = refuse(sys.platform, sys.version_info[:2])
    if refusal:
        return complain(refusal)
    try:
        wanted = fingerprint()
        if is_ready(wanted):
            return 0
        with only_one_setup() as lock:
            if not is_ready(wanted):
                build(wanted, lock)
    except StepFailed as failure:
        return complain(f"{failure}.{log_tail()}\nThe next call starts over.")
    except (OSError, ValueError) as failure:
        return complain(f"set-up failed: {failure}. The next call starts over.")
    except KeyboardInterrupt:
        return complain("set-up interrupted; the next call starts over.", 130)
    return 0


def refuse(platform: str, version: tuple[int, ...]) -> str | None:
    """Why this machine cannot run omnistage, in a sentence, or None."""
    if not platform.startswith("linux"):
        return f"omnistage runs on Linux only, because vLLM does; this is {platform}."
    if version < OLDEST:
        return (
            f"omnistage needs Python 3.11 or newer and {sys.executable} is "
            f"{version[0]}.{version[1]}; name another one with `make PYTHON=python3.11`."
        )
    return None


def complain(sentence: str, code: int = 1) -> int:
    """Prints `sentence` on standard error and returns `code`."""
    print(f"omnistage: {sentence}", file=sys.stderr)
    return code


def fingerprint() -> dict[str, str]:
    """What `.venv` depends on; the stamp of a finished set-up holds the same record.

    Of pyproject.toml only what an installation reads: a changed lint rule reinstalls nothing.

    Raises:
        ValueError: pyproject.toml is not TOML.
    """
    import tomllib  # from Python 3.11 on, and an older one must come as far as its refusal

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tables = (
        project.get("build-system"),
        project.get("project"),
        project.get("tool", {}).get("hatch"),
    )
    digest = hashlib.sha256(json.dumps(tables).encode())
    digest.update(Path(__file__).read_bytes())
    return {
        "inputs": digest.hexdigest(),
        "python": "{}.{}".format(*sys.version_info[:2]),
        # Scripts in a virtual environment and the editable install hold absolute paths.
        "root": str(ROOT),
    }


def read_stamp() -> dict[str, str]:
    """The record of the last finished set-up; empty where there is none or it is unreadable."""
    try:
        record = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def is_ready(wanted: dict[str, str]) -> bool:
    """Whether `.venv` was finished for `wanted` and still has a Python to run."""
    return read_stamp() == wanted and os.access(PYTHON, os.X_OK)


@contextlib.contextmanager
def only_one_setup() -> Iterator[int]:
    """Holds a lock on the checkout's folder, so that two calls never share a `.venv`.

    Every step inherits the descriptor: a step that outlives a killed set-up still holds the lock.
    """
    lock = os.open(str(ROOT), os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this folder is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def build(wanted: dict[str, str], lock: int) -> None:
    """Runs every step, and leaves the stamp only after the last one.

    Raises:
        StepFailed: a step ended with an error.
        OSError: `.venv` or the log cannot be written.
    """
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    same_place = all(read_stamp().get(key) == wanted[key] for key in ("python", "root"))
    STAMP.unlink(missing_ok=True)
    if not (same_place and os.access(PYTHON, os.X_OK)):
        create(lock)
    install_torch(lock)
    run("installing omnistage and what it needs", [*INSTALL, "-e", f"{ROOT}[{EXTRAS}]"], lock)
    remove_unloadable(lock)
    run(
        "checking that vLLM loads",
        [str(PYTHON), "-c", "import vllm, transformers, omnistage"],
        lock,
    )
    pending = STAMP.with_suffix(".new")
    pending.write_text(json.dumps(wanted))
    pending.replace(STAMP)
    say("ready")


def create(lock: int) -> None:
    """Makes an empty `.venv`, in place of an unfinished one or one for another Python."""
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        say("starting over: .venv is unfinished or made for another place or Python")
        shutil.rmtree(VENV)
    run("creating .venv", [sys.executable, "-m", "venv", str(VENV)], lock)


def install_torch(lock: int) -> None:
    """Installs the CPU build, from pip's own configuration where that has it.

    PyTorch's index is asked only when it has none: another source may be closer, or the only one.
    """
    start = LOG.stat().st_size
    try:
        run("installing torch (CPU build, about 200 MB)", [*INSTALL, TORCH], lock)
    except StepFailed:
        with LOG.open() as log:
            log.seek(start)
            if "No matching distribution found for torch" not in log.read():
                raise
        run(
            "installing torch (CPU build) from PyTorch's own index",
            [*INSTALL, "--extra-index-url", TORCH_CPU_INDEX, TORCH],
            lock,
        )


def remove_unloadable(lock: int) -> None:
    """Uninstalls those of the optional torch packages that are installed and do not import."""
    broken = []
    for name in OPTIONAL:
        probe = (
            "import importlib.util as u, sys\nif u.find_spec(sys.argv[1]): __import__(sys.argv[1])"
        )
        try:
            run(f"trying {name}", [str(PYTHON), "-c", probe, name], lock)
        except StepFailed:
            broken.append(name)
    if broken:
        run(f"removing {', '.join(broken)}", [*PIP, "uninstall", "-y", *broken], lock)


def run(step: str, command: list[str], lock: int) -> None:
    """Runs one named step with its output in the log.

    Raises:
        StepFailed: the command ended with a code other than 0.
    """
    say(step)
    with LOG.open("a") as log:
        log.write(f"\n== {step}\n")
        log.flush()
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=step_environment(),
            pass_fds=(lock,),
            preexec_fn=die_with_parent,
            check=False,
        )
    if ended.returncode:
        raise StepFailed(step, ended.returncode)


def step_environment() -> dict[str, str]:
    """The caller's environment without what would make pip install elsewhere."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def die_with_parent() -> None:
    """Runs in the child, so that a killed set-up takes its step along and nobody waits for it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def log_tail(lines: int = 12) -> str:
    """The last lines of the log, and where it lies."""
    tail = LOG.read_text(errors="replace").splitlines()[-lines:]
    return "".join([f"\nThe log is {LOG}; it ends:", *(f"\n    {line}" for line in tail)])


def say(step: str) -> None:
    """Tells the person at the terminal what is going on."""
    print(f"omnistage: {step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

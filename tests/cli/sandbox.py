"""Runs the project's programs as a user would, and finds what they leave behind.

Each program gets a session of its own: every process it starts belongs to that, whatever becomes of
its parents, its group and its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

COMMAND = Path(sys.executable).with_name("omnistage")
PATIENCE_SECONDS = 120


class Done(NamedTuple):
    """A program that has ended."""

    code: int
    stdout: str
    stderr: str


class Sandbox:
    """A folder for output, one for temporary files, and the programs that were run with them."""

    def __init__(self, root: Path, **variables: str) -> None:
        self.output, self.temporary = root / "out", root / "tmp"
        self.output.mkdir(parents=True)
        self.temporary.mkdir()
        # As for a user: the suite's own level of logging is not what the command would choose.
        kept = {k: v for k, v in os.environ.items() if k != "VLLM_LOGGING_LEVEL"}
        self.environment: Mapping[str, str] = kept | {"TMPDIR": str(self.temporary)} | variables
        self._sessions: list[int] = []

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a program in a session of its own."""
        program = subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.output,
            text=True,
            start_new_session=True,
            **options,
        )
        self._sessions.append(program.pid)
        return program

    def run(self, *command: str | Path, stdin: str = "") -> Done:
        """Run a program to its end."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = self.start(*command, **pipes)
        try:
            stdout, stderr = program.communicate(stdin, PATIENCE_SECONDS)
        finally:
            program.kill()
        return Done(program.returncode, stdout, stderr)

    def processes(self) -> list[Any]:
        """Those that are alive, of all that the programs started."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def leftovers(self) -> list[str]:
        """Processes, sockets and hidden files that should be gone."""
        # multiprocessing's trackers clean up after the others have ended, then end themselves.
        trackers = [p for p in self.processes() if _is_tracker(p)]
        psutil.wait_procs(trackers, PATIENCE_SECONDS)
        sockets = sorted(path.name for path in self.temporary.glob("omni-*"))
        partial = sorted(path.name for path in self.output.glob(".*"))
        return [*map(str, self.processes()), *sockets, *partial]

    def shared_memory(self) -> set[str]:
        """Files of shared memory that the processes have mapped now."""
        found: set[str] = set()
        for process in self.processes():
            with contextlib.suppress(OSError):  # ended meanwhile
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found.update(re.findall(r"/dev/shm/\S+", maps))  # noqa: S108  read only
        return found

    def _is_ours(self, process: Any) -> bool:
        try:
            return (
                os.getsid(process.pid) in self._sessions
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except (psutil.Error, OSError):  # ended meanwhile
            return False


def _is_tracker(process: Any) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:  # ended meanwhile
        return False


class Terminal:
    """A program with a terminal of its own: what it shows there, and keys typed to it."""

    def __init__(self, sandbox: Sandbox, *command: str | Path) -> None:
        self.shown = ""
        self._keys, side = pty.openpty()
        self.program = sandbox.start(
            *command,
            stdin=side,
            stdout=subprocess.DEVNULL,
            stderr=side,
            # So that Ctrl-C reaches its whole process group, as in a shell.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(side)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.kill()
        self.program.wait()
        os.close(self._keys)

    def wait_for(self, text: str) -> None:
        """Return when the program has shown ``text``."""
        for _ in self._more():
            if text in self.shown:
                return
        raise AssertionError(f"it never showed {text!r}, but: {self.shown}")

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._keys, keys)

    def wait(self) -> int:
        """Read on until the program closes the terminal, and return its exit code."""
        for _ in self._more():
            pass
        return self.program.wait(PATIENCE_SECONDS)

    def _more(self) -> Iterator[None]:
        while True:
            yield
            try:
                piece = os.read(self._keys, 4096)
            except OSError:  # EIO: nobody has the other side open any more
                return
            self.shown += piece.decode(errors="replace")

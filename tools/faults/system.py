"""The processes under test: an AR service, two decoder services and a client, and what they own."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from tests.cli.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 240.0  # vLLM's spawn on a busy machine
DRAIN_SECONDS = 2
COMPILED = f"torchinductor_{getpass.getuser()}"
Event = dict[str, Any]


class Owned(NamedTuple):
    """What the processes of a part have, so that it can be looked for when they are gone."""

    shared: frozenset[str]
    ports: frozenset[int]


class Part:
    """One process of the system, in a session of its own, that prints JSON lines.

    Args:
        sandbox: Where it runs.
        name: Names its log.
        arguments: A module and its arguments.
    """

    def __init__(self, sandbox: Sandbox, name: str, *arguments: str) -> None:
        self.name = name
        self.log = sandbox.output / f"{name}.log"
        with self.log.open("w") as log:
            self.program = sandbox.start(
                *(sys.executable, "-m", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.events: list[Event] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the process itself has."""
        return self.program.poll() is not None

    def tell(self, command: str) -> None:
        """Give it a line."""
        stdin = self.program.stdin
        if stdin is not None:
            stdin.write(command + "\n")
            stdin.flush()

    def wait_for(self, test: Callable[[], bool], within: float) -> bool:
        """Wait until something holds, looked at with each line that it prints."""
        with self._news:
            return self._news.wait_for(test, within)

    def wait(self, within: float) -> None:
        """Wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.program.wait(within)

    def ready(self) -> Event:
        """Wait for its first line and return it."""
        if not self.wait_for(lambda: bool(self.events) or self.ended, PATIENCE_SECONDS):
            raise TimeoutError(f"{self.name} is not ready; see {self.log}")
        if not self.events:
            raise RuntimeError(f"{self.name} has ended; see {self.log}")
        return self.events[0]

    def processes(self) -> Iterator[Any]:
        """Those of its session that are alive."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile
                here = os.getsid(process.pid) == self.program.pid
                if here and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def owned(self) -> Owned:
        """Shared memory and listening ports of its session."""
        shared: set[str] = set()
        ports: set[int] = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                shared.update(re.findall(r"/dev/shm/\S+", maps))  # noqa: S108  read only
                ports.update(
                    c.laddr.port for c in process.net_connections() if c.status == "LISTEN"
                )
        return Owned(frozenset(shared), frozenset(ports))

    def left(self, owned: Owned, within: float) -> tuple[list[str], float]:
        """What is there ``within`` seconds after its end, and how long its processes took."""
        began = time.monotonic()
        while any(True for _ in self.processes()) and time.monotonic() - began < within:
            time.sleep(0.02)
        took = time.monotonic() - began
        left = [f"process {process.name()}" for process in self.processes()]
        left += [f"shared memory {path}" for path in sorted(owned.shared) if Path(path).exists()]
        open_ports = {c.laddr.port for c in psutil.net_connections() if c.status == "LISTEN"}
        left += [f"port {port}" for port in sorted(owned.ports & open_ports)]
        return left, took

    def _read(self) -> None:
        said = self.log.with_suffix(".jsonl")
        for line in self.program.stdout or ():
            with said.open("a") as copy:
                copy.write(line)
            if line.startswith("{"):  # not what vLLM's processes print as they end
                with self._news:
                    self.events.append(json.loads(line))
                    self._news.notify_all()
        self.program.wait()
        with self._news:
            self._news.notify_all()


class System:
    """An AR service, two decoder services and a client.

    Args:
        root: An empty folder with a short path.
        start: How vLLM starts its processes.
    """

    def __init__(self, root: Path, start: str) -> None:
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        variables = {"PYTHONPATH": path, "OMNISTAGE_FAULTS_START": start, "OMP_NUM_THREADS": "1"}
        self.sandbox = Sandbox(root, **variables)
        self._count = 0
        self.endpoint = "tcp://127.0.0.1:0"
        self.parts: dict[str, Part] = {}
        self._engine: Part | None = None
        self._known: set[str] = set()

    def start_all(self) -> None:
        """Start every part."""
        for name in ("ar", "decoder", "second", "client"):
            self.start(name)
        self._engine = self.parts["ar"]

    def start(self, name: str) -> float:
        """Start a part, and return the seconds until it was ready."""
        began = time.monotonic()
        self._count += 1
        if name == "client":
            arguments = ["tools.faults.client", self.endpoint]
        else:
            arguments = ["omnistage.cli", "stage", "ar" if name == "ar" else "decoder", "--json"]
            arguments += ["--metrics", "0", "--drain", str(DRAIN_SECONDS)]
            if name == "ar":
                arguments += ["--config", "tools.faults.stages:ar", "--bind", self.endpoint]
            else:
                arguments += ["--connect", self.endpoint, "--bind", "tcp://127.0.0.1:0"]
        part = Part(self.sandbox, f"{name}-{self._count}", *arguments)
        self.parts[name] = part
        ready = part.ready()
        if name == "ar":
            self.endpoint = ready["endpoint"]
        return time.monotonic() - began

    @property
    def client(self) -> Part:
        """The client."""
        return self.parts["client"]

    def running(self, name: str) -> int:
        """Requests in a service, as its ``/health`` says; -1 if it does not answer."""
        url = self.parts[name].ready()["metrics"].replace("/metrics", "/health")
        try:
            with urllib.request.urlopen(url, timeout=0.5) as answer:  # noqa: S310  our own
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        except OSError:
            return -1
        return int(json.loads(body)["running"])

    def pid_of(self, victim: str) -> int:
        """The process that a victim's name means."""
        if victim in {"engine", "worker"}:
            engine = _child(psutil.Process(self.parts["ar"].program.pid), "VLLM::Engine")
            return int((engine if victim == "engine" else _child(engine, "VLLM::Worker")).pid)
        return self.part_of(victim).program.pid

    def part_of(self, victim: str) -> Part:
        """The part that a victim belongs to."""
        return self.parts[PART_OF[victim]]

    def files(self) -> set[str]:
        """What is in the folder for temporary files."""
        return {path.name for path in self.sandbox.temporary.iterdir()} - {COMPILED}

    def left(self, before: set[str]) -> list[str]:
        """Files of what was ended, when it has been started again.

        Args:
            before: Those that were there when it ran.
        """
        files = self.files()
        directories = [name for name in files if name.startswith("omni-")]
        extra = len(directories) - sum(not part.ended for part in self.parts.values())
        gone = [f"{extra} directories"] if extra > 0 else []
        owner = self.parts["ar"]
        if self._engine is not owner:  # else they are the engine's still
            kept = {name for name in before & files if not name.startswith("omni-")}
            gone += sorted(kept - self._known)
            self._engine, self._known = owner, kept
        return gone

    def close(self) -> dict[str, int]:
        """Stop every part in order; returns the exit codes."""
        codes = {}
        for name in ("client", "decoder", "second", "ar"):
            part = self.parts.get(name)
            if part is None:
                continue
            if name == "client" and part.program.stdin is not None and not part.ended:
                part.program.stdin.close()
            elif not part.ended:
                part.program.terminate()
            codes[name] = part.program.wait(60)
        return codes

    def kill(self) -> None:
        """End whatever is left."""
        for process in self.sandbox.processes():
            process.kill()


PART_OF = {"engine": "ar", "worker": "ar", "ar": "ar", "decoder": "decoder", "gateway": "client"}


def _child(process: Any, name: str) -> Any:
    for child in process.children():
        if child.name().startswith(name):
            return child
    raise RuntimeError(f"process {process.pid} has no child {name}")

"""Each cell of the matrix: a signal to one process, idle or with streams, and what came of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from tools.faults.stages import STREAMS
from tools.faults.system import PATIENCE_SECONDS, Event, Part, System

VICTIMS = ("engine", "worker", "decoder", "gateway", "ar")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
FROZEN_SECONDS = 10.0
FREED_SECONDS = 20.0
STREAM_SECONDS = 5.0  # for streams that have not ended yet to end, or to show that they go on
GONE_SECONDS = 30.0
LOOK_SECONDS = 0.02
TRIES = 2
DECODERS = 2


@dataclass(kw_only=True)
class Cell:
    """What was done and measured; seconds count from the signal where nothing else is said.

    Args:
        victim: Which process.
        number: The signal's name.
        busy: Whether streams ran.
        ends: How the streams ended, and how many of them went on.
        says: An error's sentence, of each kind.
        last_error: When the last of those that failed did; None if none did.
        noticed: When the client's health said that nobody takes requests; None if it never did.
        freed: When the AR service had no request any more; None if not asked or never.
        at_once: How a request ended that came right after the signal, and when.
        code: Exit code of the victim's service, if it ended.
        gone: When every process of the victim's service had ended.
        restarted: Whether it was started again.
        again: Seconds until a new request succeeded and the client had both decoders, from when
            what had ended was ready again or what stood still went on.
        left: What was left behind.
    """

    victim: str
    number: str
    busy: bool
    ends: dict[str, int] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    last_error: float | None = None
    noticed: float | None = None
    freed: float | None = None
    at_once: str = ""
    code: int | None = None
    gone: float | None = None
    restarted: bool = False
    again: float | None = None
    left: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Matrix:
    """Runs cells one after the other on one system; what a cell ends is started again.

    Args:
        system: The processes.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._names = 0

    def cells(self) -> list[tuple[str, signal.Signals, bool]]:
        """All there are."""
        return list(product(VICTIMS, SIGNALS, (False, True)))

    def run(self, victim: str, number: signal.Signals, *, busy: bool) -> Cell:
        """Run one cell."""
        system = self._system
        cell = Cell(victim=victim, number=number.name, busy=busy)
        client, part = system.client, system.part_of(victim)
        streams = self._start_streams() if busy else ""
        pid, owned = system.pid_of(victim), part.owned()
        files = system.files()
        seen = len(client.events)
        began = time.monotonic()
        os.kill(pid, number)
        freed = _Freed(system, began) if victim == "gateway" else None
        probe = "" if victim == "gateway" else self._ask(client)
        woken = began
        if number is signal.SIGSTOP:
            time.sleep(FROZEN_SECONDS)
            os.kill(pid, signal.SIGCONT)
            woken = time.monotonic()
        else:
            part.wait(GONE_SECONDS)
        self._note_end(cell, part, owned, began)
        if freed is not None:
            cell.freed = freed.wait()
        if not client.ended:
            self._note_streams(cell, client, streams, seen, began, woken)
            cell.at_once = _outcome(client, probe, began)
        self._recover(cell, victim, woken)
        cell.left += system.left(files)
        return cell

    def _start_streams(self) -> str:
        """Start the streams and wait until each has had audio; again if one fails by itself."""
        for _ in range(TRIES):
            try:
                return self._try_to_start_streams()
            except RuntimeError as error:
                print(f"faults: {error}", flush=True)
                self._system.client.tell("stop")
                time.sleep(FROZEN_SECONDS)
        return self._try_to_start_streams()

    def _try_to_start_streams(self) -> str:
        client, name = self._system.client, self._name()
        client.tell(f"run {name} {STREAMS}")
        client.wait_for(
            lambda: len(_of(client, "first", name)) == STREAMS or bool(_of(client, "end", name)),
            PATIENCE_SECONDS,
        )
        if ends := _of(client, "end", name):
            raise RuntimeError(f"a stream ended before the signal: {ends[0]}")
        return name

    def _ask(self, client: Part) -> str:
        name = self._name()
        client.tell(f"one {name}")
        return name

    def _name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def _note_end(self, cell: Cell, part: Part, owned: Any, began: float) -> None:
        if cell.number == "SIGSTOP":
            return
        if not part.ended:
            cell.left.append(f"{part.name} runs on")
            part.program.kill()
            part.program.wait()
        cell.code = part.program.returncode
        cell.left += part.left(owned, GONE_SECONDS)[0]
        cell.gone = time.monotonic() - began

    def _note_streams(
        self, cell: Cell, client: Part, name: str, seen: int, began: float, woken: float
    ) -> None:
        for event in client.events[seen:]:
            if event["what"] == "health" and not event["ok"] and cell.noticed is None:
                cell.noticed = event["at"] - began
        if not name:
            return
        client.wait_for(
            lambda: len(_of(client, "end", name)) == STREAMS,
            STREAM_SECONDS,
        )
        client.tell("stop")
        client.wait_for(lambda: client.events[-1]["what"] == "stopped", GONE_SECONDS)
        last = client.events[-1]["last"]
        ends = {event["id"]: event for event in _of(client, "end", name)}
        counted: Counter[str] = Counter()
        for index in range(STREAMS):
            end = ends.get(f"{name}-{index}")
            if end is None:
                goes_on = last[f"{name}-{index}"] > max(woken, began + 1.0)
                counted["go on" if goes_on else "hang"] += 1
            else:
                counted[end["error"] or "finished"] += 1
        cell.ends = dict(counted.most_common())
        cell.says = {end["error"]: end["message"] for end in ends.values() if end["error"]}
        errors = [event["at"] for event in ends.values() if event["error"]]
        cell.last_error = max(errors) - began if errors else None

    def _recover(self, cell: Cell, victim: str, woken: float) -> None:
        """Start again what has ended; have a request spoken, and another until all is there."""
        system = self._system
        part = system.part_of(victim)
        if part.ended:
            name = next(name for name, one in system.parts.items() if one is part)
            system.start(name)
            cell.restarted = True
            woken = time.monotonic()
        client = system.client
        deadline = time.monotonic() + GONE_SECONDS
        while time.monotonic() < deadline:
            name = self._ask(client)
            client.wait_for(lambda name=name: bool(_of(client, "end", name)), GONE_SECONDS)  # type: ignore[misc]
            (end,) = _of(client, "end", name) or [{"error": "hangs", "at": 0.0}]
            if end["error"] is None and _decoders(client) == DECODERS:
                cell.again = end["at"] - woken
                return
            time.sleep(LOOK_SECONDS)


class _Freed:
    """Watches, in a thread, when the AR service has no requests any more."""

    def __init__(self, system: System, began: float) -> None:
        self._system = system
        self._began = began
        self._at: float | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> float | None:
        """When it had none."""
        self._thread.join()
        return self._at

    def _run(self) -> None:
        while time.monotonic() - self._began < FREED_SECONDS:
            if self._system.running("ar") == 0:
                self._at = time.monotonic() - self._began
                return
            time.sleep(LOOK_SECONDS)


def _decoders(client: Part) -> int:
    """Those that the client can use now."""
    known = [event for event in list(client.events) if event["what"] == "health"]
    return int(known[-1]["decoders"]) if known else 0


def _of(client: Part, what: str, name: str) -> list[Event]:
    """Events of a request, or of all streams of a run."""
    return [
        event
        for event in list(client.events)
        if event["what"] == what and str(event["id"]).partition("-")[0] == name
    ]


def _outcome(client: Part, name: str, began: float) -> str:
    if not name:
        return ""
    client.wait_for(lambda: bool(_of(client, "end", name)), GONE_SECONDS)
    ends = _of(client, "end", name)
    if not ends:
        return "hangs"
    return f"{ends[0]['error'] or 'succeeds'}, {ends[0]['at'] - began:.1f} s"

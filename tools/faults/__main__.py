"""Runs the matrix, prints it, and writes the table in docs/faults.md when all of it was run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from tools.faults.matrix import Cell, Matrix
from tools.faults.stages import STREAMS
from tools.faults.system import System

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- made by `make faults` -->", "<!-- end -->"
HEAD = (
    *("process", "signal", "load", "streams", "last error", "request at once", "freed", "exit"),
    *("gone", "next request", "left"),
)


def main() -> int:
    """Prints each cell as it ends; 1 if something was left or did not recover."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose PROCESS/SIGNAL/LOAD has this in it")
    parser.add_argument("--start", choices=["spawn", "fork"], default="spawn")
    parser.add_argument("--keep", type=Path, help="an empty folder for logs and results")
    arguments = parser.parse_args()
    root = arguments.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.monotonic()
    system = System(root, arguments.start)
    cells: list[Cell] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes
    try:
        system.start_all()
        print(f"faults: ready after {time.monotonic() - began:.0f} s, logs in {root}", flush=True)
        print("faults: " + " | ".join(HEAD))
        matrix = Matrix(system)
        for victim, number, busy in matrix.cells():
            if wanted(arguments.only, victim, number, busy=busy):
                cells.append(matrix.run(victim, number, busy=busy))
                print("faults: " + " | ".join(row(cells[-1])), flush=True)
                (root / "cells.json").write_text(json.dumps([cell.as_dict() for cell in cells]))
        codes = system.close()
        left = system.sandbox.leftovers()
        print(f"faults: in the end exit codes {codes}, left: {left or 'nothing'}")
    finally:
        system.kill()
    print(f"faults: {len(cells)} cells in {time.monotonic() - began:.0f} s")
    if not arguments.only and arguments.start == "spawn":
        write(cells)
    bad = [cell for cell in cells if not is_in_order(cell)]
    return 1 if bad or left or any(codes.values()) else 0


def is_in_order(cell: Cell) -> bool:
    """Whether every stream had an end or went on, requests are served again, nothing is left."""
    ended = "hang" not in cell.ends and not any(how.startswith("untyped") for how in cell.ends)
    return ended and cell.again is not None and all(map(is_vllms, cell.left))


def is_vllms(name: str) -> bool:
    """Whether a file is the one that a worker removes as it ends, which a killed one cannot."""
    return name.startswith("vllm_dist_")


def wanted(only: str, victim: str, number: signal.Signals, *, busy: bool) -> bool:
    """Whether a cell was asked for."""
    return only in f"{victim}/{number.name}/{'busy' if busy else 'idle'}"


def row(cell: Cell) -> list[str]:
    """A cell as the table has it."""
    ends = ", ".join(f"{count} {how}" for how, count in cell.ends.items())
    again = "never" if cell.again is None else f"{cell.again:.1f} s"
    return [
        cell.victim,
        cell.number,
        f"{STREAMS} streams" if cell.busy else "idle",
        ends or "-",
        seconds(cell.last_error if cell.busy else cell.noticed),
        cell.at_once or "-",
        seconds(cell.freed),
        "-" if cell.code is None else str(cell.code),
        seconds(cell.gone),
        again + (", restarted" if cell.restarted else ""),
        ", ".join("a file of vLLM's" if is_vllms(name) else name for name in cell.left)
        or "nothing",
    ]


def seconds(value: float | None) -> str:
    """A time of the table."""
    return "-" if value is None else f"{value:.1f} s"


def write(cells: list[Cell]) -> None:
    """Put the table into the document."""
    lines = [" | ".join(HEAD), " | ".join("---" for _ in HEAD)]
    lines += [" | ".join(row(cell)) for cell in cells]
    table = "\n".join(f"| {line} |" for line in lines)
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(main())

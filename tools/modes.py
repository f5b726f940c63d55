"""Runs the tests that prove a way of running vLLM, and writes what holds into ``docs/modes.md``.

A test says what it proves with ``@pytest.mark.mode(name, remark)``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modes.md"
TIMEOUT_SECONDS = 1500
HEAD = """# Ways of running vLLM

What omnistage was run with, end to end on real vLLM; `make modes` runs these tests and writes this
page. "Refused" is a sentence at start or at submission, never a wrong answer. What is not here is
untried.

| way | how, and what is meant | proven by | result |
| --- | --- | --- | --- |
"""


class Mode(NamedTuple):
    """One way of running vLLM.

    Args:
        name: What it is called.
        remark: How it is had, or why it is refused.
        tests: The tests that prove it.
        failed: Those of them that did not pass.
    """

    name: str
    remark: str
    tests: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def result(self) -> str:
        """One word."""
        if self.failed:
            return "**fails**"
        return "refused" if self.remark.startswith("refused") else "works"


class Collected:
    """A pytest plugin: notes each test's modes, and how it went."""

    def __init__(self, to: Path) -> None:
        self._to = to
        self._modes: dict[str, list[tuple[str, str]]] = {}
        self._failed: set[str] = set()
        self._passed: set[str] = set()

    @pytest.hookimpl(trylast=True)  # after those that `-m` leaves out
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that prove a mode."""
        items[:] = [item for item in items if item.get_closest_marker("mode")]
        for item in items:
            marks = [
                (mark.args[0], mark.args[1] if len(mark.args) > 1 else "")
                for mark in item.iter_markers("mode")
            ]
            self._modes[item.nodeid] = marks

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test went, its setup and teardown included."""
        if report.failed or report.skipped:
            self._failed.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        found: dict[str, dict[str, Any]] = {}
        for test, marks in self._modes.items():
            for name, remark in marks:
                mode = found.setdefault(name, {"remarks": [], "tests": [], "failed": []})
                function = test.partition("[")[0]
                if remark and remark not in mode["remarks"]:
                    mode["remarks"].append(remark)
                if function not in mode["tests"]:
                    mode["tests"].append(function)
                if test in self._failed or test not in self._passed:
                    mode["failed"].append(test)
        self._to.write_text(json.dumps(found))


def pytest_configure(config: Any) -> None:
    """Called by pytest where this module is its plugin."""
    to = os.environ.get("OMNISTAGE_MODES")
    if to:
        config.pluginmanager.register(Collected(Path(to)), "omnistage-modes")


def prove() -> list[Mode]:
    """Run the tests.

    Raises:
        RuntimeError: pytest ended before it could say how they went.
    """
    with TemporaryDirectory() as directory:
        to = Path(directory) / "modes.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.modes", "-m", "not slow"]
        subprocess.run(
            [*command, "tests"],
            cwd=ROOT,
            env={**os.environ, "OMNISTAGE_MODES": str(to), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if not to.exists():
            raise RuntimeError("pytest ended early; what it printed says why")
        found = json.loads(to.read_text())
    return [
        Mode(name, "; ".join(m["remarks"]), tuple(m["tests"]), tuple(m["failed"]))
        for name, m in sorted(found.items(), key=lambda item: _order(item[0], item[1]))
    ]


def page(modes: list[Mode]) -> str:
    """The page as it should read."""
    rows = []
    for mode in modes:
        tests = ", ".join(f"`{test}`" for test in mode.tests)
        rows.append(f"| {mode.name} | {mode.remark} | {tests} | {mode.result} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    """Prints the table, writes the page; 0 only if every mode holds."""
    modes = prove()
    PAGE.write_text(page(modes))
    for mode in modes:
        print(f"modes: {mode.result.strip('*'):8} {mode.name}")
        for test in mode.failed:
            print(f"modes:          {test}")
    failed = sum(bool(mode.failed) for mode in modes)
    print(f"modes: {len(modes)} ways of running vLLM, {failed} fail; see {PAGE.name}")
    return 1 if failed or not modes else 0


def _order(name: str, mode: dict[str, Any]) -> tuple[bool, str]:
    """What is refused comes last."""
    return any(remark.startswith("refused") for remark in mode["remarks"]), name.lower()


if __name__ == "__main__":
    sys.exit(main())

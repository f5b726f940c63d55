"""Prints the table of public failure cases, and fails where a case has nothing that holds it.

The table is `tests/cases.md`. A case is held by tests that reproduce it, or by a mechanism that
makes it impossible together with the test that breaks if the mechanism goes.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "cases.md"

REQUIRED: Mapping[str, tuple[int, ...]] = {
    "A": (1, 2, 3, 4, 5, 6, 7, 9, 10),
    "B": (1, 2, 3, 4, 5, 6, 8, 9, 10, 11),
    "C": (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19, 20, 21),
    "D": (1, 2, 3, 4, 5, 6, 7, 8, 10, 11),
    "E": (1, 2, 3, 4, 6, 7, 8),
    "F": (1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13, 14),
    "G": (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13),
    "H": (1, 2, 3, 4, 5, 6, 7, 8),
    "I": (2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18),
    "J": (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 18, 19),
}
"""The cases that must have a row, by group; those left out of the numbering are no cases."""

LARGEST_SHARE = 1 / 5
"""Of all rows, those that may be a mechanism instead of a test."""

IMPOSSIBLE = "impossible by:"

_ROW = re.compile(r"^\| *([A-Z]\d+) *\|(.*)\|(.*)\|\s*$", re.MULTILINE)
_TEST = re.compile(r"`([\w./-]+\.py)::([\w:]+)`")
_MECHANISM = re.compile(r"`([\w./-]+\.py)`, `([\w.]+)`")


class Case(NamedTuple):
    """One row of the table.

    Args:
        name: Group and number.
        failure: What went wrong elsewhere.
        tests: Path and name of each test, as pytest selects it.
        mechanism: File and symbol that make the failure impossible; None where tests reproduce it.
    """

    name: str
    failure: str
    tests: tuple[tuple[str, str], ...]
    mechanism: tuple[str, str] | None


class Source:
    """What a Python file defines, classes with their members, and what is only run on request."""

    def __init__(self, path: Path) -> None:
        self.names: set[str] = set()
        self.slow: set[str] = set()
        self._take(ast.parse(path.read_text()).body, "")

    def _take(self, body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            for name in _defined(node):
                self.names.add(prefix + name)
                if any("mark.slow" in ast.unparse(mark) for mark in _decorators(node)):
                    self.slow.add(prefix + name)
            if isinstance(node, ast.ClassDef):
                self._take(node.body, f"{prefix}{node.name}.")


def read(text: str) -> list[Case]:
    """The table's rows, in order; a mechanism without its file and symbol has them empty."""
    cases = []
    for name, failure, held in _ROW.findall(text):
        mechanism = None
        if held.strip().startswith(IMPOSSIBLE):
            found = _MECHANISM.search(held)
            mechanism = (found[1], found[2]) if found else ("", "")
        cases.append(Case(name, failure.strip(), tuple(_TEST.findall(held)), mechanism))
    return cases


def gaps(
    cases: list[Case], root: Path = ROOT, required: Mapping[str, tuple[int, ...]] = REQUIRED
) -> list[str]:
    """What is wrong with the table, one sentence each; empty if every case is held."""
    wanted = [f"{group}{number}" for group, numbers in required.items() for number in numbers]
    names = [case.name for case in cases]
    found = [f"{name} has no row" for name in wanted if name not in names]
    found += [f"{name} is no required case" for name in names if name not in wanted]
    found += [f"{name} has several rows" for name in dict.fromkeys(names) if names.count(name) > 1]
    sources: dict[str, Source | None] = {}
    for case in cases:
        found += [f"{case.name} {what}" for what in _gaps_of(case, root, sources)]
    mechanisms = sum(case.mechanism is not None for case in cases)
    if mechanisms > LARGEST_SHARE * len(cases):
        found.append(
            f"{mechanisms} of {len(cases)} rows name a mechanism instead of a test that reproduces "
            f"the case; at most {LARGEST_SHARE:.0%} may"
        )
    return found


def summary(cases: list[Case]) -> str:
    """How many cases each group has, and by what they are held."""
    lines = ["group  cases  by tests  by a mechanism  tests"]
    for group in [*sorted({case.name[0] for case in cases}), "all"]:
        own = [case for case in cases if group in {case.name[0], "all"}]
        by_mechanism = sum(case.mechanism is not None for case in own)
        tests = {test for case in own for test in case.tests}
        share = f" ({by_mechanism / len(own):.0%})" if group == "all" and own else ""
        lines.append(
            f"{group:<5}{len(own):>7}{len(own) - by_mechanism:>10}"
            f"{f'{by_mechanism}{share}':>16}{len(tests):>7}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints table, summary and gaps; 0 only without a gap."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    cases = read(parser.parse_args(arguments).table.read_text())
    for case in cases:
        print(f"{case.name:<4} {case.failure}")
        if case.mechanism is not None:
            print("       impossible by {}, {}".format(*case.mechanism))
        for path, name in case.tests:
            print(f"       {path}::{name}")
    print(f"\n{summary(cases)}")
    found = gaps(cases)
    for gap in found:
        print(f"cases: {gap}", file=sys.stderr)
    return 1 if found else 0


def _gaps_of(case: Case, root: Path, sources: dict[str, Source | None]) -> Iterator[str]:
    def source(path: str) -> Source | None:
        if path not in sources:
            file = root / path
            sources[path] = Source(file) if file.is_file() else None
        return sources[path]

    if not case.failure:
        yield "does not say what fails"
    if not case.tests:
        yield "names no test"
    slow = 0
    for path, name in case.tests:
        tests = source(path) if path.startswith("tests/") else None
        dotted = name.replace("::", ".")
        if tests is None or dotted not in tests.names or "test_" not in dotted:
            yield f"names {path}::{name}, which is no test"
        else:
            slow += dotted in tests.slow
    if case.tests and slow == len(case.tests):
        yield "names no test that `make test` runs"
    if case.mechanism is not None:
        path, symbol = case.mechanism
        code = source(path) if path else None
        if not symbol:
            yield "is said to be impossible, but not by which file and symbol"
        elif code is None or symbol not in code.names:
            yield f"relies on {symbol} in {path}, which does not exist"


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name() as target):
            return [target.id]
    return []


def _decorators(node: ast.stmt) -> list[ast.expr]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.decorator_list
    return []


if __name__ == "__main__":
    sys.exit(main())

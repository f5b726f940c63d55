"""The page of modes has every mode that a test proves, and no other."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.modes import PAGE, Mode, page

ROOT = Path(__file__).resolve().parents[2]


def marked() -> dict[str, set[str]]:
    """The tests of each mode, read off the marks."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                if ast.unparse(decorator).startswith("pytest.mark.mode("):
                    assert isinstance(decorator, ast.Call)
                    name = ast.literal_eval(decorator.args[0])
                    test = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                    found.setdefault(name, set()).add(test)
    return found


def test_the_page_lists_the_tests_that_are_marked() -> None:
    listed = {}
    for line in PAGE.read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in {"way", "---"}:
            listed[cells[0]] = set(cells[2].replace("`", "").split(", "))
    assert listed == marked()


def test_a_mode_fails_if_one_of_its_tests_does() -> None:
    works = Mode("a", "how", ("t.py::a",), ())
    refused = Mode("b", "refused: why", ("t.py::b",), ())
    broken = Mode("c", "how", ("t.py::c", "t.py::d"), ("t.py::d[x]",))
    assert [mode.result for mode in (works, refused, broken)] == ["works", "refused", "**fails**"]
    assert "| a | how | `t.py::a` | works |\n" in page([works, refused, broken])

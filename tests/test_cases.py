"""The table of public cases has no gap, and the tool that says so finds each kind of gap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.cases import REQUIRED, TABLE, Case, gaps, main, read, summary

NEEDED = {"A": (1, 2, 5), "C": (3, 4, 6)}
TESTED = "`tests/test_it.py::test_it`"
HEADER = "| case | what went wrong | held by |\n| --- | --- | --- |\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n"
        "def test_it(): ...\n"
        "def factory(): ...\n"
        "@pytest.mark.slow\n"
        "async def test_long(): ...\n"
        "class TestMore:\n"
        "    def test_inside(self): ...\n"
    )
    (tmp_path / "code.py").write_text("LIMIT: int = 3\nclass Gate:\n    def check(self): ...\n")
    return tmp_path


def table(**changed: str | None) -> list[Case]:
    """A table without a gap, some cells replaced, or their rows left out."""
    cells: dict[str, str | None] = {
        f"{group}{number}": TESTED for group, numbers in NEEDED.items() for number in numbers
    }
    rows = [
        f"| {name} | it broke | {held} |" for name, held in {**cells, **changed}.items() if held
    ]
    return read(HEADER + "\n".join(rows) + "\n")


def test_a_table_in_which_every_case_is_held_has_no_gap(repository: Path) -> None:
    assert gaps(table(), repository, NEEDED) == []
    held = "`tests/test_it.py::TestMore::test_inside`, `tests/test_it.py::test_long`"
    assert gaps(table(A1=held), repository, NEEDED) == []
    for symbol in ("LIMIT", "Gate", "Gate.check"):
        held = f"impossible by: `code.py`, `{symbol}` (so it is); {TESTED}"
        assert gaps(table(A1=held), repository, NEEDED) == []


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (None, "A1 has no row"),
        (" ", "A1 names no test"),
        ("by and by", "A1 names no test"),
        (
            "`tests/test_it.py::test_other`",
            "A1 names tests/test_it.py::test_other, which is no test",
        ),
        ("`tests/test_no.py::test_it`", "A1 names tests/test_no.py::test_it, which is no test"),
        ("`tests/test_it.py::factory`", "A1 names tests/test_it.py::factory, which is no test"),
        ("`tests/test_it.py::test_inside`", "A1 names tests/test_it.py::test_inside, which is"),
        ("`code.py::Gate`", "A1 names code.py::Gate, which is no test"),
        ("`tests/test_it.py::test_long`", "A1 names no test that `make test` runs"),
        ("impossible by: `code.py`, `Gate`", "A1 names no test"),
        (f"impossible by: `code.py`, `Door`; {TESTED}", "A1 relies on Door in code.py, which does"),
        (f"impossible by: `no.py`, `Gate`; {TESTED}", "A1 relies on Gate in no.py, which does not"),
        (f"impossible by: its nature; {TESTED}", "A1 is said to be impossible, but not by which"),
    ],
)
def test_a_case_that_nothing_holds_is_named_with_what_is_missing(
    repository: Path, held: str | None, sentence: str
) -> None:
    (gap,) = gaps(table(A1=held), repository, NEEDED)
    assert gap.startswith(sentence)


def test_a_row_that_is_no_case_or_stands_twice_or_says_nothing_is_named(repository: Path) -> None:
    assert gaps(table(A3=TESTED), repository, NEEDED) == ["A3 is no required case"]
    assert gaps([*table(), *table()[:1]], repository, NEEDED) == ["A1 has several rows"]
    silent = [case._replace(failure="") for case in table()[:1]]
    assert gaps([*silent, *table()[1:]], repository, NEEDED) == ["A1 does not say what fails"]


def test_more_than_one_mechanism_in_five_rows_is_too_many(repository: Path) -> None:
    mechanism = f"impossible by: `code.py`, `Gate`; {TESTED}"
    assert gaps(table(A1=mechanism), repository, NEEDED) == []
    (gap,) = gaps(table(A1=mechanism, C3=mechanism), repository, NEEDED)
    assert gap.startswith("2 of 6 rows name a mechanism")


def test_the_summary_counts_cases_tests_and_mechanisms_by_group() -> None:
    mechanism = f"impossible by: `code.py`, `Gate`; {TESTED}"
    lines = summary(table(A1=mechanism)).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["A", "3", "2", "1", "1"],
        ["C", "3", "3", "0", "1"],
        ["all", "6", "5", "1", "(17%)", "1"],
    ]


def test_the_command_prints_the_table_and_fails_on_a_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "cases.md"
    broken.write_text(TABLE.read_text().replace("| A1 |", "| A8 |"))
    assert main([str(broken)]) == 1
    assert "cases: A1 has no row\ncases: A8 is no required case\n" in capsys.readouterr().err
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(f"\n{group} " in printed.out for group in REQUIRED)


def test_every_required_case_is_held() -> None:
    assert gaps(read(TABLE.read_text())) == []
    assert sum(map(len, REQUIRED.values())) == 119

"""Other versions of vLLM: what is written of them names what is there, and gaps are told."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tools import versions, watch
from tools.upstream import unpack
from tools.versions import Found, Note, Release, Result, not_installed, page, unread

ROOT = Path(__file__).resolve().parents[2]
NEXT = Release("0.33.0", "somewhere", versions.from_sdist)
LAST = Release("0.31.0", "somewhere", versions.from_wheel)


def found(**changes: Any) -> Found:
    return Found(
        **{"imports": {"a": None}, "changed": {}, "passed": ["t.py::a"], "failed": {}} | changes
    )


def test_what_has_been_read_names_tests_and_watched_names() -> None:
    for version in json.loads(versions.READ.read_text()):
        note = versions.notes(version)
        assert set(note.names) <= set(watch.names())
        for test in [test for tests in note.tests.values() for test in tests]:
            path, _, name = test.partition("::")
            defined = [
                getattr(node, "name", "") for node in ast.parse((ROOT / path).read_text()).body
            ]
            assert name in defined, test


def test_the_page_is_of_these_versions_and_leaves_nothing_unread() -> None:
    text = versions.PAGE.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## {release.version}" for release in versions.RELEASES
    ]
    assert "**not read**" not in text
    for version in json.loads(versions.READ.read_text()):
        assert all(f"`{name}`" in text for name in versions.notes(version).names)


def test_only_a_supported_version_has_to_be_read() -> None:
    assert NEXT.supported
    assert not LAST.supported
    broken = found(
        imports={"a": "ImportError: b"}, failed={"t.py::b[1]": "boom"}, changed={"C.d": "is gone"}
    )
    assert unread(Result(LAST, broken, Note({}, {}))) == []
    assert unread(Result(NEXT, broken, Note({}, {}))) == [
        "a cannot be imported: ImportError: b",
        "t.py::b[1] fails: boom",
        "C.d is gone",
    ]
    text = page([Result(NEXT, broken, Note({}, {}))], "0.32.0")
    assert "`a` cannot be imported: ImportError: b" in text
    assert "| `t.py::b` | **not read** |" in text
    assert "| `C.d` | **not read** |" in text


def test_what_was_read_and_is_no_longer_so_is_told() -> None:
    note = Note({"why": ["t.py::b"]}, {"C.d": "nothing"})
    broken = found(failed={"t.py::b[1]": "boom"}, changed={"C.d": "is gone"})
    assert unread(Result(NEXT, broken, note)) == []
    text = page([Result(NEXT, broken, note)], "0.32.0")
    assert "| `t.py::b` | why |" in text
    assert "| `C.d` | nothing |" in text
    assert len(unread(Result(NEXT, found(), note))) == 2


def test_a_requirement_is_installed_where_no_version_of_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name != "here":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    lines = [
        "# a remark",
        "",
        "here>=2  # why",
        "there>=3; python_version > '3'",
        "x; python_version < '3'",
    ]
    assert not_installed(lines) == ["there>=3"]


def test_of_an_sdist_only_what_is_asked_for_is_unpacked(tmp_path: Path) -> None:
    source = tmp_path / "source" / "v-1"
    for name in ("vllm/a.py", "tests/b.py", "PKG-INFO"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    with tarfile.open(tmp_path / "v-1.tar.gz", "w:gz") as archive:
        archive.add(source, "v-1")
    unpack(tmp_path / "v-1.tar.gz", tmp_path / "root", "vllm", "PKG-INFO")
    files = sorted(
        p.relative_to(tmp_path / "root").as_posix() for p in (tmp_path / "root").rglob("*.*")
    )
    assert files == ["vllm/a.py"]
    assert (tmp_path / "root" / "PKG-INFO").read_text() == "PKG-INFO"

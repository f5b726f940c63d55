"""Reads the project's documents: their code blocks, sections, tables and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for name, text in _FENCE.findall(page.read_text()) if name == language]


def python_blocks(page: Path) -> list[str]:
    return blocks(page, "python")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def first_column(page: Path, heading: str) -> list[str]:
    """The names in the first column of the first table below the heading that begins so."""
    _, found, rest = page.read_text().partition(f"\n{heading}")
    assert found, f"{page.name} has no heading {heading!r}"
    section = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(path, anchor) of the page's relative links."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

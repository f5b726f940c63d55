"""Long text to pieces that the talker speaks well: at sentence ends, at commas, then elsewhere.

Sentences are those of :mod:`omnistage.sentences`. Nothing is dropped, moved or changed: the pieces
together hold the words of the text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from omnistage.sentences import CLAUSE, sentences

if TYPE_CHECKING:
    from collections.abc import Callable

_WORD: Final = re.compile(r"\d|[^\W\d_]+(?:['’.][^\W\d_]+)*")  # noqa: RUF001
# A clause may begin with one of these; where there is no comma, a cut before one is heard least.
_OPENERS: Final = frozenset(
    [
        "and",
        "but",
        "or",
        "nor",
        "so",
        "yet",
        "because",
        "although",
        "though",
        "while",
        "when",
        "where",
        "which",
        "who",
        "that",
        "if",
        "unless",
        "until",
        "since",
        "before",
        "after",
        "as",
        "than",
        "to",
        "of",
        "in",
        "on",
        "at",
        "by",
        "for",
        "from",
        "with",
        "without",
        "under",
        "over",
        "into",
    ]
)


def count(text: str) -> int:
    """How many words a text has, about: digits are spoken one by one at the most."""
    return len(_WORD.findall(text))


def pieces(text: str, most: int, is_said: Callable[[str], object] = count) -> list[str]:
    """Cut a text into pieces of at most ``most`` words, at the best places there are.

    Args:
        text: Any text.
        most: Words a piece; a digit counts as one.
        is_said: Whether a part of the text has something to say by itself.

    Returns:
        The pieces, in order and each with something to say, unless the text has nothing: then it
        is the only piece.
    """
    cut: list[str] = []
    for sentence in _said(sentences(text), is_said):
        if count(sentence) <= most:
            cut.append(sentence)
        else:
            cut += _packed(_clauses(sentence, most, is_said), most)
    return cut or [text]


def _said(parts: list[str], is_said: Callable[[str], object]) -> list[str]:
    """Parts with nothing to say, such as a lone dash or a smiley, joined to their neighbour."""
    joined: list[str] = []
    ahead = ""
    for part in parts:
        if not part:
            continue
        if is_said(part):
            joined.append(f"{ahead} {part}".strip())
            ahead = ""
        elif joined:
            joined[-1] += f" {part}"
        else:
            ahead = f"{ahead} {part}".strip()
    return joined


def _clauses(sentence: str, most: int, is_said: Callable[[str], object]) -> list[str]:
    """A sentence cut behind its commas; a clause that is still too long, between words."""
    found, start = [], 0
    for match in CLAUSE.finditer(sentence):
        found.append(sentence[start : match.end()].strip())
        start = match.end()
    found.append(sentence[start:].strip())
    clauses: list[str] = []
    for clause in _said(found, is_said):
        clauses += [clause] if count(clause) <= most else _halves(clause, most)
    return clauses


def _halves(clause: str, most: int) -> list[str]:
    """Cut where the parts are about equal, before a word that opens a phrase if one is near."""
    words = clause.split()
    before = [0]
    for word in words:
        before.append(before[-1] + count(word))
    total = before[-1]
    places = [at for at in range(1, len(words)) if 0 < before[at] < total]
    if total <= most or not places:
        return [clause]

    def cost(at: int) -> float:
        opener = words[at].lower().strip("\"'(") in _OPENERS
        return abs(before[at] - total / 2) - (total / 4 if opener else 0)

    at = min(places, key=cost)
    left, right = " ".join(words[:at]), " ".join(words[at:])
    return [*_halves(left, most), *_halves(right, most)]


def _packed(clauses: list[str], most: int) -> list[str]:
    """Neighbouring clauses put together again as long as they fit."""
    packed: list[str] = []
    for clause in clauses:
        if packed and count(packed[-1]) + count(clause) <= most:
            packed[-1] += f" {clause}"
        else:
            packed.append(clause)
    return packed

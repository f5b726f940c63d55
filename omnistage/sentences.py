"""Text to sentences, also as it comes: each is there as soon as what follows shows its end.

The rules are those of Latin and CJK punctuation; of languages they know a few English abbreviations
and nothing else. Nothing is dropped, moved or changed but the white space around a sentence, which
goes.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 300
"""Characters of a sentence from a text as it comes, 20 seconds of speech; beyond, it is cut."""

CLAUSE: Final = re.compile(
    r"""[,;:—–][’”"')\]]*(?=\s)|\s[-–—](?=\s)|[，、；：][’”」』）】]*"""  # noqa: RUF001
)
"""Where a sentence that is too long can be cut: behind each match."""

_AT_AN_END_TOO: Final = frozenset(
    ["etc", "a.m", "p.m", "inc", "ltd", "co", "corp", "jr", "sr", "u.s", "u.k"]
)
_ABBREVIATIONS: Final = _AT_AN_END_TOO.union(
    ["mr", "mrs", "ms", "dr", "prof", "st", "gen", "col", "lt", "sgt", "capt", "rev", "hon"],
    ["jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec"],
    ["vs", "e.g", "i.e", "approx", "dept", "est"],
)
_BEFORE_A_NUMBER: Final = frozenset(["no", "nos", "vol", "fig", "p", "pp", "ch"])
_WORD: Final = 32  # more characters than an abbreviation has, with the brackets before it
# What may end a sentence, with the quotes and brackets behind it.
_END: Final = re.compile(r"""[.!?…。！？｡]+['")\]’”»」』）】〉》]*|\n[^\S\n]*\n""")  # noqa: RUF001
_CJK_END: Final = re.compile("[。！？｡]")  # noqa: RUF001
_NO_SPACE: Final = re.compile(r"\S")
_SPACE: Final = re.compile(r"\s")
_LARGEST_COUNT: Final = 3  # digits of the number before an item of a list


class SentenceCutter:
    """Cuts one text, which may come in parts of any size: the sentences are always the same.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` with white space behind it, at the full stop and
    the wide marks of CJK text without, and at a blank line; quotes and brackets that close behind
    such a mark belong to it. So it is complete with the first character that is no such mark any
    more: a space, the next word. Not an end is the dot of an abbreviation (``e.g.``, ``Dr.``), of
    an initial, or of a number that counts the items of a list; where an abbreviation may end a
    sentence as well, the next word shows it. What has no letter and no digit, a dash or a smiley,
    is no sentence: it belongs to the next one.

    Args:
        longest: Characters of a sentence. A longer one is cut behind its last comma or colon if
            there is one in the second half, else between two words, else anywhere; None cuts none.
    """

    def __init__(self, longest: int | None = LONGEST) -> None:
        self._longest = longest
        self._text = ""  # from the beginning of the sentence that is not complete

    def feed(self, text: str) -> list[str]:
        """Take more of the text.

        Returns:
            The sentences that are complete now, without white space around them.
        """
        self._text += text
        return self._cut(ended=False)

    def flush(self) -> list[str]:
        """Take note of the text's end.

        Returns:
            What is left, mostly one sentence or none; one without a word if the text ends so.
        """
        found = self._cut(ended=True)
        rest, self._text = self._text.strip(), ""
        return [*found, rest] if rest else found

    def _cut(self, *, ended: bool) -> list[str]:
        text, start = self._text, 0
        found: list[str] = []
        while (first := _NO_SPACE.search(text, start)) is not None:
            start = first.start()
            end = self._end(text, start, ended=ended)
            if end is None:
                break
            found.append(text[start:end].rstrip())
            start = end
        self._text = "" if first is None else text[start:]
        return found

    def _end(self, text: str, start: int, *, ended: bool) -> int | None:
        """Where the sentence from ``start`` ends; None if that is not known yet.

        No more is looked at than a sentence may have, and a character: what comes behind that makes
        no difference, whether it is here already or not.
        """
        stop, is_full = len(text), False
        if self._longest is not None:
            is_full = stop - start > self._longest
            stop = min(stop, start + self._longest + 1)
        seen, has_word = start, False
        for mark in _END.finditer(text, start, stop):
            is_end = _is_end(text, start, mark, stop, last=ended or is_full)
            if is_end is None:
                return None
            has_word = has_word or is_spoken(text[seen : mark.start()])
            if is_end and has_word:
                return mark.end()
            seen = mark.end()
        return _best_cut(text, start, stop - 1) if is_full else None


def sentences(text: str, longest: int | None = None) -> list[str]:
    """The sentences of a text that is there.

    Args:
        text: Any text.
        longest: See :class:`SentenceCutter`.
    """
    cutter = SentenceCutter(longest)
    return [*cutter.feed(text), *cutter.flush()]


def is_spoken(text: str) -> bool:
    """Whether a text has a letter or a digit in it."""
    return any(map(str.isalnum, text))


def _is_end(text: str, start: int, mark: re.Match[str], stop: int, *, last: bool) -> bool | None:
    """Whether a sentence ends behind a mark; None if what follows has to show it.

    Args:
        text: The text so far.
        start: Where the sentence begins.
        mark: What may end it.
        stop: Where what counts of the text ends.
        last: Whether no more than that will count.
    """
    found = mark.group()
    if found[0] == "\n":
        return True
    if mark.end() == stop:
        return False if last else None  # the mark may go on
    if _CJK_END.search(found):
        return True
    if not text[mark.end()].isspace():
        return False
    if found[0] != ".":
        return True
    return _ends_at_dot(text, start, mark, stop, last=last)


def _ends_at_dot(
    text: str, start: int, mark: re.Match[str], stop: int, *, last: bool
) -> bool | None:
    """Whether a dot before white space ends a sentence, and not only an abbreviation."""
    dot = mark.start()
    first = max(start, dot - _WORD)
    before = text[first:dot]
    word = before.rsplit(None, 1)[-1:]
    bare = word[0].lstrip("('\"[“‘").lower() if word else ""  # noqa: RUF001
    if len(bare) == 1 and bare.isalpha() and bare != "i":
        return False
    line = before.rpartition("\n")[2]
    begins = first == start or len(line) < len(before)
    if begins and bare == line.strip() and bare.isdigit() and len(bare) <= _LARGEST_COUNT:
        return False
    counts = bare in _BEFORE_A_NUMBER and mark.group() == "."  # not in quotes
    if not counts and bare not in _AT_AN_END_TOO:
        return bare not in _ABBREVIATIONS
    next_word = _NO_SPACE.search(text, mark.end(), stop)
    if next_word is None and not last:
        return None
    following = next_word.group() if next_word else ""
    # At a sentence's end an abbreviation's dot is the sentence's too: "At 5 p.m. Then we left."
    return not following.isdigit() if counts else following.isupper()


def _best_cut(text: str, start: int, stop: int) -> int:
    """The best place in a sentence that is too long, at ``stop`` at the latest."""
    half = (start + stop) // 2
    # One more character shows that there is white space behind a comma.
    clauses = [match.end() for match in CLAUSE.finditer(text, start, stop + 1)]
    if good := [end for end in clauses if half < end <= stop]:
        return good[-1]
    spaces = [match.start() for match in _SPACE.finditer(text, start, stop + 1)]
    return spaces[-1] if spaces else stop

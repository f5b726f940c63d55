"""The texts of the training: WordNet's, our own, many short ones, none that measures the talker.

Text only; how a text sounds is the teacher stage's business.
"""

from __future__ import annotations

import collections
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tools.talker import templates
from tools.talker.settings import HELD_OUT, SEED, StageError, written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tools.talker.settings import Run

PARTS = ("noun", "verb", "adj", "adv")
LONGEST = 20
"""Words of the longest sentence."""

_DATA = "usr/share/wordnet"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z' ,;?!.-]*")
_QUOTED = re.compile(r'"([^"]+)"')
_BRACKETS = re.compile(r"\([^)]*\)")
_FREQUENT = 700  # words that every run trains on alone; the other single words are drawn
_FROM = 8_000  # the most frequent words, from which they are drawn


def letters(text: str) -> str:
    """A text's letters and digits in lower case; what is equal in this is the same sentence."""
    return "".join(filter(str.isalnum, text.lower()))


def held_out(path: Path = HELD_OUT) -> list[str]:
    """The sentences of the evaluation."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def build(run: Run) -> None:
    """Write the corpus: long and short utterances in one random order.

    Raises:
        StageError: WordNet is not there and cannot be fetched.
    """
    if run.corpus.exists():
        return run.log("corpus", f"{run.corpus} is there already")
    sizes, rng = run.settings, random.Random(SEED)
    entries, definitions, examples = _wordnet(_fetch(run))
    named = [_ended(entry) for entry in entries]
    short = [text for text in named + examples if 2 <= _length(text) <= 4]
    long = [text for text in examples if 5 <= _length(text) <= LONGEST]
    # The shorter ones are fragments, and of short sentences there are enough.
    definitions = [text for text in definitions if 8 <= _length(text) <= LONGEST]
    forbidden = set(map(letters, held_out()))
    seen: set[str] = set()

    def take(count: int, texts: Iterable[str]) -> list[str]:
        taken: list[str] = []
        for text in texts:
            key = letters(text)
            if len(taken) == count:
                break
            if key and key not in forbidden and key not in seen:
                seen.add(key)
                taken.append(text)
        return taken

    parts = {
        "examples": take(sizes.examples, _shuffled(long, rng)),
        "definitions": take(sizes.definitions, _shuffled(definitions, rng)),
        "own sentences": take(sizes.templates, _filled(templates.LONG, rng)),
        "single words": take(sizes.words, _single_words([*long, *definitions], rng)),
        "phrases": take(sizes.phrases, _shuffled(short, rng)),
        "own short ones": take(sizes.short_templates, _filled(templates.SHORT, rng)),
    }
    texts = [text for part in parts.values() for text in part]
    rng.shuffle(texts)
    with written(run.corpus) as path:
        path.write_text("\n".join(texts) + "\n")
    counts = ", ".join(f"{len(part)} {name}" for name, part in parts.items())
    run.log("corpus", f"{len(texts)} texts: {counts}; {len(forbidden)} held out")


def _fetch(run: Run) -> Path:
    """WordNet's folder: the system's, or that of Debian's package, fetched and unpacked here."""
    target = run.folder / "wordnet"
    installed, unpacked = Path("/", _DATA), target / _DATA
    for place in (installed, unpacked):
        if (place / "data.verb").exists():
            return place
    missing = "WordNet is missing: install Debian's wordnet-base, then run this again"
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise StageError(missing)
    target.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(
        ["apt-get", "download", "wordnet-base"], cwd=target, capture_output=True, text=True
    )
    archives = sorted(target.glob("wordnet-base_*.deb"))
    if fetched.returncode or not archives:
        raise StageError(f"{missing} (apt-get: {fetched.stderr.strip()})")
    subprocess.run(["dpkg", "-x", archives[-1].name, "."], cwd=target, check=True)
    return unpacked


def _wordnet(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """WordNet's entries, definitions and examples, each without repetition and in one order."""
    entries, definitions, examples = set(), set(), set()
    for part in PARTS:
        for line in (folder / f"data.{part}").read_text("latin1").splitlines():
            fields, bar, gloss = line.partition("|")
            if not bar or line.startswith(" "):  # the licence, which comes first
                continue
            entries.add(fields.split()[4].replace("_", " "))
            for quoted in _QUOTED.findall(gloss):
                examples.add(quoted.strip().rstrip(";,. "))
            definitions.add(_BRACKETS.sub("", gloss.split('"')[0]).split(";")[0].strip())
    return (
        sorted(filter(_PLAIN.fullmatch, entries)),
        sorted(_ended(text) for text in definitions if _PLAIN.fullmatch(text)),
        sorted(_ended(text) for text in examples if _PLAIN.fullmatch(text)),
    )


def _ended(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text[-1] in "?!" else ".")


def _length(text: str) -> int:
    return len(text.split())


def _shuffled(texts: Iterable[str], rng: random.Random) -> list[str]:
    ordered = list(texts)
    rng.shuffle(ordered)
    return ordered


def _filled(patterns: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Own sentences for ever, each pattern as often as any other."""
    while True:
        for pattern in patterns:
            yield templates.fill(pattern, rng)


def _single_words(texts: Iterable[str], rng: random.Random) -> list[str]:
    """Words to speak alone: the most frequent of the texts, then a choice of the less frequent."""
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", " ".join(texts).lower())
    counts = collections.Counter(word for word in words if len(word) > 1)
    # The count alone leaves equals in an order that hangs on the texts'.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:_FROM]
    chosen = ranked[:_FREQUENT] + _shuffled(ranked[_FREQUENT:], rng)
    return [word.capitalize() + rng.choice("....?!") for word in chosen]

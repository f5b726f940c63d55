"""The corpus: what is in it, what is not, and that it can be made again."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from tests.tools.talker.runs import SMALLEST, small_run
from tools.talker import corpus, templates
from tools.talker.settings import HELD_OUT, Run, StageError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return small_run(tmp_path)


def test_the_corpus_has_long_and_short_texts_of_every_kind(run: Run) -> None:
    corpus.build(run)
    texts = run.corpus.read_text().splitlines()
    assert "The clay pot stood on the shelf." in texts
    assert any(len(text.split()) == 1 for text in texts)
    assert any(8 <= len(text.split()) <= corpus.LONGEST for text in texts)
    assert len(texts) == len({corpus.letters(text) for text in texts})


def test_the_same_settings_make_the_same_corpus(run: Run, tmp_path: Path) -> None:
    corpus.build(run)
    again = small_run(tmp_path / "again")
    corpus.build(again)
    assert run.corpus.read_bytes() == again.corpus.read_bytes()


def test_a_corpus_that_is_there_stays(run: Run) -> None:
    run.corpus.write_text("Only this.\n")
    corpus.build(run)
    assert run.corpus.read_text() == "Only this.\n"


def test_no_held_out_sentence_is_in_the_corpus_however_it_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = dataclasses.replace(SMALLEST, examples=99, phrases=99, templates=0)
    kept_out = ["THE CLAY-POT stood, on the shelf", *corpus.held_out()]
    monkeypatch.setattr(corpus, "held_out", lambda: kept_out)
    corpus.build(Run(run.folder, everything))
    letters = {corpus.letters(text) for text in run.corpus.read_text().splitlines()}
    assert "helloworld" not in letters  # WordNet's would be "Hello world!"
    assert not letters & {corpus.letters(text) for text in kept_out}
    assert corpus.letters("Carry the lantern to the end of the garden.") in letters


def test_the_held_out_sentences_are_as_many_and_as_long_as_the_evaluation_wants() -> None:
    words = [len(text.split()) for text in corpus.held_out(HELD_OUT)]
    assert sum(count <= 4 for count in words) == 40
    assert sum(count >= 5 for count in words) >= 60
    assert max(words) <= 20
    assert corpus.held_out()[0] == "Hello world."
    assert len(set(map(corpus.letters, corpus.held_out()))) == len(words)


def test_without_wordnet_and_without_debian_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_DATA", "no/such/place")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StageError, match="install Debian's wordnet-base"):
        corpus.build(Run(tmp_path, SMALLEST))


@pytest.mark.parametrize("pattern", [*templates.LONG, *templates.SHORT])
def test_every_pattern_fills_all_its_slots(pattern: str) -> None:
    text = templates.fill(pattern, random.Random(0))
    assert "{" not in text
    assert text[0].isupper() or not text[0].isalpha()
    assert text[-1] in ".?!"

"""Sentences of a text that comes in parts: where they end, when that is known, and that none is
lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnistage.sentences import LONGEST, SentenceCutter, is_spoken, sentences

WORDS = [
    "the",
    "cat.",
    "sat,",
    "it!",
    "Mr.",
    "J.",
    "5",
    "3.14",
    "1.",
    "\n2.",
    "No.",
    "e.g.",
    "p.m.",
    "etc.",
    "\n\n",
    "\n",
    "—",
    "🙂",
    "What?",
    "...",
    "so...",
    'said "no."',
    "(yes!)",
    "x.y",
    "好。",
    "「はい。」と",
    "真的吗？！",  # noqa: RUF001
    "，",  # noqa: RUF001
    "a" * 30,
]
texts = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join),
    st.lists(st.sampled_from(WORDS), max_size=40).map("".join),
    st.text(alphabet="ab .,!\n。？\"'()5", max_size=60),  # noqa: RUF001
    st.text(max_size=60),
)
limits = st.one_of(st.none(), st.integers(1, 60))


def without_space(*parts: str) -> str:
    return "".join("".join(parts).split())


def fed(parts: list[str], longest: int | None = None) -> list[str]:
    cutter = SentenceCutter(longest)
    return [*itertools.chain(*map(cutter.feed, parts)), *cutter.flush()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world.", ["Hello world."]),
        ("Hello. How are you? Fine!", ["Hello.", "How are you?", "Fine!"]),
        ("Dr. Smith met J. K. Rowling. They left.", ["Dr. Smith met J. K. Rowling.", "They left."]),
        ("At 5 p.m. Then we left.", ["At 5 p.m.", "Then we left."]),
        ("At 5 p.m. we left.", ["At 5 p.m. we left."]),
        ("Tea, milk, etc.", ["Tea, milk, etc."]),
        ("Some fruit, e.g. Plums.", ["Some fruit, e.g. Plums."]),
        ("It is 3.14 now. See example.com. Yes.", ["It is 3.14 now.", "See example.com.", "Yes."]),
        ('He said "no." Then (he left.) So?', ['He said "no."', "Then (he left.)", "So?"]),
        ("Take No. 5. No. Never.", ["Take No. 5.", "No.", "Never."]),
        ("Well... maybe… Yes", ["Well...", "maybe…", "Yes"]),
        ("What?! No way.", ["What?!", "No way."]),
        ("A title\n \nThe text\ngoes on.", ["A title", "The text\ngoes on."]),
        ("Do this:\n1. Cut it.\n2. Eat it.", ["Do this:\n1. Cut it.", "2. Eat it."]),
        ("In 1999. Then 12. So.", ["In 1999.", "Then 12.", "So."]),
        ("One. ... Two. 🙂", ["One.", "... Two.", "🙂"]),
        ("---\n\nA line.", ["---\n\nA line."]),
        ("你好。我很好！真的吗？！是。", ["你好。", "我很好！", "真的吗？！", "是。"]),  # noqa: RUF001
        ("「はい。」と言った。 Yes.", ["「はい。」", "と言った。", "Yes."]),
        ("3。14", ["3。", "14"]),
        ("  \n ", []),
        ("", []),
    ],
)
def test_sentences_end_where_a_reader_would_say(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected
    assert sentences(text, LONGEST) == expected
    assert fed(list(text)) == expected


@pytest.mark.parametrize(
    ("before", "shows"),
    [
        ("Hello.", " "),
        ("Hello?!", "\n"),
        ('He said "no."', " "),
        ("A title\n", "\n"),
        ("We met at 5 p.m. ", "T"),
        ("No. ", "N"),
        ("你好。", "我"),
        ("「はい。」", "と"),
    ],
)
def test_a_sentence_is_complete_with_the_character_that_shows_it(before: str, shows: str) -> None:
    cutter = SentenceCutter()
    for character in before:
        assert cutter.feed(character) == []
    assert cutter.feed(shows) == [before.strip()]


@settings(max_examples=500)
@given(texts, st.data(), limits)
@example("No." + " " * 30 + "5", None, 10)
def test_any_parts_of_a_text_give_the_sentences_of_the_whole(
    text: str, data: st.DataObject | None, longest: int | None
) -> None:
    whole = sentences(text, longest)
    assert fed(list(text), longest) == whole
    if data is not None:
        places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
        assert fed(parts, longest) == whole


@settings(max_examples=500)
@given(texts, limits)
def test_nothing_is_lost_and_no_sentence_is_too_long(text: str, longest: int | None) -> None:
    cut = sentences(text, longest)
    assert without_space(*cut) == without_space(text)
    assert all(sentence == sentence.strip() != "" for sentence in cut)
    if longest is None:
        assert all(map(is_spoken, cut[:-1]))
        if not any(mark in text for mark in "。！？｡"):  # noqa: RUF001
            assert " ".join(cut).split() == text.split()
    else:
        assert all(len(sentence) <= longest for sentence in cut)


@given(texts)
def test_no_word_is_cut_that_is_shorter_than_a_sentence_may_be(text: str) -> None:
    plain = text.translate({ord(mark): " " for mark in "。！？｡，、；："})  # noqa: RUF001
    longest = max((len(word) for word in plain.split()), default=1)
    assert " ".join(sentences(plain, longest)).split() == plain.split()


def test_a_text_without_an_end_is_cut_behind_a_comma_else_between_words_else_anywhere() -> None:
    assert sentences("one two, three four five", 20) == ["one two, three four", "five"]
    assert sentences("one two three, four five", 20) == ["one two three,", "four five"]
    assert sentences("一二三四，五六七八九十一二", 8) == ["一二三四，", "五六七八九十一二"]  # noqa: RUF001
    assert sentences("a" * 50, 20) == ["a" * 20, "a" * 20, "a" * 10]


def test_what_is_kept_of_a_text_that_never_ends_is_bounded() -> None:
    for part in ("word ", "a", " ", "...", "\n", "No. ", "，", "5. "):  # noqa: RUF001
        cutter = SentenceCutter(40)
        for _ in range(1000):
            cutter.feed(part)
            assert len(cutter._text) <= 40


def test_a_book_is_cut_in_no_time_worth_waiting_for() -> None:
    book = "It was the best of times, it was the worst of times, and so on and on. " * 5000
    assert len(sentences(book)) == len(sentences(book, LONGEST)) == 5000
    for hostile in ("! " * 50_000, "No. " * 50_000, "\n " * 100_000, "." * 100_000, ',"' * 50_000):
        assert without_space(*sentences(hostile)) == without_space(hostile)
        assert without_space(*sentences(hostile, LONGEST)) == without_space(hostile)

"""Long texts in pieces: where they are cut, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.models.talker.pieces import count, pieces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world.", ["Hello world."]),
        ("Hello. How are you? Fine!", ["Hello.", "How are you?", "Fine!"]),
        ("Dr. Smith met Mrs. Jones. They left.", ["Dr. Smith met Mrs. Jones.", "They left."]),
        ("J. K. Rowling wrote it. I know.", ["J. K. Rowling wrote it.", "I know."]),
        ("At 5 p.m. Then we left.", ["At 5 p.m.", "Then we left."]),
        ("At 5 p.m. we left.", ["At 5 p.m. we left."]),
        ("It costs 3.50 today. Really.", ["It costs 3.50 today.", "Really."]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Take No. 5. No. Never.", ["Take No. 5.", "No.", "Never."]),
        ("Well... maybe. Yes", ["Well...", "maybe.", "Yes"]),
        ("First line\n\nSecond line", ["First line", "Second line"]),
        ("See example.com. It works.", ["See example.com.", "It works."]),
        ("Am I? I am. So am I. Good.", ["Am I?", "I am.", "So am I.", "Good."]),
        ("One. - Two.", ["One.", "- Two."]),
        ("One. 🙂 Two.", ["One.", "🙂 Two."]),
        ("One. 🙂", ["One. 🙂"]),
        ("🙂", ["🙂"]),
        ("", [""]),
    ],
)
def test_sentences_end_where_a_reader_would_say(text: str, expected: list[str]) -> None:
    assert pieces(text, 12) == expected


def test_a_long_sentence_is_cut_at_its_commas_and_clauses_that_fit_stay_together() -> None:
    text = (
        "From the top of the tower you can see the harbour, the market, the old town, and the "
        "hills behind the city."
    )
    assert pieces(text, 13) == [
        "From the top of the tower you can see the harbour, the market,",
        "the old town, and the hills behind the city.",
    ]


def test_without_a_comma_the_cut_is_near_the_middle_before_a_word_that_opens_a_phrase() -> None:
    text = (
        "The baker gets up at three in the morning so that the bread is warm when the shop opens."
    )
    assert pieces(text, 13) == [
        "The baker gets up at three in the morning",
        "so that the bread is warm when the shop opens.",
    ]


def test_numbers_count_by_their_digits() -> None:
    assert count("In 1999, 25 of us") == 4 + 2 + 3
    assert len(pieces("Call 030 1234567 or 040 7654321 now", 10)) > 2


def test_a_word_that_is_too_long_by_itself_stays_whole() -> None:
    assert pieces("a" * 500, 12) == ["a" * 500]
    assert pieces("1" * 30, 12) == ["1" * 30]


@settings(max_examples=200)
@given(
    text=st.lists(
        st.sampled_from(
            [
                "the",
                "a",
                "cat.",
                "sat,",
                "on;",
                "it!",
                "Mr.",
                "5",
                "12,000",
                "(and)",
                "but",
                "\n\n",
                "—",
                "🙂",
                "e.g.",
                "U.S.",
                "What?",
                "...",
                "'so'",
                "x.y",
            ]
        ),
        max_size=60,
    ).map(" ".join),
    most=st.integers(4, 20),
)
def test_nothing_is_lost_and_no_piece_is_too_long(text: str, most: int) -> None:
    cut = pieces(text, most)
    assert " ".join(cut).split() == text.split()
    if count(text):
        assert all(count(piece) for piece in cut)
        assert all(count(piece) <= max(most, 5) for piece in cut)  # 12,000 is five words


@given(st.text(max_size=200))
def test_any_text_keeps_its_characters(text: str) -> None:
    # Between CJK characters there may be a space where there was none.
    assert "".join("".join(pieces(text, 8)).split()) == "".join(text.split())


def test_a_book_is_cut_in_no_time_worth_waiting_for() -> None:
    book = "It was the best of times, it was the worst of times, and so on and on. " * 5000
    assert len(pieces(book, 12)) == 10_000
    assert len(pieces("word " * 20_000, 12)) > 1000

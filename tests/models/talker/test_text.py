# ruff: noqa: RUF001 - phonetic letters are meant to be what they look like
from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.errors import ConfigError, InvalidRequest
from omnistage.models.talker.layout import read_layout
from omnistage.models.talker.text import TextStep
from tests.models.talker.readings import READINGS, UNKNOWN

LAYOUT = read_layout()
STEP = TextStep(LAYOUT)


def spoken(text: str) -> str:
    """The prompt's phones as text, a bar in front of each word."""
    ids = STEP.prompt_ids(text)
    assert (ids[0], ids[-1]) == (LAYOUT.bos, LAYOUT.audio)
    words = [token - LAYOUT.first_word for token in ids if 4 <= token < 68]
    assert words == list(range(len(words)))
    names = ["|" if token < 68 else LAYOUT.phones[token - 68] for token in ids[1:-1]]
    return " ".join(names)


@pytest.mark.parametrize(
    ("text", "phones"),
    [
        ("Hello world.", "| h ə l ˈO | w ˈɜ ɹ l d ."),
        ("Good morning, how are you?", "| ɡ ˈʊ d | m ˈɔ ɹ n ɪ ŋ , | h ˌW | ɑ ɹ | j u ?"),
        ("$5.20", "| f ˈI v | d ˈɑ l ə ɹ z | æ n d | t w ˈɛ n t i | s ˈɛ n t s ."),
        ("1234", "| t w ˈɛ l v | θ ˈɜ ɹ T i | f ˈɔ ɹ ."),
    ],
)
def test_text_becomes_word_indices_and_phones(text: str, phones: str) -> None:
    assert spoken(text) == phones


def test_the_ids_of_a_prompt() -> None:
    assert STEP.prompt_ids("Hello world.") == [
        1,
        4,
        151,
        124,
        154,
        80,
        5,
        161,
        134,
        166,
        154,
        149,
        69,
        3,
    ]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Hello world", "Hello world."),
        ("Hello world,", "Hello world."),
        ("Hello   world . . .", "Hello world."),
        ("\n Hello\tworld!!! ", "Hello world!"),
        ("... Hello world.", "Hello world."),
        ("“Hello” (world).", "Hello world."),
        ('"Hello world."', "Hello world."),
        ("He said “don’t”.", "He said don't."),
        ("Hello—world.", "Hello, world."),
        ("Hello; world…", "Hello, world."),
        ("hel\u00adlo w\u200borld.", "hello world."),
        ("\ufeffHello world.", "Hello world."),
        ("Ｈｅｌｌｏ ｗｏｒｌｄ．", "Hello world."),
        ("cafe\u0301", "café"),
        ("ﬁne ①", "fine 1"),
        ("x−1", "x-1"),
    ],
)
def test_what_sounds_alike_gives_one_prompt(text: str, same: str) -> None:
    assert STEP.prompt_ids(text) == STEP.prompt_ids(same)


def sounds(text: str) -> str:
    """What is heard: the phones without their stress, and the pauses."""
    names = (LAYOUT.phones[t - LAYOUT.first_phone] for t in STEP.prompt_ids(text) if t >= 68)
    return " ".join(name.strip("ˈˌ") for name in names)


@pytest.mark.parametrize(
    ("text", "spelled"), [pair for pairs in READINGS.values() for pair in pairs]
)
def test_it_is_read_as_a_reader_would(text: str, spelled: str) -> None:
    assert sounds(text) == sounds(spelled)


def test_there_are_enough_readings_of_every_kind() -> None:
    assert len(READINGS) >= 14
    assert all(len(pairs) >= 3 for pairs in READINGS.values())
    assert sum(map(len, READINGS.values())) + len(UNKNOWN) >= 150


@pytest.mark.parametrize("word", UNKNOWN)
def test_a_word_that_no_lexicon_has_is_one_word_all_the_same(word: str) -> None:
    assert spoken(f"I said {word} once.").count("|") == 4


class TestUnknownWords:
    def test_are_guessed(self) -> None:
        assert spoken("Kubernetes blorfed.") == "| k j ˈu b ə ɹ n ˌi t s | b l ˈɔ ɹ f t ."

    @pytest.mark.parametrize(
        "text",
        ["Łódź", "Straße", "brr", "zzqx", "x7Q", "'90s", "—ñ ?,%a01$", "`.0", ")9", ",/é:—ø", "ǆ"],
    )
    def test_are_spoken_whatever_stands_beside_them(self, text: str) -> None:
        assert spoken(text)

    def test_are_not_cut_at_what_the_guesser_reads(self) -> None:
        # It reads 24 letters of a word.
        assert len(STEP.prompt_ids("blorf" * 8)) > 1.8 * len(STEP.prompt_ids("blorf" * 4))

    def test_numbers_beyond_all_names_are_read_digit_by_digit(self) -> None:
        assert spoken("9" * 20) == " ".join(["| n ˈI n"] * 20) + " ."
        assert spoken("1," * 9 + "1").count("|") >= 10

    def test_links_hide_nothing(self) -> None:
        assert spoken("[click](http://a.b)").startswith("| k l ˈɪ k | ˌA ʧ t ˌi t ˌi p ˈi")


class TestWhatCannotBeSpoken:
    def test_is_skipped_and_named(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert spoken("\U0001f600 hi 你好 there") == "| h ˈI | ð ˈɛ ɹ ."
        [record] = caplog.records
        assert "GRINNING FACE" in record.getMessage()
        assert "CJK UNIFIED IDEOGRAPH-4F60" in record.getMessage()

    def test_is_named_once_and_not_without_end(self, caplog: pytest.LogCaptureFixture) -> None:
        text = "".join(chr(0x4E00 + k) for k in range(300)) * 2 + " hi"
        with caplog.at_level(logging.WARNING):
            STEP.prompt_ids(text)
        assert "and 292 more" in caplog.text
        assert len(caplog.records) == 1

    def test_a_letter_that_no_table_has_is_named_too(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            assert spoken("ʒ hi") == "| h ˈI ."
        assert "LATIN SMALL LETTER EZH" in caplog.text

    @pytest.mark.parametrize("text", ["\ud800 hi", "hi \x00", "hi \x1b[0m"])
    def test_hostile_characters_reach_neither_speech_nor_log(
        self, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            assert "h ˈI" in spoken(text)
        assert caplog.text.isascii()
        assert "\x1b" not in caplog.text

    @pytest.mark.parametrize(
        "text", ["", " \n", "...", "?!", "- - -", "“”()", "你好", "Привет", "\U0001f600", "\u200b"]
    )
    def test_alone_is_an_invalid_request(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="nothing") as caught:
            STEP.prompt_ids(text)
        assert caught.value.parameter == "text"


class TestLongText:
    def test_of_64_words_is_taken_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert spoken("go " * 64).count("|") == 64
        assert "64 words is longer than the 18" in caplog.text

    def test_of_18_words_is_taken_without(self, caplog: pytest.LogCaptureFixture) -> None:
        STEP.prompt_ids("go " * 18)
        assert not caplog.records

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("go " * 65, "65 words"),
            ("1" * 15 + " and " + "7" * 15 + " again " * 30, "words"),
            ("internationalization " * 30, "seconds of speech"),
            ("a" * 1001, "1001 characters"),
            ("hello " * 100_000, "characters"),
        ],
    )
    def test_beyond_the_limit_is_refused_with_advice(self, text: str, words: str) -> None:
        with pytest.raises(InvalidRequest, match=f"{words}.*split it at sentence ends") as caught:
            STEP.prompt_ids(text)
        assert caught.value.parameter == "text"

    @pytest.mark.parametrize("piece", ["-a", "1/", "a@", "&", "%", "aB", "I", "http://a.", "1,"])
    def test_made_to_keep_the_reader_busy_ends(self, piece: str) -> None:
        # Without breaks in long runs one of these takes minutes; the suite's timeout judges.
        text = (piece * 1000)[:1000]
        with pytest.raises(InvalidRequest, match="too long"):
            STEP.prompt_ids(text)


@settings(deadline=None, max_examples=150)
@given(
    st.text(
        st.one_of(st.characters(max_codepoint=0x250), st.sampled_from("aeiou .,'-/$%&9—’½²µ[]()")),
        max_size=40,
    )
)
def test_any_text_gives_a_prompt_or_an_invalid_request(text: str) -> None:
    try:
        ids = STEP.prompt_ids(text)
    except InvalidRequest:
        assert not any(c.isascii() and c.isalnum() for c in text)
        return
    assert all(68 < token < 176 or 4 <= token < 68 for token in ids[1:-1])
    assert ids[-2] in {69, 71, 72}


def test_threads_share_one_loading() -> None:
    step = TextStep(LAYOUT)
    texts = [f"Kubernetes number {k}" for k in range(8)] * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(step.prompt_ids, texts)) == [STEP.prompt_ids(text) for text in texts]


@pytest.mark.parametrize("missing", ["hibari.g2p", "hibari.g2p.oov"])
def test_a_missing_hibari_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"omnistage\[talker\]"):
        TextStep(LAYOUT).prompt_ids("blorfed")

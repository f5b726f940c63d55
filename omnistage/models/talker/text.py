"""English text to the talker's prompt ids: what can be said, how it sounds, which ids that is.

The pronunciation is hibari's; this module keeps from it what it would drop, raise or choke on.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import unicodedata
from typing import TYPE_CHECKING, Any

from omnistage.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from omnistage.models.talker.layout import Layout

log = logging.getLogger(__name__)

MAX_TOKENS = 1300
"""The longest output to attempt; training saw half of that, and the context holds 2048 in all."""

TRAINED_WORDS = 18
"""The longest text to speak whole: training saw up to 20 words, few of them of more than 18."""

_TOKENS_PER_UNIT = 3.9  # ids of output for one of the prompt, mean over the training texts
_MAX_CHARACTERS = 1000  # more than 64 words have; keeps what hibari gets to read small
_MAX_RUN = 40  # hibari's time grows with the cube of a run without spaces: 12 ms here, 12 s at 400
_OOV_LETTERS = 24  # what its net for unknown words reads; it ignores the rest

_PAUSES = frozenset(".,?!")
_SAME_SOUND = {";": ",", ":": ",", "—": ",", "…": ".", "ʀ": "ɹ", "y": "j"}
# Double quotes have no sound, and a word that touches one is an unknown word to hibari.
_SAME_CHARACTER = str.maketrans('‐‑−‘’′‹›"“”„«»″', "---'''''       ")  # noqa: RUF001
# Beyond ASCII and Latin letters, what hibari speaks or knows to be silent.
_READ = frozenset("‚–—―‒…¡¿·•§¶©®™°£€¥₹₩¢±×÷½¼¾²³µ→←")  # noqa: RUF001
_LONG_RUN = re.compile(rf"(\S{{{_MAX_RUN}}})(?=\S)")
_LONG_NUMBER = re.compile(r"\d{16,}")
_WORDLIKE = re.compile(r"[^\W\d_]+|\d+")


_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_WEB = re.compile(
    r"(?<![\w@.])(?:(https?)://)?((?:[\w-]+\.)+(?:com|org|net|edu|gov|info|io|ai|dev|app|tv|uk|us|eu"
    r"|ca|au|de|fr|it|es|nl|ch|at|in|jp|cn|br))\b(?!\.?\w)((?:/[\w~%+-]*(?:\.[\w~%+-]+)*)*)",
    re.IGNORECASE,
)
_IN_ADDRESSES = {
    "@": " at ",
    ".": " dot ",
    "/": " slash ",
    "-": " dash ",
    "_": " underscore ",
    "+": " plus ",
}
_TIGHT_PAUSE = re.compile(r"(?<=[^\W\d])[;](?=[^\W\d])")
_SHOUTED = re.compile(r"\b[^\W\d_][A-Z]{3,}\b")


class TextStep:
    """Turns text into the ids of a prompt: ``<bos>``, each word's index and phones, ``<audio>``.

    Thread-safe. The pronunciation tables load when they are needed, which takes about 0.4 s.

    Args:
        layout: The talker's vocabulary.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._units = {name: layout.first_phone + i for i, name in enumerate(layout.phones) if i}
        self._lock = threading.Lock()
        self._pronunciation: _Pronunciation | None = None

    def load(self) -> None:
        """Load the pronunciation tables, and that for unknown words, before the first text.

        Raises:
            ConfigError: hibari is not installed.
        """
        with self._lock:
            self._loaded().read("Blorf.")

    def prompt_ids(self, text: str) -> list[int]:
        """The prompt for a text.

        What cannot be spoken is skipped with a warning that names it; an unknown word is guessed or
        spelled, never left out. A text longer than those of the training is warned about.

        Raises:
            InvalidRequest: There is nothing to say, or too much.
            ConfigError: hibari is not installed.
        """
        if len(text) > _MAX_CHARACTERS:
            raise _too_long(f"{len(text)} characters (at most {_MAX_CHARACTERS})")
        plain, skipped = _speakable(text)
        with self._lock:
            phonemes, silent = self._loaded().read(plain)
        if skipped or silent:
            log.warning("skipped what cannot be spoken: %s", _describe(skipped + silent))
        words = self._words(phonemes)
        if not words:
            raise InvalidRequest("the text has nothing in it that can be spoken", parameter="text")
        self._check_length(words)
        ids = [self._layout.bos]
        for index, word in enumerate(words):
            ids += [self._layout.first_word + index, *(self._units[unit] for unit in word)]
        return [*ids, self._layout.audio]

    def _loaded(self) -> _Pronunciation:
        if self._pronunciation is None:
            self._pronunciation = _Pronunciation()
        return self._pronunciation

    def _check_length(self, words: list[list[str]]) -> None:
        if len(words) > self._layout.words:
            raise _too_long(f"{len(words)} words (at most {self._layout.words})")
        units = sum(len(word) + 1 for word in words)
        if units * _TOKENS_PER_UNIT > MAX_TOKENS:
            seconds = units * (_TOKENS_PER_UNIT - 1) / 40
            raise _too_long(f"about {seconds:.0f} seconds of speech (at most 24)")
        if len(words) > TRAINED_WORDS:
            log.warning(
                "a text of %d words is longer than the %d that the talker learned and may lose "
                "some: split it at sentence ends",
                len(words),
                TRAINED_WORDS,
            )

    def _words(self, phonemes: str) -> list[list[str]]:
        """Split phonemes into words of units; a pause ends its word and never follows another."""
        words: list[list[str]] = []
        between, stress = True, ""
        for character in phonemes:
            if character in "ˈˌ":
                stress = character
                continue
            name = _SAME_SOUND.get(character, character)
            unit = stress + name if stress + name in self._units else name
            stress = ""
            if name in _PAUSES:
                if words and words[-1][-1] not in _PAUSES:
                    words[-1].append(name)
                between = True
            elif unit in self._units:
                if between:
                    words.append([])
                words[-1].append(unit)
                between = False
            else:
                between = between or name.isspace()
        # The training texts all end in a full pause; without one the last sound is cut short.
        if words and words[-1][-1] == ",":
            words[-1][-1] = "."
        elif words and words[-1][-1] not in _PAUSES:
            words[-1].append(".")
        return words


class _Pronunciation:
    """hibari's grapheme-to-phoneme rules; not thread-safe."""

    def __init__(self) -> None:
        try:
            g2p = importlib.import_module("hibari.g2p")
            self._normalize = importlib.import_module("hibari.g2p.normalize").normalize
        except ImportError as error:
            raise _missing(error) from error
        self._g2p: Any = g2p.G2P(oov=self._guess)
        self._net: Any = None

    def read(self, text: str) -> tuple[str, str]:
        """Phonemes of a text, words divided by spaces, and the characters that gave none."""
        try:
            tokens = self._g2p.phonemize_tokens(self._g2p.tokenize(self._normalize(text)))
        except (LookupError, ValueError, TypeError, AttributeError):
            # It reads most numbers and addresses, and raises on some it does not foresee.
            words = text.split()
            parts = [self.read(word) if len(words) > 1 else self._spell(word) for word in words]
            return " ".join(part for part, _ in parts), "".join(silent for _, silent in parts)
        phonemes, silent = [], ""
        for token in tokens:
            sound = token.phonemes or ""
            if any(map(str.isalnum, token.text)) and not any(map(str.isalpha, sound)):
                # A word beside odd punctuation can be taken for punctuation itself.
                sound, mute = self._spell(token.text)
                silent += mute
            phonemes.append(sound + (" " if token.whitespace else ""))
        return "".join(phonemes), silent

    def _spell(self, text: str) -> tuple[str, str]:
        """Say the words and digits of a text one by one, and character by character if need be."""
        sounds, silent = [], ""
        for word in _WORDLIKE.findall(text):
            for piece in [word] if word.isalpha() else word:
                sound = self._g2p(piece) or self._guess(piece)
                sounds.append(sound)
                silent += "" if sound else piece
        return " ".join(sounds), silent

    def _guess(self, word: str) -> str:
        """Phonemes of a word that no lexicon has; empty if it holds no letter the net knows."""
        if self._net is None:
            try:
                self._net = importlib.import_module("hibari.g2p.oov").OOV()
            except ImportError as error:
                raise _missing(error) from error
        parts = [word[at : at + _OOV_LETTERS] for at in range(0, len(word), _OOV_LETTERS)]
        sounds = (self._net(part) or self._net(_without_accents(part)) for part in parts)
        return " ".join(sound for sound in sounds if sound)


def is_said(text: str) -> bool:
    """Whether anything of a text is a word or a number that the talker can say."""
    return any(map(str.isalnum, _speakable(text)[0]))


def _speakable(text: str) -> tuple[str, str]:
    """A text that hibari reads safely, and the characters of the original that nothing speaks."""
    kept, skipped = [], ""
    for character in unicodedata.normalize("NFC", text).translate(_SAME_CHARACTER):
        if character.isspace():
            kept.append(" ")
        elif _is_read(character):
            kept.append(character)
        elif unicodedata.category(character) != "Cf":  # those, such as a soft hyphen, are invisible
            plain = unicodedata.normalize("NFKC", character)
            if all(map(_is_read, plain)):
                kept.append(plain)
            else:
                kept.append(" ")
                skipped += character
    # hibari takes "[a](b)" for a pronunciation or a link and would leave b out.
    plain = "".join(kept).replace("](", "] (")
    plain = _EMAIL.sub(lambda match: _dotted(match.group()), plain)
    plain = _WEB.sub(_web, plain)
    plain = _TIGHT_PAUSE.sub("; ", plain)
    plain = _SHOUTED.sub(lambda match: _lowered(match.group()), plain)
    plain = _LONG_NUMBER.sub(lambda match: " ".join(match.group()), plain)
    return _LONG_RUN.sub(r"\1 ", plain), skipped


def _web(match: re.Match[str]) -> str:
    scheme, host, path = match.groups()
    spelled = " ".join(scheme.upper()) + ", " if scheme else ""
    if host.lower().startswith("www."):
        spelled, host = f"{spelled}W W W dot ", host[4:]
    return spelled + _dotted(host) + _dotted(path.rstrip("/"))


def _dotted(address: str) -> str:
    """An address as it is read aloud."""
    return "".join(_IN_ADDRESSES.get(character, character) for character in address)


def _lowered(word: str) -> str:
    """A word typed with the shift key held or locked by mistake: hELLO; others as they are."""
    return word.lower() if word[0].islower() else word


def _is_read(character: str) -> bool:
    if character.isascii():
        return character.isprintable()
    return character in _READ or (
        character.isalpha() and unicodedata.name(character, "").startswith("LATIN ")
    )


def _without_accents(word: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", word) if not unicodedata.combining(c))


def _describe(characters: str) -> str:
    distinct = list(dict.fromkeys(characters))
    names = [f"{c!a} {unicodedata.name(c, 'unnamed')}" for c in distinct[:8]]
    return ", ".join(names) + (f" and {len(distinct) - 8} more" if len(distinct) > 8 else "")


def _too_long(amount: str) -> InvalidRequest:
    return InvalidRequest(
        f"the text is too long for one request to the talker, {amount}: split it at sentence ends",
        parameter="text",
    )


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"the talker reads text with {error.name}: install omnistage[talker]")

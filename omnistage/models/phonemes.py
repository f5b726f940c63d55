"""Text to phonemes with espeak, for models that were trained on those."""

from __future__ import annotations

import functools
import threading
from typing import Any, Final

from omnistage.errors import ConfigError, InvalidRequest
from omnistage.sentences import is_spoken

_lock: Final = threading.Lock()  # espeak keeps its state in one place for the whole process


def phonemes(text: str, language: str) -> str:
    """The phonemes of a text, in IPA with stress marks; punctuation stays.

    Args:
        text: The text.
        language: As espeak names it, such as ``en-us``.

    Raises:
        ConfigError: phonemizer or espeak is not installed, or espeak has no such language.
        InvalidRequest: Nothing of it can be said.
    """
    with _lock:
        said: list[str] = _backend(language).phonemize([text])
    made = " ".join("".join(said).split())
    if not is_spoken(made):
        raise InvalidRequest("the text has nothing to say in it", parameter="prompt")
    return made


@functools.cache
def _backend(language: str) -> Any:
    try:
        from phonemizer.backend import EspeakBackend
        from phonemizer.backend.espeak.wrapper import EspeakWrapper
    except ImportError as error:
        raise ConfigError(
            f"this model's text becomes phonemes with {error.name}: install omnistage[phonemes]"
        ) from error
    try:
        if not EspeakBackend.is_available():
            import espeakng_loader  # type: ignore[import-not-found,import-untyped,unused-ignore]

            EspeakWrapper.set_library(espeakng_loader.get_library_path())
            EspeakWrapper.set_data_path(espeakng_loader.get_data_path())
        return EspeakBackend(language=language, preserve_punctuation=True, with_stress=True)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"espeak-ng cannot say {language!r}: {error}; install omnistage[phonemes], or "
            "espeak-ng as a package of the system"
        ) from error

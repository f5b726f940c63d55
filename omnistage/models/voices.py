"""Voices of a speech LM: names that stand in the prompt, or short recordings in front of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omnistage.errors import ConfigError, InvalidRequest
from omnistage.request import check_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_CODES: Final = 4096  # more than a context of 2048 holds


@dataclass(frozen=True, slots=True)
class Reference:
    """A voice's recording.

    Args:
        text: What is said in it.
        codes: Its codes, [frames].
    """

    text: str
    codes: tuple[int, ...]


@dataclass(frozen=True)
class Voices:
    """The voices that a request may ask for.

    Args:
        names: Those that the model knows by name; the first is the default. None at all: any name,
            or none, may be asked for, unless there are recordings.
        directory: Of recordings: ``NAME.txt`` with the words, beside ``NAME.npy`` or ``NAME.pt``
            with the codes.
        recorded: Whether a request must have a recorded voice.
        codebook_size: Codes are below it.

    Raises:
        ConfigError: The directory has no such pair, or one that cannot be used.
    """

    names: Sequence[str] = ()
    directory: str | None = None
    recorded: bool = False
    codebook_size: int = 65_536

    def __post_init__(self) -> None:
        if self.recorded and self.directory is None:
            raise ConfigError(
                "this model speaks with a recorded voice; give the preset a directory of them, "
                "voice_directory: NAME.txt with the words beside NAME.npy or NAME.pt with the codes"
            )
        self.references  # noqa: B018 - now, not at the first request

    @cached_property
    def references(self) -> dict[str, Reference]:
        """The recordings, by name."""
        if self.directory is None:
            return {}
        where = Path(self.directory).expanduser()
        found = {}
        for words in sorted(where.glob("*.txt")):
            codes = [path for end in (".npy", ".pt") if (path := words.with_suffix(end)).is_file()]
            if codes:
                found[words.stem] = self._load(words, codes[0])
        if not found:
            raise ConfigError(
                f"{where} has no recorded voice: NAME.txt with its words beside NAME.npy or "
                "NAME.pt with its codes"
            )
        return found

    @property
    def known(self) -> tuple[str, ...]:
        """Every name that can be asked for, the default first; none where any can."""
        return (*self.names, *(name for name in self.references if name not in self.names))

    def name_of(self, asked: str | None) -> str | None:
        """The voice of a request.

        Args:
            asked: What it asks for.

        Raises:
            InvalidRequest: No such voice, or none where there must be one.
        """
        known = self.known
        if asked is not None:
            check_text(asked, "voice", limit=64)
            if asked in known or (not known and not self.recorded):
                return asked
            raise InvalidRequest(
                f"unknown voice {asked!r}; known: {', '.join(known) or 'none'}", parameter="voice"
            )
        if self.names or self.recorded:
            return known[0]
        return None  # recordings that may be left out

    def reference(self, name: str | None) -> Reference | None:
        """A voice's recording, if it has one."""
        return None if name is None else self.references.get(name)

    def _load(self, words: Path, codes: Path) -> Reference:
        try:
            text = " ".join(words.read_text("utf-8").split())
            values = _read_codes(codes)
        except (OSError, ValueError, RuntimeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the voice {words.stem!r} in {words.parent}: {error}") from error
        sound = (
            values.dtype.kind in "iu"
            and 0 < values.size <= _MAX_CODES
            and values.min() >= 0
            and values.max() < self.codebook_size
        )
        if not text or not sound:
            raise ConfigError(
                f"the voice {words.stem!r} in {words.parent} needs words, and 1 to {_MAX_CODES} "
                f"integer codes in [0, {self.codebook_size})"
            )
        return Reference(text, tuple(values.reshape(-1).tolist()))


def _read_codes(path: Path) -> np.ndarray[Any, Any]:
    if path.suffix == ".npy":
        found: np.ndarray[Any, Any] = np.load(path, allow_pickle=False)
        return found
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{path.name} is read with torch, which is not installed") from error
    try:
        return np.asarray(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch has many for a broken file
        raise ValueError(f"{path.name} holds no tensor: {str(error).splitlines()[0]}") from error

"""What a preset is: all that is special about a family of checkpoints, as one plain description."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from omnistage.errors import ConfigError, InvalidRequest
from omnistage.request import ChunkPolicy

if TYPE_CHECKING:
    from omnistage.checkpoint import Checkpoint
    from omnistage.config import ARStageConfig, DecoderStageConfig


LABEL: Final = "language"
"""What the AR models are called where their checkpoints are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset(ABC):
    """A family of checkpoints and how one of them runs well.

    Every field but the first three can be replaced, see :meth:`changed`.

    Args:
        name: What it is called by.
        summary: What it is, in a line.
        licence: Of the published weights.
        model: Directory or hub id of the AR model.
        sampling: Fields of vLLM's ``SamplingParams`` that a request does not set itself.
        engine_args: Fields of vLLM's ``AsyncEngineArgs``.
        chunks: Chunk sizes, in frames, of a request that sets none.
    """

    name: str
    summary: str
    licence: str
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    chunks: ChunkPolicy = field(default_factory=ChunkPolicy)

    @abstractmethod
    def stages(self) -> tuple[ARStageConfig, DecoderStageConfig]:
        """The two stages of a pipeline, from a checkpoint that was looked at; nothing is loaded.

        Raises:
            ConfigError: It is not one of this family, not whole, or contradicts itself.
        """

    @abstractmethod
    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is one of this family, as far as its small files say."""

    def describe(self) -> dict[str, Any]:
        """What would run, in plain values, for a person to read.

        Raises:
            ConfigError: As :meth:`stages`.
        """
        return self._described(self.stages()[0])

    def _described(self, ar: ARStageConfig) -> dict[str, Any]:
        return {
            "preset": self.name,
            "model": ar.model,
            "sampling": dict(self.sampling),
            "engine_args": dict(ar.engine_args),
            "chunks": msgspec.to_builtins(self.chunks),
        }

    @classmethod
    def changeable(cls) -> list[str]:
        """The fields that :meth:`changed` replaces."""
        identity = ("name", "summary", "licence")
        return [field.name for field in dataclasses.fields(cls) if field.name not in identity]

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """The preset with other values of some fields.

        A mapping is laid over one; the fields of what has some are replaced one by one.

        Args:
            changes: By field.

        Raises:
            ConfigError: An unknown field, or a value that cannot be one.
        """
        names = self.changeable()
        for name in changes:
            if name not in names:
                raise ConfigError(
                    f"preset {self.name!r} has no {name!r}; it has {', '.join(names)}"
                )
        new = {
            name: _laid_over(getattr(self, name), value, f"{self.name}.{name}")
            for name, value in changes.items()
        }
        return dataclasses.replace(self, **new)


def _laid_over(old: Any, new: Any, where: str) -> Any:
    if isinstance(old, Mapping):
        if not isinstance(new, Mapping):
            raise ConfigError(f"{where} is a mapping of names to values, got {new!r}")
        return {**old, **new}
    if isinstance(old, ChunkPolicy) and isinstance(new, Mapping):
        try:
            return msgspec.convert({**msgspec.to_builtins(old), **new}, ChunkPolicy)
        except (msgspec.ValidationError, InvalidRequest) as error:
            raise ConfigError(f"{where}: {error}") from error
    if dataclasses.is_dataclass(old) and not isinstance(old, type) and isinstance(new, Mapping):
        known = [one.name for one in dataclasses.fields(old)]
        for name in new:
            if name not in known:
                raise ConfigError(f"{where} has no {name!r}; it has {', '.join(known)}")
        return dataclasses.replace(
            old,
            **{n: _laid_over(getattr(old, n), v, f"{where}.{n}") for n, v in new.items()},
        )
    if isinstance(old, tuple) and isinstance(new, list | tuple):
        if not all(isinstance(item, str) for item in new):
            raise ConfigError(f"{where} is a list of str, got {new!r}")
        return tuple(new)
    if isinstance(old, str) and isinstance(new, os.PathLike):
        return os.fspath(new)
    if not _fits(old, new, where):
        raise ConfigError(f"{where} is a {type(old).__name__}, got {new!r}")
    return new


_TOKENS: Final = ("end", "first", "last")  # by name or id
_MAY_BE_NONE: Final = ("max_frames",)


def _fits(old: Any, new: Any, where: str) -> bool:
    """Whether a field may have a value, by the one that it has."""
    name = where.rpartition(".")[2]
    if name in _MAY_BE_NONE:
        return new is None or (type(new) is int and new > 0)
    if name in _TOKENS:
        return type(new) in (str, int)
    if type(old) is int:
        return type(new) is int and new > 0
    return isinstance(new, type(old))

"""The files of a published model, in a directory or on the Hugging Face hub, and its config.json.

Knows files and numbers; no torch, no codec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Checkpoint:
    """Where a model's files lie; those of the hub are fetched, or taken from its cache.

    Args:
        where: A directory, or the hub's name of a model.
        label: Names the kind of model in errors.
    """

    def __init__(self, where: str | Path, label: str) -> None:
        self.where = str(where)
        self._directory = Path(where) if Path(where).is_dir() else None
        self._label = label

    def find(self, name: str) -> Path | None:
        """The path of a file, or None if the model has none of that name.

        Raises:
            ConfigError: There is no such model, or it cannot be fetched.
        """
        if self._directory is not None:
            path = self._directory / name
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.where, name))
        except LocalEntryNotFoundError as error:  # offline, or the hub did not answer
            raise self.failure(error) from error
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.failure(error) from error

    def file(self, name: str) -> Path:
        """The path of a file that every such model has.

        Raises:
            ConfigError: It is not there.
        """
        path = self.find(name)
        if path is None:
            raise self.failure(f"it has no {name}")
        return path

    def config(self) -> dict[str, Any]:
        """What config.json says.

        Raises:
            ConfigError: It is not there or no JSON object.
        """
        try:
            config = json.loads(self.file("config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise self.failure(f"its config.json cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise self.failure("its config.json is no JSON object")
        return config

    def failure(self, reason: object) -> ConfigError:
        """The error that says what could not be loaded and why."""
        text = " ".join(str(reason).split())
        return ConfigError(
            f"no {self._label} model could be loaded from {self.where}: {text[:500]}"
        )


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of a configuration.

    Raises:
        ConfigError: It is something else, or missing where there is no default.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"the model's {key} must be a positive integer, got {value!r}")
    return value


def factors(config: Mapping[str, Any], key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A list of positive integers of a configuration.

    Raises:
        ConfigError: It is something else, or missing where there is no default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"the model's {key} must be positive integers, got {value!r}")
    return tuple(positive({key: number}, key) for number in value)


def chosen(codebooks: int | None, most: int) -> int:
    """How many of a model's codebooks a frame uses; all of them unless said otherwise.

    Raises:
        ConfigError: The model has fewer.
    """
    if codebooks is None:
        return most
    if not 1 <= codebooks <= most:
        raise ConfigError(f"codebooks must be in [1, {most}] for this model, got {codebooks}")
    return codebooks


def frames_of_context(name: str, asked: int | None, default: int) -> int:
    """Frames of context: what a caller asked for, or else what the codec needs.

    Raises:
        ConfigError: It is no number of frames.
    """
    if asked is None:
        return default
    if asked < 0:
        raise ConfigError(f"{name} must be 0 frames or more, got {asked}")
    return asked


def check_architecture(config: Mapping[str, Any], expected: str, decoder: str) -> None:
    """Check that a configuration is one of the decoder's models.

    Raises:
        ConfigError: It is not.
    """
    found = config.get("model_type")
    if found != expected:
        raise ConfigError(f"{decoder} decodes models of type {expected!r}, this one is {found!r}")

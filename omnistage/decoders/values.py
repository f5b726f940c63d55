"""Numbers of a codec's config.json, and of the options of its decoder, validated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


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

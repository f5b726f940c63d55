"""Models that come with omnistage and presets for public ones, each loaded when it is asked for.

A preset holds all that is special about a family of checkpoints; the stages know none of it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from omnistage.config import ARStageConfig, DecoderStageConfig
    from omnistage.models.preset import Preset


def load_preset(model: str, /, **changes: Any) -> tuple[ARStageConfig, DecoderStageConfig]:
    """The stages of a model that omnistage knows how to set up.

    It looks at the checkpoint's small files, which takes a second where the vocabulary is large; a
    hub id's are fetched.

    Args:
        model: A preset's name, or the directory or hub id of a model of a known family.
        changes: Fields of the preset to replace, or else of its AR stage's configuration; a mapping
            is laid over the preset's own.

    Raises:
        ConfigError: An unknown preset, family or field, or a checkpoint that is not in order.
    """
    preset, own = _changed(model, changes)
    ar, decoder = preset.stages()
    try:
        return dataclasses.replace(ar, **own), decoder
    except TypeError as error:
        raise ConfigError(f"the AR stage: {error}") from error


def describe_preset(model: str, /, **changes: Any) -> dict[str, Any]:
    """What :func:`load_preset` would set up, in plain values, without loading weights.

    Raises:
        ConfigError: As :func:`load_preset`.
    """
    preset, _ = _changed(model, changes)
    return preset.describe()


def _changed(model: str, changes: dict[str, Any]) -> tuple[Preset, dict[str, Any]]:
    """A preset with its changes, and those that are its AR stage's."""
    # Not above: the engine process imports a preset's processor, and needs nothing of this.
    from omnistage.config import ARStageConfig
    from omnistage.models.catalog import find

    args = changes.get("engine_args")
    revision = args.get("revision") if isinstance(args, dict) else None
    preset = find(model, revision=revision)
    fields = set(preset.changeable())
    # What both have, such as `model`, is the preset's.
    of_stage = {field.name for field in dataclasses.fields(ARStageConfig)} - fields
    own = {name: value for name, value in changes.items() if name in of_stage}
    for name in changes:
        if name not in fields | of_stage:
            raise ConfigError(
                f"preset {preset.name!r} has no {name!r}; it has {', '.join(sorted(fields))}, and "
                f"its AR stage {', '.join(sorted(of_stage))}"
            )
    rest = {name: value for name, value in changes.items() if name not in of_stage}
    return preset.changed(rest), own

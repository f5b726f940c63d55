"""Models that come with omnistage and presets for public ones, each loaded when it is asked for.

A model's package holds all that is special about it; the stages know none of it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from omnistage.config import ARStageConfig, DecoderStageConfig


def load_preset(name: str, /, **changes: Any) -> tuple[ARStageConfig, DecoderStageConfig]:
    """The stages of a preset.

    Args:
        name: The preset's name; ``talker`` is the one there is.
        changes: Fields of its :class:`~omnistage.config.ARStageConfig` to replace; ``engine_args``
            are laid over the preset's own.

    Raises:
        ConfigError: An unknown preset or field, engine arguments that the preset cannot work with,
            or a checkpoint that is not in order.
    """
    if name != "talker":
        raise ConfigError(f"unknown preset {name!r}; known: 'talker'")
    from omnistage.models.talker.preset import TALKER

    preset = TALKER
    if "model" in changes:
        preset = dataclasses.replace(TALKER, model=Path(changes.pop("model")))
    ar, decoder = preset.stages()
    changes["engine_args"] = {**ar.engine_args, **changes.get("engine_args", {})}
    if changes["engine_args"].get("speculative_config"):
        raise ConfigError(
            "the talker's structure is enforced by a logits processor, which vLLM cannot combine "
            "with speculative decoding; leave speculative_config out"
        )
    try:
        return dataclasses.replace(ar, **changes), decoder
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(ar))
        raise ConfigError(f"a preset's AR stage has the fields {known}: {error}") from error

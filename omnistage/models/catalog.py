"""The presets that there are: those that come with omnistage, and those of other packages.

Another package adds its own by an entry point of the group ``omnistage.presets``: its name is the
preset's, its value names a :class:`~omnistage.models.preset.Preset` or a function that returns one.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from omnistage.checkpoint import Checkpoint, is_hub_id
from omnistage.errors import ConfigError
from omnistage.models.preset import LABEL, Preset

log = logging.getLogger(__name__)

GROUP: Final = "omnistage.presets"
SETTINGS: Final = "omnistage.json"
"""In a model directory: ``{"preset": NAME, FIELD: VALUE, ...}``, laid over that preset."""

_OWN: Final = {
    "talker": "omnistage.models.talker.preset:TALKER",
    "orpheus": "omnistage.models.orpheus:ORPHEUS",
    "llasa": "omnistage.models.flat:LLASA",
    "neutts": "omnistage.models.flat:NEUTTS",
    "flat": "omnistage.models.flat:FLAT",
}


def names() -> list[str]:
    """The names of all presets."""
    return list({**_OWN, **_others()})


def get(name: str) -> Preset:
    """A preset by its name.

    Raises:
        ConfigError: There is none, or what another package says is one is none.
    """
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        own: Preset = getattr(importlib.import_module(module), attribute)
        return own
    others = _others()
    if name not in others:
        near = difflib.get_close_matches(name, names(), 1)
        raise ConfigError(
            f"unknown preset {name!r}; known: {', '.join(names())}, a model's directory, or its "
            "hub id (OWNER/NAME)" + (f". Did you mean {near[0]!r}?" if near else "")
        )
    point = others[name]
    try:
        found: Any = point.load()
        made = found if isinstance(found, Preset) else found()
    except Exception as error:  # another package's code
        raise ConfigError(
            f"preset {name!r} of {point.value} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Preset):
        raise ConfigError(f"preset {name!r} of {point.value} is no Preset but {made!r}")
    return made


def find(model: str, *, revision: str | None = None) -> Preset:
    """The preset of a name, a model's directory or a hub id.

    A directory or hub id says itself what it is, in ``omnistage.json``, or is recognized by its
    tokens.

    Args:
        model: The name, directory or hub id.
        revision: Of a hub id.

    Raises:
        ConfigError: There is none, or the checkpoint is of no known family.
    """
    model = os.fspath(model)
    known = names()
    if model in known:
        return get(model)
    if not Path(model).expanduser().is_dir() and not is_hub_id(model):
        return get(model)  # says what there is
    for name in known:
        if name in _OWN and (preset := get(name)).model == model:
            return preset
    checkpoint = Checkpoint(model, LABEL, revision=revision)
    if checkpoint.find(SETTINGS) is not None:
        return _told(checkpoint)
    checkpoint.tokens()  # what is missing is said once
    fitting = [one for name in known if (one := _fitting(name, checkpoint)) is not None]
    if len(fitting) != 1:
        what = "of several families" if fitting else "of no family that omnistage knows"
        these = ", ".join([one.name for one in fitting] or known)
        raise ConfigError(
            f"{model} is {what} ({these}); name "
            f"one and give it the model, as with `--model orpheus --set model={model}`, or say in "
            f"{SETTINGS} there what it is"
        )
    return fitting[0].changed({"model": model})


def _told(checkpoint: Checkpoint) -> Preset:
    """The preset that a checkpoint's own settings describe."""
    settings = checkpoint.json(SETTINGS)
    name = settings.pop("preset", None)
    if not isinstance(name, str):
        raise ConfigError(f'{SETTINGS} of {checkpoint.where} needs a "preset", the name of one')
    decoder = settings.get("decoder")
    if isinstance(decoder, dict) and isinstance(decoder.get("model"), str):
        inside = (checkpoint.directory or Path()) / decoder["model"]
        if checkpoint.directory is not None and inside.is_dir():
            decoder["model"] = str(inside)
    return get(name).changed({"model": checkpoint.where, **settings})


def _fitting(name: str, checkpoint: Checkpoint) -> Preset | None:
    """A preset, if a checkpoint is one of its family; another package's may fail alone."""
    try:
        preset = get(name)
        return preset if preset.recognizes(checkpoint) else None
    except Exception as error:
        log.warning("preset %r: %s", name, error)
        return None


def _others() -> dict[str, metadata.EntryPoint]:
    return {
        point.name: point
        for point in metadata.entry_points(group=GROUP)
        if point.name not in _OWN  # nobody takes a name of ours
    }

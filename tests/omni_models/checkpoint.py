"""The embedded talker's weights under the name of one of the test models."""

from __future__ import annotations

import json
from pathlib import Path

import omnistage

TALKER = Path(omnistage.__file__).parent / "models" / "talker" / "checkpoint"


def checkpoint(directory: Path, name: str) -> str:
    """A checkpoint directory whose model is ``tests.omni_models.models.<name>``."""
    where = directory / name
    where.mkdir(parents=True, exist_ok=True)
    for file in TALKER.iterdir():
        target = where / file.name
        if file.name == "config.json":
            config = json.loads(file.read_text())
            target.write_text(json.dumps({**config, "architectures": [name]}))
        elif not target.exists():
            target.symlink_to(file)
    return str(where)

"""``python -m tools.checkpoints FAMILY DIRECTORY``: write a small checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.checkpoints import codecs, language_models

if TYPE_CHECKING:
    from collections.abc import Callable

FAMILIES: Final[dict[str, Callable[..., Path]]] = {
    "orpheus": language_models.orpheus,
    "llasa": language_models.llasa,
    "neutts": language_models.neutts,
    "snac": codecs.snac,
    "xcodec2": codecs.xcodec2,
    "neucodec": codecs.neucodec,
    "mimi": codecs.mimi,
    "dac": codecs.dac,
    "encodec": codecs.encodec,
    "code2wav": codecs.code2wav,
}


def main() -> None:
    """Write it and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m tools.checkpoints", description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(FAMILIES[asked.family](asked.directory, seed=asked.seed))


if __name__ == "__main__":
    main()

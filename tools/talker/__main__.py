"""`python -m tools.talker STAGE`: one stage of the talker's training, or `all` of them in order.

A stage that was interrupted goes on where it was, one that is done says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path

from tools.talker.settings import ROOT, TINY, Run, Settings, StageError

STAGES = {
    "corpus": ("corpus", "build"),
    "teacher": ("teacher", "speak"),
    "codec": ("codec", "train_codec"),
    "tokens": ("tokens", "make"),
    "decoder": ("codec", "train_decoder"),
    "talker": ("talker", "train"),
    "export": ("export", "export"),
}
"""In the order of what needs what: module and function."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.talker", description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache" / "talker", help="where a run lies"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="little of everything: a trial of the stages"
    )
    parser.add_argument(
        "--begin",
        type=Path,
        metavar="MODEL",
        help="a model directory: the talker's training begins with its weights, and what is "
        "exported is the mean of both",
    )
    parser.add_argument("--tokens", type=int, help="ids that the talker's training sees")
    parser.add_argument("--batch", type=int, help="ids of one of its steps")
    parser.add_argument("--rate", type=float, help="its highest learning rate")
    asked = parser.parse_args(arguments)
    asked_for = {
        "talker_tokens": asked.tokens,
        "batch_tokens": asked.batch,
        "talker_rate": asked.rate,
    }
    settings = dataclasses.replace(
        TINY if asked.tiny else Settings(),
        **{name: value for name, value in asked_for.items() if value is not None},
    )
    run = Run(asked.folder, settings, asked.begin)
    try:
        for stage in STAGES if asked.stage == "all" else [asked.stage]:
            module, function = STAGES[stage]
            # Only the stage's own libraries: the corpus needs no torch.
            getattr(importlib.import_module(f"tools.talker.{module}"), function)(run)
    except ModuleNotFoundError as error:
        missing = f"{error.name} is missing: .venv/bin/pip install -e '.[talker]' brings it"
        print(f"talker: {missing}", file=sys.stderr)
        return 1
    except StageError as error:
        print(f"talker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

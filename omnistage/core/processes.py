"""vLLM's processes below this one: stopped in order, and gone afterwards."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
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
_SHUTDOWN_SECONDS: Final = 15.0

# What ends by itself once its engine core is gone takes milliseconds.
_LEFT_SECONDS: Final = 3.0


class Processes:
    """What an engine's cores have started; to be ended once, in whatever thread.

    Args:
        cores: Process ids of its engine cores.
    """

    def __init__(self, cores: Iterable[int]) -> None:
        self._found: dict[int, int] = {}  # pid by a descriptor, which is this very process's
        for core in cores:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(core).children(recursive=True):
                    with suppress(ProcessLookupError):
                        self._found[os.pidfd_open(process.pid)] = process.pid

    def end(self) -> None:
        """Return when they are gone; what has not ended in time is killed. Blocks.

        A core that dies may leave a worker behind: one that waits in a collective for another rank,
        which is not there any more, waits for ever and hears no signal but this.
        """
        found, self._found = self._found, {}
        left, until = select.poll(), time.monotonic() + _LEFT_SECONDS
        for descriptor in found:
            left.register(descriptor, select.POLLIN)
        while found and (seconds := until - time.monotonic()) > 0:
            for descriptor, _ in left.poll(seconds * 1000):
                left.unregister(descriptor)
                os.close(descriptor)
                del found[descriptor]
        for descriptor, pid in found.items():
            log.warning("a process that vLLM left behind is ended: %d", pid)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


async def stop(llm: AsyncLLM, processes: Processes | None) -> None:
    """Stop an engine and return when its processes are gone."""
    # vLLM cancels it only after its processes ended, and until then it would report their end.
    if llm.output_handler is not None:
        llm.output_handler.cancel()
    await to_thread.run_sync(llm.shutdown, _SHUTDOWN_SECONDS)
    # Reaps one that vLLM had to kill, for which it does not wait.
    multiprocessing.active_children()
    if processes is not None:
        await to_thread.run_sync(processes.end)

"""The guard against blocking calls does what the suite relies on it for."""

from __future__ import annotations

import asyncio
import time

from omnistage.transport import reader
from tests.conftest import Blocked


async def test_a_blocking_call_of_the_package_on_the_event_loop_is_refused_and_noted() -> None:
    def blocks(frames: list[bytes]) -> None:
        time.sleep(0.001)

    one = object.__new__(reader.SocketReader)
    one._on_message = blocks
    one._deliver([b""])  # it logs what a handler raises, and goes on
    assert len(Blocked.seen) == 1
    assert "time.sleep" in Blocked.seen[0]
    assert "reader.py" in Blocked.seen[0]
    Blocked.seen.clear()


async def test_a_thread_may_block() -> None:
    await asyncio.to_thread(time.sleep, 0.001)
    assert not Blocked.seen


def test_a_test_without_a_loop_may_block() -> None:
    time.sleep(0.001)
    assert not Blocked.seen

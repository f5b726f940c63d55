"""The AR stage's start, without vLLM: a cancel, however often, leaves no engine behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from omnistage.adapters.processor import TokenUpdates
from omnistage.config import ARStageConfig
from omnistage.stages import ar as module
from omnistage.transport.endpoints import Endpoints


class Engine:
    ranks = 1

    def __init__(self) -> None:
        self.stopped = False

    async def shutdown(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("cancels", [1, 2, 4])
async def test_an_engine_that_comes_up_after_the_start_was_cancelled_is_stopped(
    cancels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, up = Engine(), threading.Event()

    def start(*_: Any) -> Engine:
        up.wait(10)
        return engine

    monkeypatch.setattr(module, "_start_engine", start)
    monkeypatch.setattr(module, "check_environment", lambda: None)
    with Endpoints() as endpoints:
        config = ARStageConfig(model="m", processor=TokenUpdates())
        starting = asyncio.create_task(module.ARStage(config, endpoints).start())
        await asyncio.sleep(0.05)
        for _ in range(cancels):
            starting.cancel()
            await asyncio.sleep(0.01)
        assert not starting.done()
        up.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert engine.stopped

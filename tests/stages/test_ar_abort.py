"""Aborting a request at the AR stage, with an engine that does not do what it is asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnistage.adapters.processor import TokenUpdates
from omnistage.config import ARStageConfig
from omnistage.errors import DeadlineExceeded, OmniStageError, ServerError, StreamClosed
from omnistage.request import StageInput, StageRequest
from omnistage.stages import ar as module
from omnistage.stages.ar import ARStage
from omnistage.transport.control import ControlServer
from omnistage.transport.endpoints import Endpoints


class Engine:
    """Samples for ever; how it aborts is up to the test."""

    ranks = 1

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.running = asyncio.Event()
        self.settling: OmniStageError | asyncio.Event | None = None

    async def generate(self, *_: Any, **__: Any) -> Any:
        self.running.set()
        await asyncio.Event().wait()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def settle(self) -> None:
        if isinstance(self.settling, asyncio.Event):
            await self.settling.wait()
        elif self.settling is not None:
            raise self.settling

    async def shutdown(self) -> None: ...


class Site:
    """A started stage on that engine, and what its requests reported."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.engine = Engine()
        self.outcomes: list[Any] = []
        self.stage = ARStage(ARStageConfig(model="m", processor=TokenUpdates()), endpoints)
        self.stage._engine = self.engine  # type: ignore[assignment]
        self.stage._control = ControlServer(endpoints, self.stage._on_failed)

    async def submit(self, name: str = "r-1") -> Any:
        self.engine.running.clear()
        request = StageRequest(
            request_id=name,
            external_id="r",
            input=StageInput(prompt=[1, 2]),
            consumers=(("audio", "s"),),
        )
        running = self.stage.submit(request, on_done=self.outcomes.append)
        await self.engine.running.wait()
        return running


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    with Endpoints() as endpoints:
        one = Site(endpoints)
        yield one
        one.engine.settling = None
        await one.stage.aclose()


async def test_abort_reaches_vllm_once_and_is_answered_every_time(site: Site) -> None:
    running = await site.submit()
    await asyncio.gather(*(running.abort() for _ in range(3)))
    await running.abort()
    assert site.engine.aborted == ["r-1"]
    (outcome,) = site.outcomes
    assert isinstance(outcome, StreamClosed)
    assert not len(site.stage)


async def test_an_abort_that_fails_is_logged_with_its_id_and_raised_to_all_who_wait(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    running = await site.submit()
    site.engine.settling = ServerError("vLLM does not answer")
    answers = await asyncio.gather(*(running.abort() for _ in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["vLLM does not answer"] * 3
    with pytest.raises(ServerError):
        await running.abort()
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert "r-1" in record.message
    assert not len(site.stage)


async def test_an_engine_that_does_not_let_go_is_late_by_name(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RELEASE_SECONDS", 0.05)
    running = await site.submit()
    site.engine.settling = asyncio.Event()
    with pytest.raises(DeadlineExceeded) as raised:
        await running.abort()
    assert (raised.value.request_id, raised.value.stage) == ("r-1", "ar")
    assert any("r-1" in record.message for record in caplog.records)
    assert not len(site.stage)


async def test_an_engine_that_dies_meanwhile_has_let_go(site: Site) -> None:
    running = await site.submit()
    site.engine.settling = asyncio.Event()
    aborting = asyncio.create_task(running.abort())
    await asyncio.sleep(0.02)
    assert not aborting.done()
    site.stage._on_death()
    await aborting


async def test_who_stops_waiting_for_an_abort_leaves_it_to_the_others(site: Site) -> None:
    running = await site.submit()
    held = site.engine.settling = asyncio.Event()
    first, second = (asyncio.create_task(running.abort()) for _ in range(2))
    await asyncio.sleep(0.02)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    held.set()
    await second


async def test_what_fails_a_request_aborts_it_in_vllm(site: Site) -> None:
    running = await site.submit()
    running.fail(ServerError("the decoder failed"))
    running.fail(ServerError("and again"))
    await running.abort()
    assert site.engine.aborted == ["r-1"]
    assert [str(outcome) for outcome in site.outcomes] == ["the decoder failed"]


@pytest.mark.parametrize("failed_first", [False, True])
async def test_an_abort_that_vllm_refuses_is_logged_and_raised(
    site: Site, caplog: pytest.LogCaptureFixture, failed_first: bool
) -> None:
    running = await site.submit()

    async def abort(request_id: str) -> None:
        raise RuntimeError("cannot send")

    site.engine.abort = abort  # type: ignore[method-assign]
    if failed_first:
        running.fail(ServerError("the decoder failed"))
    with pytest.raises(OmniStageError, match="cannot send"):
        await running.abort()
    assert any("r-1" in r.message for r in caplog.records if r.levelno == logging.ERROR)
    assert len(site.outcomes) == 1

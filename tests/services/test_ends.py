"""Requests that end in the middle of something: each in bounded time, with nothing left of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from omnistage import Pipeline, StageInput
from omnistage.errors import DeadlineExceeded, DecoderError, ServerError, StageClosed
from omnistage.testing import FakeDecoder, Script
from tests.services.factories import Services
from tests.services.test_services import by_prompt, nothing_is_left, words


async def test_a_text_of_which_nothing_more_comes_is_not_waited_for(services: Services) -> None:
    ar = await services.ar(by_prompt, split=words)
    decoder = await services.decoder(ar, lambda: FakeDecoder(seconds=0.1, fails_on=ord("x")))
    async with Pipeline.connect(ar.endpoint) as pipeline:
        with pytest.raises(DecoderError):
            async for _ in pipeline.submit("x b"):  # without `async with`, which would abort
                pass
        await nothing_is_left(ar, decoder)


async def test_nor_one_whose_reader_has_no_more_time(services: Services) -> None:
    ar = await services.ar(lambda _: Script(ids=[7] * 8, step_after=0.02), split=words)
    decoder = await services.decoder(ar, max_unread=0.0001)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        stream = pipeline.submit("a b", timeout=0.8)
        speaking = asyncio.ensure_future(stream.__aenter__())
        async with asyncio.timeout(5):
            while not ar._awaited:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.8)
        with pytest.raises(DeadlineExceeded):
            await anext(await speaking)
        await nothing_is_left(ar, decoder)


async def test_nor_one_that_ends_as_it_is_aborted(services: Services) -> None:
    ar = await services.ar(by_prompt, split=words)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        for _ in range(20):
            async with pipeline.submit("a b c"):
                pass
        await nothing_is_left(ar)


async def test_a_decoder_that_drains_waits_for_the_rest_of_a_text_that_is_read_slowly(
    services: Services,
) -> None:
    def script(asked: StageInput) -> Script:
        return Script(ids=[ord(str(asked.prompt))] * 20, step_after=0.001)

    ar = await services.ar(script, split=words)
    speaker = FakeDecoder(repeat=2400)
    decoder = await services.decoder(ar, lambda: speaker, max_unread=3.0)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with pipeline.submit("a b c") as stream:
            chunks = [await anext(stream)]
            draining = [asyncio.ensure_future(part.drain()) for part in (ar, decoder)]
            await nothing_is_left(decoder)
            await asyncio.sleep(1.2)  # it must wait longer than anybody needs to look
            assert not any(one.done() for one in draining)
            chunks += [chunk async for chunk in stream]
        assert speaker.indices(chunks) == [ord(c) for c in "abc" for _ in range(20)]
        async with asyncio.timeout(5):
            await asyncio.gather(*draining)
        assert not len(ar)


@pytest.fixture
async def stuck(services: Services, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An AR service that does not answer how it cuts a text, until it is let go."""
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    free = asyncio.Event()

    async def split(asked: StageInput) -> Sequence[StageInput]:
        await free.wait()
        return [asked]

    monkeypatch.setattr(ar.stage, "split", split)
    yield ar
    free.set()


async def test_a_timeout_holds_while_the_service_does_not_answer(stuck: Any) -> None:
    async with Pipeline.connect(stuck.endpoint) as pipeline, asyncio.timeout(5):
        with pytest.raises(DeadlineExceeded, match=r"not complete after 0\.1 s"):
            await pipeline.submit("a", timeout=0.1).finished()


async def test_a_pipeline_that_closes_ends_a_request_that_starts(stuck: Any) -> None:
    async with Pipeline.connect(stuck.endpoint) as pipeline:
        speaking = asyncio.ensure_future(pipeline.submit("a").finished())
        async with asyncio.timeout(5):
            while not pipeline.health().running:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        with pytest.raises(StageClosed):
            await speaking


async def test_what_an_input_adapter_raises_reaches_the_client(services: Services) -> None:
    def broken(asked: StageInput) -> Sequence[StageInput]:
        raise ValueError("a bug")

    ar = await services.ar(by_prompt, split=broken)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        with pytest.raises(ServerError, match="raised ValueError: a bug"):
            await pipeline.submit("a").finished()

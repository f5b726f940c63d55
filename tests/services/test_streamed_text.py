"""A text that comes, through services: they wait for the rest of it, and for nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest

from omnistage import Pipeline, StageInput
from omnistage.errors import DeadlineExceeded, OmniStageError, ServerError
from omnistage.services.ar import ARService
from omnistage.services.decoder import DecoderService
from omnistage.testing import FakeDecoder, Script
from tests.services.factories import Services
from tests.services.test_services import nothing_is_left
from tests.test_streamed_text import TEXT, Source, by_letters, heard, said, tasks


def slowly(asked: StageInput) -> Script:
    return Script(ids=by_letters(asked).ids, step_after=0.001)


async def nothing_is_kept(pipeline: Pipeline, ar: ARService) -> None:
    """Neither side keeps anything of a text that is over."""
    route = pipeline._routes[0]
    stage, branches = cast("Any", route.ar), cast("Any", route.branches)
    replicas = [replica for branch in branches for replica in branch._replicas.values()]

    def kept() -> list[Any]:
        ours = [stage._answers, stage._running, pipeline._running, tasks()]
        ours += [branch._of for branch in branches]
        ours += [x for r in replicas for x in (r._open, r._aborting, r.expected)]
        return [*ours, ar._running, ar._awaited, ar._continued]

    async with asyncio.timeout(5):
        while any(kept()):
            await asyncio.sleep(0.005)


async def drained(*services: ARService | DecoderService) -> None:
    async with asyncio.timeout(5):
        await asyncio.gather(*(service.drain() for service in services))


@pytest.mark.parametrize("text", [TEXT, f"{TEXT}. ", f"{TEXT}.\n\n ☺"])
@pytest.mark.parametrize("pause", [None, 0.002])
async def test_it_is_one_stream_of_which_nothing_stays(
    services: Services, text: str, pause: float | None
) -> None:
    """Whether or not the last sentence is known to be that when it is submitted."""
    ar = await services.ar(by_letters)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        assert await heard(pipeline.submit(Source(*text, pause=pause))) == said(text.rstrip(" ☺"))
        assert await heard(pipeline.submit(text, by_sentence=True)) == said(text.rstrip(" ☺"))
        await nothing_is_kept(pipeline, ar)
        await drained(ar)  # with the client still there
    await drained(decoder)


async def test_the_service_sees_what_it_is_and_cuts_each_sentence(services: Services) -> None:
    asked: list[StageInput] = []

    def halves(given: StageInput) -> list[StageInput]:
        asked.append(given)
        if given.prompt == "Left out.":
            return []
        words = str(given.prompt).split()
        return [StageInput(prompt=" ".join(part)) for part in (words[:1], words[1:]) if part]

    ar = await services.ar(by_letters, split=halves)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        spoken = await heard(pipeline.submit(Source("One two. Left out. Six seven.")))
        assert spoken == [
            ord(c) for w in ("One", "two.", "Six", "seven.") for c in w for _ in "1234"
        ]
        await heard(pipeline.submit("Not by sentence."))
        await nothing_is_kept(pipeline, ar)
    assert [given.by_sentence for given in asked] == [True, True, True, False]


async def test_a_text_stays_with_its_decoder_of_each_name(services: Services) -> None:
    ar = await services.ar(by_letters)
    names = ["low", "high"] * 3
    decoders = [await services.decoder(ar, name=name) for name in names]
    began: Counter[DecoderService] = Counter()
    for decoder in decoders:
        begin = decoder._branch.decoder.on_unexpected
        assert begin is not None

        def noting(update: Any, begin: Any = begin, decoder: Any = decoder) -> None:
            began[decoder] += 1
            begin(update)

        decoder._branch.decoder.on_unexpected = noting
    async with Pipeline.connect(ar.endpoint, decoders=["low", "high"]) as pipeline:
        source = Source(*TEXT, pause=0.001)
        async with pipeline.submit(source) as stream:
            chunks = [chunk async for chunk in stream]
        for name in ("low", "high"):
            own = [chunk for chunk in chunks if chunk.decoder == name]
            assert FakeDecoder().indices(own) == said(TEXT)
        await nothing_is_kept(pipeline, ar)
    assert [count for count in began.values() if count] == [4, 4]


async def test_services_that_drain_take_the_rest_of_a_text_and_then_end(
    services: Services,
) -> None:
    ar = await services.ar(slowly)
    decoder = await services.decoder(ar)
    source = Source("One. ", "Two. ", "Three. ", "Four. ", pause=0.2)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with pipeline.submit(source) as stream:
            chunks = [await anext(stream)]
            draining = asyncio.ensure_future(drained(ar, decoder))
            chunks += [chunk async for chunk in stream]
            assert not draining.done() or source.read == 4
        assert FakeDecoder().indices(chunks) == said("One. Two. Three. Four.")
        await draining


async def test_one_that_begins_while_a_service_drains_is_refused(services: Services) -> None:
    ar = await services.ar(by_letters)
    await services.decoder(ar)
    source = Source(*TEXT)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        await drained(ar)
        async with asyncio.timeout(5):
            while pipeline.health().ok:
                await asyncio.sleep(0.005)
        with pytest.raises(OmniStageError, match="draining"):
            await pipeline.submit(source).finished()
        await nothing_is_kept(pipeline, ar)
    assert source.closed == 1


async def aborted(stream: Any, source: Source) -> None:
    await stream.abort()


async def timed_out(stream: Any, source: Source) -> None:
    with pytest.raises(DeadlineExceeded):
        await stream.finished()


@pytest.mark.parametrize("end", [aborted, timed_out])
async def test_a_text_that_ends_while_its_next_sentence_is_waited_for_is_not_waited_for(
    services: Services, end: Any
) -> None:
    ar = await services.ar(by_letters)
    decoder = await services.decoder(ar)
    source = Source("One. ", "Two. ", "Thr", then="waits")
    async with Pipeline.connect(ar.endpoint) as pipeline:
        stream = pipeline.submit(source, timeout=0.5)
        got = 0
        while got < len(said("One. Two.")):  # all audio is read, every request is over
            got += len(FakeDecoder().indices([await anext(stream)]))
        async with asyncio.timeout(5):
            while not (ar._awaited and not ar._running):
                await asyncio.sleep(0.005)
        draining = asyncio.ensure_future(drained(ar, decoder))
        await asyncio.sleep(0.1)
        assert not draining.done()
        await end(stream, source)
        await nothing_is_kept(pipeline, ar)
        await nothing_is_left(ar, decoder)
        await draining
    assert source.closed == 1


async def test_nor_one_whose_iterator_fails(services: Services) -> None:
    ar = await services.ar(by_letters)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        for pause in (None, 0.02):  # in the middle of a request, and between two
            source = Source("One. ", "Two. ", then=ValueError("no more"), pause=pause)
            with pytest.raises(ServerError, match="no more"):
                async for _ in pipeline.submit(source):
                    pass
            await nothing_is_kept(pipeline, ar)
        await drained(ar)
    await drained(decoder)


async def test_nor_one_whose_client_is_gone(services: Services) -> None:
    ar = await services.ar(by_letters)
    decoder = await services.decoder(ar)
    source = Source("One. ", then="waits")
    pipeline = Pipeline.connect(ar.endpoint)
    await pipeline.__aenter__()
    stream = pipeline.submit(source)
    await anext(stream)
    await source.waits.wait()
    await pipeline.aclose()
    assert (source.closed, tasks()) == (1, set())
    await nothing_is_left(ar, decoder)
    await drained(ar, decoder)

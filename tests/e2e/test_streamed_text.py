"""Texts that come, on real vLLM: the talker speaks them as they come, and lets go of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from omnistage import Pipeline
from omnistage.errors import InvalidRequest, ServerError
from omnistage.request import FinishReason
from omnistage.sentences import sentences
from omnistage.speech import Speech
from tests.e2e.conftest import wait_until_idle
from tests.test_streamed_text import Source, tasks

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

TEXT = (
    "Hello there! The kettle is boiling, so take it off the stove before it whistles. "
    "Dr. Smith said it costs 3.50 today, which is more than I paid for the kettle itself, the "
    "cups, and the spoons together. Really? Yes."
)
DELTAS = re.findall(r"\s?\S{1,5}|\s+$", TEXT)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def talker() -> AsyncIterator[Pipeline]:
    """The preset as it is."""
    async with Pipeline.from_preset("talker", start_method="fork") as pipeline:
        yield pipeline
        await wait_until_idle(pipeline)
        assert not tasks()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def one_by_one(talker: Pipeline) -> Speech:
    """Its sentences submitted one after the other, joined."""
    spoken = [await talker.submit(s, seed=7).collect() for s in sentences(TEXT)]
    assert len(spoken) == 5
    pcm = np.concatenate([speech.pcm for speech in spoken])
    return Speech(pcm=pcm, sample_rate=spoken[0].sample_rate, usage=spoken[0].usage)


@pytest.mark.parametrize("pause", [None, 0.0, 0.01])
async def test_it_sounds_as_its_sentences_one_by_one(
    talker: Pipeline, one_by_one: Speech, pause: float | None
) -> None:
    """Bit for bit: one request is in the engine at a time, here and there."""
    assert "".join(DELTAS) == TEXT
    speech = await talker.submit(Source(*DELTAS, pause=pause), seed=7).collect()
    np.testing.assert_array_equal(speech.pcm, one_by_one.pcm)
    assert speech.usage.finish_reason is FinishReason.STOP


async def test_a_long_text_by_sentence_does_too(talker: Pipeline, one_by_one: Speech) -> None:
    speech = await talker.submit(TEXT, by_sentence=True, seed=7).collect()
    np.testing.assert_array_equal(speech.pcm, one_by_one.pcm)


async def test_the_first_sentence_is_heard_before_the_second_is_there(talker: Pipeline) -> None:
    source = Source("Hello there! ", "The ket", then="waits")
    async with talker.submit(source) as stream, asyncio.timeout(20):
        chunk = await anext(stream)
        assert len(chunk.pcm)
    assert source.closed == 1
    await wait_until_idle(talker)


async def test_a_reader_that_is_slow_gets_all_of_it(talker: Pipeline, one_by_one: Speech) -> None:
    pieces = []
    async with talker.submit(Source(*DELTAS), seed=7) as stream:
        async for chunk in stream:
            await asyncio.sleep(0.02)
            pieces.append(chunk.pcm)
    np.testing.assert_array_equal(np.concatenate(pieces), one_by_one.pcm)


async def test_eight_at_once_beside_others_each_end_with_their_own_usage(talker: Pipeline) -> None:
    texts = ["One. Two is more. ", "Three? Then four and five! ", "Six. Seven. Eight. "]
    texts = [texts[n % 3] + f"This was number {n}." for n in range(8)]
    streams = [talker.submit(text) for text in texts]
    streams += [talker.submit(Source(*text, pause=0.001)) for text in texts]
    usages = await asyncio.gather(*(stream.finished() for stream in streams))
    expected, usages = usages[:8], usages[8:]
    for usage, alone in zip(usages, expected, strict=True):
        assert usage.prompt_tokens == alone.prompt_tokens
        assert usage.finish_reason is FinishReason.STOP
    await wait_until_idle(talker)


async def test_an_iterator_that_raises_lets_go_of_the_engine(talker: Pipeline) -> None:
    source = Source(*DELTAS[:12], pause=0.01, then=OSError("the language model is gone"))
    with pytest.raises(ServerError, match="language model is gone"):
        await talker.submit(source).finished()
    await wait_until_idle(talker)
    assert source.closed == 1


@pytest.mark.parametrize("chunks", [0, 1, 5, 12])
async def test_an_abort_at_any_moment_lets_go_of_the_engine(talker: Pipeline, chunks: int) -> None:
    source = Source(*DELTAS, pause=0.005)
    async with talker.submit(source) as stream:
        for _ in range(chunks):
            await anext(stream)
    assert source.closed == 1
    assert not tasks()
    await wait_until_idle(talker)


async def test_what_cannot_be_spoken_is_skipped_where_the_rest_can(talker: Pipeline) -> None:
    mixed = Source("你好。", "Hello there! ", "🙂", then=None)
    plain = await talker.submit("Hello there!", seed=3).collect()
    speech = await talker.submit(mixed, seed=3).collect()
    np.testing.assert_array_equal(speech.pcm, plain.pcm)
    with pytest.raises(InvalidRequest, match="no request"):
        await talker.submit(Source("你好。")).finished()

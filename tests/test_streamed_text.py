"""A text that comes as it is spoken: one stream, whatever its iterator does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage import ChunkPolicy, DecoderStageConfig, Pipeline, StageInput
from omnistage.config import Deadlines
from omnistage.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OmniStageError,
    ServerError,
    StageClosed,
    StreamClosed,
)
from omnistage.pieces import _AHEAD
from omnistage.request import AudioChunk, FinishReason
from omnistage.sentences import sentences
from omnistage.stream import Stream, Submission
from omnistage.testing import FakeDecoder, Script, scripted
from tests.parts import branches_of

TEXT = "One. Two and three! Four, five; six? The rest of it"
CHUNKS = ChunkPolicy(first=4, growth=1.0, steady=4)


class Source:
    """A text's iterator that notes what is done with it."""

    def __init__(self, *parts: Any, pause: float | None = None, then: Any = None) -> None:
        self.parts = list(parts)
        self.pause = pause
        self.then = then  # an exception, or "waits"
        self.read = 0
        self.closed = 0
        self.waits = asyncio.Event()

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Any:
        if self.pause is not None:
            await asyncio.sleep(self.pause)
        if self.read < len(self.parts):
            self.read += 1
            return self.parts[self.read - 1]
        if self.then == "waits":
            self.waits.set()
            await asyncio.Event().wait()
        if self.then is not None:
            raise self.then
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed += 1


def by_letters(asked: StageInput) -> Script:
    """A sentence samples its letters, each four times."""
    text = str(asked.prompt)
    if "refused" in text:
        raise InvalidRequest("not this sentence", parameter="prompt")
    ids = [ord(c) for c in text for _ in range(4)]
    return Script(ids=ids, ids_per_step=8, stalls="stalls" in text)


def said(text: str) -> list[int]:
    return [ord(c) for sentence in sentences(text) for c in sentence for _ in range(4)]


def pipeline(
    script: Any = by_letters, *, split: Any = None, repeat: int = 4, **config: Any
) -> Pipeline:
    made = {"chunks": CHUNKS, "build": lambda: FakeDecoder(repeat=repeat), **config}
    return Pipeline(ar=scripted(script, split=split), decoder=DecoderStageConfig(**made))


async def heard(stream: Stream) -> list[int]:
    async with stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.request_id for chunk in chunks} == {stream.request_id}
    return FakeDecoder().indices(chunks)


def tasks() -> set[str]:
    """Names of the tasks that read a text."""
    names = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
    return {name for name in names if name.startswith("omnistage-text")}


@asynccontextmanager
async def nothing_left(pipeline: Pipeline) -> AsyncIterator[Pipeline]:
    """The pipeline, in which nothing runs at the end."""
    async with pipeline as running:
        yield running
        async with asyncio.timeout(5):
            while tasks() or running._running:
                await asyncio.sleep(0.001)
        stage: Any = running._routes[0].ar
        assert not len(stage)
        assert not any(len(branch.decoder) for branch in branches_of(running))


@pytest.mark.parametrize("pause", [None, 0, 0.002])
async def test_a_text_that_comes_is_one_stream(pause: float | None) -> None:
    source = Source(*TEXT, pause=pause)
    async with nothing_left(pipeline()) as running:
        stream = running.submit(source, request_id="mine")
        assert await heard(stream) == said(TEXT)
        usage = stream.usage
    assert usage is not None
    assert usage.output_tokens == len(said(TEXT))
    assert usage.prompt_tokens == sum(map(len, sentences(TEXT)))
    assert usage.finish_reason is FinishReason.STOP
    assert (source.read, source.closed) == (len(TEXT), 1)


async def test_its_audio_is_that_of_its_sentences_one_by_one() -> None:
    class Noisy(FakeDecoder):
        """Its audio depends on the windows that it gets."""

        def decode(self, windows: Any) -> list[Any]:
            return [p + np.float32(len(p)) for p in super().decode(windows)]

    async with nothing_left(pipeline(build=Noisy)) as running:
        one = [await running.submit(s, seed=5).collect() for s in sentences(TEXT)]
        whole = await running.submit(Source(*TEXT), seed=5).collect()
        at_once = await running.submit(TEXT, by_sentence=True, seed=5).collect()
    expected = np.concatenate([speech.pcm for speech in one])
    np.testing.assert_array_equal(whole.pcm, expected)
    np.testing.assert_array_equal(at_once.pcm, expected)
    assert whole.usage == at_once.usage


async def test_each_sentence_is_a_request_that_says_so_and_may_be_cut_further() -> None:
    asked: list[StageInput] = []

    def words(given: StageInput) -> Sequence[StageInput]:
        asked.append(given)
        return [replace(given, prompt=word) for word in str(given.prompt).split()]

    async with nothing_left(pipeline(split=words)) as running:
        options: Any = {"seed": 3, "voice": "v", "conditioning": {"x": np.ones(2)}}
        got = await heard(running.submit(Source(*TEXT), **options))
    assert got == [ord(c) for word in TEXT.split() for c in word for _ in range(4)]
    assert asked == [StageInput(prompt=s, by_sentence=True, **options) for s in sentences(TEXT)]


async def test_a_long_text_is_run_by_sentence_when_asked() -> None:
    prompts: list[Any] = []

    def script(asked: StageInput) -> Script:
        prompts.append(asked.prompt)
        return by_letters(asked)

    text = "This is a sentence. " * 120
    async with nothing_left(pipeline(script)) as running:
        assert await heard(running.submit(text, by_sentence=True)) == said(text)
        assert prompts == ["This is a sentence."] * 120
        assert await heard(running.submit("A. B c.")) == [ord(c) for c in "A. B c." for _ in "1234"]
        for prompt in ([1, 2], np.ones((2, 3))):
            with pytest.raises(InvalidRequest) as raised:
                running.submit(prompt, by_sentence=True)
            assert raised.value.parameter == "by_sentence"
        with pytest.raises(InvalidRequest, match="by_sentence must be bool"):
            running.submit("One.", by_sentence="yes")  # type: ignore[arg-type]


async def test_what_has_no_letter_is_left_out_and_the_rest_goes_on() -> None:
    text = "--- \n\nHello! ☺ ... Well. ☺"
    async with nothing_left(pipeline()) as running:
        for prompt in (Source(*text), Source(text)):
            spoken = await heard(running.submit(prompt))
            assert spoken == said("--- \n\nHello!") + said("☺ ... Well.")


async def test_an_adapter_may_leave_a_sentence_out_but_not_all() -> None:
    def picky(asked: StageInput) -> Sequence[StageInput]:
        return [] if "Two" in str(asked.prompt) else [asked]

    async with nothing_left(pipeline(split=picky)) as running:
        assert await heard(running.submit(Source("One. Two. Six."))) == said("One. Six.")
        with pytest.raises(InvalidRequest, match="made no request"):
            await running.submit(Source("Two. Two.")).finished()


@pytest.mark.parametrize("parts", [[], [""], [" ", "\n\n"]])
async def test_a_text_without_a_word_is_refused(parts: list[str]) -> None:
    source = Source(*parts)
    async with nothing_left(pipeline()) as running:
        with pytest.raises(InvalidRequest, match="empty") as raised:
            await running.submit(source).collect()
        assert raised.value.parameter == "prompt"
        with pytest.raises(InvalidRequest, match="empty"):
            await running.submit("".join(parts), by_sentence=True).collect()
        with pytest.raises(InvalidRequest, match="no request"):
            await running.submit(Source("☺")).collect()
    assert source.closed == 1


@pytest.mark.parametrize("wrong", [b"bytes", None, 7, ["a"]])
async def test_parts_that_are_no_text_are_refused(wrong: Any) -> None:
    source = Source("One. ", wrong, "Two.")
    async with nothing_left(pipeline()) as running:
        stream = running.submit(source)
        with pytest.raises(InvalidRequest, match="parts of str, got") as raised:
            await stream.finished()
        assert raised.value.request_id == stream.request_id
    assert (source.read, source.closed) == (2, 1)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), StreamClosed("another's"), asyncio.CancelledError()]
)
async def test_an_iterator_that_raises_fails_its_request(error: BaseException) -> None:
    source = Source("One. ", "Two. ", "Thr", then=error)
    async with nothing_left(pipeline()) as running:
        with pytest.raises(ServerError, match="the text's iterator") as raised:
            await running.submit(source).finished()
        assert raised.value.__cause__ is error
        assert await heard(running.submit("Another.")) == said("Another.")
    assert source.closed == 1


async def test_what_is_no_iterator_after_all_fails_its_request() -> None:
    class Odd:
        closed = 0

        def __aiter__(self) -> Any:
            return self

        async def aclose(self) -> None:
            self.closed += 1
            raise ValueError("cannot")

    odd: Any = Odd()
    async with nothing_left(pipeline()) as running:
        with pytest.raises(ServerError, match="TypeError"):
            await running.submit(odd).finished()
    assert odd.closed == 1


async def test_a_sentence_that_is_refused_ends_all_of_it() -> None:
    source = Source("One. ", "This is refused. ", "Three. ", then="waits")
    async with nothing_left(pipeline()) as running:
        with pytest.raises(InvalidRequest, match="not this sentence"):
            await running.submit(source).finished()
    assert source.closed == 1


async def test_an_iterator_that_cannot_be_closed_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Cannot(Source):
        async def aclose(self) -> None:
            raise ValueError("cannot be closed")

    async with nothing_left(pipeline()) as running:
        assert await heard(running.submit(Cannot("One."))) == said("One.")
    assert "closing its text's iterator failed" in caplog.text


async def ends_by_abort(stream: Stream, running: Pipeline) -> None:
    await stream.abort()


async def ends_by_leaving(stream: Stream, running: Pipeline) -> None:
    await stream.__aexit__(None, None, None)


async def ends_by_cancel(stream: Stream, running: Pipeline) -> None:
    reading = asyncio.ensure_future(stream.finished())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])


async def ends_by_timeout(stream: Stream, running: Pipeline) -> None:
    with pytest.raises(DeadlineExceeded, match="not complete"):
        await stream.finished()


async def ends_with_the_pipeline(stream: Stream, running: Pipeline) -> None:
    await running.aclose()
    with pytest.raises(StageClosed):
        await stream.finished()


@pytest.mark.parametrize(
    "end",
    [ends_by_abort, ends_by_leaving, ends_by_cancel, ends_by_timeout, ends_with_the_pipeline],
)
@pytest.mark.parametrize("parts", [(), ("One. ", "Two is not compl")])
async def test_an_iterator_that_waits_for_ever_goes_with_its_stream(
    parts: Sequence[str], end: Callable[[Stream, Pipeline], Any]
) -> None:
    source = Source(*parts, then="waits")
    async with pipeline() as running:
        stream = running.submit(source, timeout=0.2)
        await stream.__aenter__()
        await source.waits.wait()
        assert len(tasks()) == 1
        async with asyncio.timeout(5):
            await end(stream, running)
            while tasks():
                await asyncio.sleep(0)
        assert (source.closed, running._running) == (1, {})


async def test_a_generator_is_ended_at_the_place_where_it_waits() -> None:
    ended: list[str] = []

    async def generator() -> AsyncIterator[str]:
        try:
            yield "One. "
            yield "Two. "
            yield "Three. "
            yield "Four. "
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("ended")

    async with nothing_left(pipeline(max_unread=0.001)) as running:
        async with running.submit(generator()) as stream:  # it waits for a reader
            await anext(stream)
        assert ended == ["ended"]
        async with running.submit(generator()) as stream:  # it waits for what never comes
            async for chunk in stream:
                if chunk.index == 10:
                    break
        assert ended == ["ended"] * 2


def drop(streams: list[Stream]) -> None:
    streams.clear()
    gc.collect()


async def test_a_dropped_stream_takes_its_iterator_along() -> None:
    source = Source("One. ", "Two", then="waits")
    async with nothing_left(pipeline()) as running:
        stream = running.submit(source)
        await anext(stream)
        await source.waits.wait()
        dropped = [stream]
        del stream
        with pytest.warns(ResourceWarning, match="dropped"):
            drop(dropped)
        async with asyncio.timeout(5):
            while tasks():
                await asyncio.sleep(0)
    assert source.closed == 1


async def test_one_that_is_never_started_is_closed_unread() -> None:
    sources = [Source(*TEXT) for _ in range(2)]
    async with nothing_left(pipeline()) as running:
        await running.submit(sources[0]).abort()
        async with running.submit(sources[1]):
            pass
    assert [(source.read, source.closed) for source in sources] == [(0, 1), (0, 1)]


async def test_an_iterator_that_aborts_its_own_stream_ends_it() -> None:
    streams: list[Stream] = []

    async def aborts() -> AsyncIterator[str]:
        yield "One. "
        await streams[0].abort()
        await asyncio.Event().wait()

    async with nothing_left(pipeline()) as running, asyncio.timeout(5):
        streams.append(running.submit(aborts()))
        with pytest.raises(StreamClosed):
            await streams[0].finished()


async def test_an_iterator_that_swallows_its_cancellation_is_ended_at_its_next_part() -> None:
    ended: list[str] = []

    async def swallows() -> AsyncIterator[str]:
        try:
            yield "One. "
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            yield "Two. "
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async with nothing_left(pipeline()) as running, asyncio.timeout(5):
        async with running.submit(swallows()) as stream:
            await anext(stream)
        assert ended == ["ended"]


async def test_an_iterator_that_does_not_let_itself_be_closed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("omnistage.pieces._CLOSE_SECONDS", 0.05)

    class Stubborn(Source):
        async def aclose(self) -> None:
            await asyncio.Event().wait()

    source = Stubborn("One. ", then="waits")
    async with nothing_left(pipeline()) as running:
        stream = running.submit(source)
        await anext(stream)
        with pytest.raises(DeadlineExceeded, match="iterator did not let itself be closed"):
            await stream.abort()


async def test_no_more_is_read_than_is_needed() -> None:
    """A reader that does not read holds decoding, that the AR stage, and that the iterator."""
    source = Source(*(f"Sentence number {n} of it. " for n in range(100)))
    held = nothing_left(pipeline(max_unread=0.001))
    async with held as running, running.submit(source) as stream:
        await anext(stream)
        await asyncio.sleep(0.1)
        request = stream._request
        assert request._started_takes == 2  # one is decoded, one more is sampled
        assert source.read <= 2 + _AHEAD + 1
        async for _ in stream:
            # The last part shows the end of the sentence before it.
            assert source.read <= request._started_takes + _AHEAD + 1
    assert source.read == 100


async def test_a_part_of_any_length_is_cut_as_it_is_needed() -> None:
    source = Source("A sentence. " * 20_000)
    async with nothing_left(pipeline()) as running, running.submit(source) as stream:
        for _ in range(20):
            await anext(stream)
            assert len(stream._request._pieces) <= _AHEAD


class Watched:
    """Events of a run, in order: a piece submitted, a piece's last audio read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        go_on = Submission._go_on

        def noting(request: Submission) -> None:
            before = request._started_takes
            go_on(request)
            if request._started_takes > before:
                self.events.append(("submitted", before))

        monkeypatch.setattr(Submission, "_go_on", noting)

    async def read(self, stream: Stream, parts: Sequence[str], pause: float) -> None:
        """Read a stream and note where each piece's audio ends."""
        ends = list(np.cumsum([len(said(part)) for part in parts]))
        samples, piece = 0, 0
        async with stream:
            async for chunk in stream:
                await asyncio.sleep(pause)
                samples += len(FakeDecoder().indices([chunk]))
                while piece < len(ends) and samples >= ends[piece]:
                    self.events.append(("read", piece))
                    piece += 1
        assert piece == len(parts)


@pytest.mark.parametrize("pause", [0.0, 0.001])
@pytest.mark.parametrize("in_time", [True, False])
async def test_the_next_sentence_is_submitted_before_the_last_audio_of_the_former_is_read(
    monkeypatch: pytest.MonkeyPatch, pause: float, in_time: bool
) -> None:
    """Where its text is there; otherwise as soon as it is."""
    parts = [f"Sentence number {n} is here." for n in range(12)]
    text = Source(" ".join(parts)) if in_time else Source(*(f"{p} " for p in parts), pause=0.002)
    watched = Watched(monkeypatch)
    async with nothing_left(pipeline(lambda a: replace(by_letters(a), step_after=0.001))) as p:
        await watched.read(p.submit(text), parts, pause)
    places = {event: at for at, event in enumerate(watched.events)}
    assert len(places) == 2 * len(parts)
    for n in range(len(parts) - 1):
        assert places["submitted", n] < places["submitted", n + 1]
        if in_time:
            assert places["submitted", n + 1] < places["read", n]


async def test_a_sentence_does_not_wait_for_the_next_part_of_the_text() -> None:
    source = Source("One. ", then="waits")
    async with nothing_left(pipeline()) as running, running.submit(source) as stream:
        got = 0
        async with asyncio.timeout(5):
            while got < len(said("One.")):
                got += len(FakeDecoder().indices([await anext(stream)]))


async def test_to_wait_for_the_callers_text_is_no_failure_of_a_stage() -> None:
    short = Deadlines(first_audio=0.15, between_chunks=0.1)
    source = Source("One. ", "Two. ", "Three.", pause=0.35)
    async with nothing_left(pipeline(deadlines=short)) as running:
        assert await heard(running.submit(source)) == said("One. Two. Three.")


async def test_entering_does_not_wait_for_the_text() -> None:
    """So that who enters the stream can be the one who makes the text."""
    queue: asyncio.Queue[str | None] = asyncio.Queue()

    async def queued() -> AsyncIterator[str]:
        while (part := await queue.get()) is not None:
            yield part

    async with nothing_left(pipeline()) as running, running.submit(queued()) as stream:
        for part in ("One. T", "wo.", None):
            queue.put_nowait(part)
        async with asyncio.timeout(5):
            assert FakeDecoder().indices([chunk async for chunk in stream]) == said("One. Two.")


async def test_eight_streams_at_once_keep_to_themselves() -> None:
    texts = [" ".join(f"Text {n} sentence {k}." for k in range(n + 1)) for n in range(8)]
    async with nothing_left(pipeline()) as running:
        streams = [running.submit(Source(*text, pause=0)) for text in texts]
        got = await asyncio.gather(*map(heard, streams))
    assert got == [said(text) for text in texts]


async def test_without_a_decoder_the_sentences_follow_one_another_too() -> None:
    async with Pipeline(ar=scripted(by_letters), decoder=None) as running:
        usage = await running.submit(Source(*TEXT)).finished()
        assert not tasks()
    assert usage.output_tokens == len(said(TEXT))


async def test_each_of_several_decoders_has_the_whole_text() -> None:
    made = [DecoderStageConfig(build=FakeDecoder, name=name) for name in ("a", "b")]
    both = Pipeline(ar=scripted(by_letters), decoder=made)
    async with both as running, running.submit(Source(*TEXT, pause=0)) as stream:
        chunks: list[AudioChunk] = [chunk async for chunk in stream]
    for name in ("a", "b"):
        own = [chunk for chunk in chunks if chunk.decoder == name]
        assert [chunk.index for chunk in own] == list(range(len(own)))
        assert FakeDecoder().indices(own) == said(TEXT)


async def test_a_text_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "omnistage"):
        async with pipeline() as running:
            await running.submit(Source(*TEXT)).finished()
    lines = [r.getMessage() for r in caplog.records if "request " in r.getMessage()]
    assert [line.partition(", ")[2] for line in lines] == [
        "stage ar: started",
        "stage decoder: finished: stop",
    ]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_end_at_any_moment_leaves_nothing(seed: int) -> None:
    """Texts that come, stop, fail and stall, read, aborted, cancelled and dropped at random."""
    draw = random.Random(seed)

    async def one(running: Pipeline) -> Source:
        text = draw.choice([TEXT, "", "One. refused. Two.", "One. stalls. Two.", "Word " * 200])
        cut = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(8))))
        parts = [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
        then = draw.choice([None, None, "waits", ValueError("x")])
        source = Source(*parts, pause=draw.choice([None, 0, 0.001]), then=then)
        stream = running.submit(source, timeout=draw.choice([0.005, 0.05, 0.2]))
        take = draw.randrange(20)
        try:
            async with asyncio.timeout(draw.choice([0.002, 0.02, 5])), stream:
                async for chunk in stream:
                    if chunk.index == take:
                        break
        except (OmniStageError, TimeoutError):
            pass
        return source

    async def main() -> None:
        async with nothing_left(pipeline(max_unread=draw.choice([0.001, 30]))) as running:
            sources = await asyncio.gather(*(one(running) for _ in range(8)))
            assert [source.closed for source in sources] == [1] * 8

    asyncio.run(main())

"""Stages behind a decoder: what passes through them, and what becomes of their failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnistage.config import Deadlines, DecoderStageConfig
from omnistage.errors import (
    DeadlineExceeded,
    DecoderError,
    InvalidRequest,
    OmniStageError,
    ServerError,
    StageClosed,
    StartupError,
)
from omnistage.request import AudioChunk, FinishReason, Start, Terminal
from omnistage.stages.base import AudioSink, AudioStage, Stage
from omnistage.stages.branch import Branch
from omnistage.transport.endpoints import Endpoints
from omnistage.wire import Update
from tests.stages.factories import Decoder, Sink, audio

FRAMES = [(3, 4), (5, 6), (7, 8), (9, 10)]
END = Terminal(FinishReason.STOP, 8)


class Gain:
    """Doubles the audio; does what it is told with a request whose id names it."""

    sample_rate = 8000

    def __init__(self, name: str = "gain") -> None:
        self.name = name
        self.dropped: list[str] = []
        self.released: list[str] = []
        self.closed = 0

    async def start(self) -> None:
        pass

    async def serve(self) -> None:
        await asyncio.Event().wait()

    async def drain(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closed += 1

    def open(self, request_id: str, sink: AudioSink) -> AudioSink:
        if request_id == "open-raises":
            raise RuntimeError("open")
        return _Doubling(request_id, sink)

    def drop(self, request_id: str) -> None:
        self.dropped.append(request_id)
        if request_id == "drop-raises":
            raise RuntimeError("drop")

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)


class _Doubling:
    def __init__(self, request_id: str, sink: AudioSink) -> None:
        self.kind = request_id
        self.sink = sink

    def on_chunk(self, chunk: AudioChunk) -> None:
        if self.kind == "chunk-raises":
            raise RuntimeError("chunk")
        if self.kind == "refuses":
            raise InvalidRequest("no audio for you")
        self.sink.on_chunk(replace(chunk, pcm=chunk.pcm * 2))

    def on_end(self, terminal: Terminal) -> None:
        if self.kind == "never-ends":
            return
        self.sink.on_end(terminal)
        if self.kind == "ends-twice":
            self.sink.on_end(terminal)
            self.sink.on_error(DecoderError("late"))

    def on_error(self, error: OmniStageError) -> None:
        self.sink.on_error(error)


@asynccontextmanager
async def running(*then: Callable[[], AudioStage], **config: Any) -> AsyncIterator[Branch]:
    with Endpoints() as endpoints:
        branch = Branch(DecoderStageConfig(build=Decoder, then=then, **config), endpoints)
        await branch.start()
        serving = [asyncio.create_task(stage.serve()) for stage in branch.stages]
        yield branch
        await branch.aclose()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        assert not len(branch.decoder)
        assert not branch._crossings


def feed(branch: Branch, request_id: str = "r", *, open_first: bool = True) -> Sink:
    sink = Sink()
    if open_first:
        branch.open(request_id, sink)
    ids = tuple(i for frame in FRAMES for i in frame)
    branch.decoder.on_update(Update(request_id, ids=ids, start=Start(), terminal=END), (), 0)
    return sink


async def end(sink: Sink) -> Terminal | OmniStageError:
    async with asyncio.timeout(10):
        return await sink.outcome


async def test_audio_passes_every_stage_in_order() -> None:
    stages = [Gain("first"), Gain("second")]
    assert isinstance(stages[0], AudioStage)
    assert isinstance(stages[0], Stage)
    async with running(lambda: stages[0], lambda: stages[1]) as branch:
        sink = feed(branch)
        assert await end(sink) == END
        assert sink.pcm == pytest.approx([4 * x for x in audio(FRAMES)])
        assert branch.sample_rate == 8000
    assert [stage.dropped for stage in stages] == [["r"], ["r"]]
    assert [stage.closed for stage in stages] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "error", "stage"),
    [
        ("chunk-raises", ServerError, "gain"),
        ("refuses", InvalidRequest, "gain"),
        ("never-ends", DeadlineExceeded, "gain"),
    ],
)
async def test_a_stage_that_fails_a_request_serves_the_next_one(
    kind: str, error: type[OmniStageError], stage: str
) -> None:
    async with running(Gain, deadlines=Deadlines(between_chunks=0.2)) as branch:
        bad, good = feed(branch, kind), feed(branch, "good")
        outcome = await end(bad)
        assert type(outcome) is error
        assert (outcome.request_id, outcome.stage) == (kind, stage)
        branch.drop(kind)
        assert await end(good) == END
        await branch.release(kind)


async def test_a_stage_that_cannot_open_a_request_refuses_it_and_keeps_nothing() -> None:
    async with running(Gain) as branch:
        with pytest.raises(ServerError, match="RuntimeError: open"):
            branch.open("open-raises", Sink())
        assert not len(branch.decoder)


async def test_what_a_stage_says_after_the_end_is_not_heard() -> None:
    async with running(Gain) as branch:
        assert await end(feed(branch, "ends-twice")) == END


async def test_a_stage_that_raises_in_drop_is_dropped_all_the_same() -> None:
    async with running(Gain) as branch:
        sink = feed(branch, "drop-raises")
        branch.drop("drop-raises")
        assert not sink.outcome.done()
        assert await end(feed(branch)) == END


async def test_a_dropped_request_is_dropped_and_released_in_every_stage() -> None:
    stage = Gain()
    async with running(lambda: stage) as branch:
        branch.open("r", Sink())
        branch.drop("r")
        branch.drop("r")
        await branch.release("r")
    assert (stage.dropped, stage.released) == (["r"], ["r"])


async def test_an_error_of_the_decoder_reaches_the_caller_through_the_stages() -> None:
    async with running(Gain) as branch:
        sink = Sink()
        branch.open("r", sink)
        branch.decoder.on_update(Update("r", ids=(66, 66), start=Start(), terminal=END), (), 0)
        assert isinstance(await end(sink), DecoderError)


async def test_a_stage_still_at_work_after_the_last_update_has_not_lost_it() -> None:
    async with running(Gain, deadlines=Deadlines(between_chunks=None)) as branch:
        feed(branch, "never-ends")
        async with asyncio.timeout(10):
            while len(branch.decoder):
                await asyncio.sleep(0.01)
        assert branch.has_ended("never-ends")
        branch.drop("never-ends")
        assert not branch.has_ended("never-ends")


async def test_a_stage_that_cannot_be_made_or_started_is_named() -> None:
    def broken() -> AudioStage:
        raise OSError("no such filter")

    with Endpoints() as endpoints:
        branch = Branch(DecoderStageConfig(build=Decoder, then=[broken]), endpoints)
        with pytest.raises(StartupError, match="OSError: no such filter"):
            await branch.start()
        await branch.aclose()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"index": 5}, "index 5 where 0 was due"),
        ({"request_id": "other"}, "is of other"),
        ({"pcm": np.zeros(3, np.int16)}, "no float32 array"),
        ({"pcm": np.zeros((2, 2), np.float32)}, "no float32 array"),
        ({"pcm": np.zeros(0, np.float32)}, "no float32 array"),
    ],
)
async def test_a_stage_that_gives_what_is_no_audio_fails_its_request(
    wrong: dict[str, Any], words: str
) -> None:
    class Wrong(Gain):
        def open(self, request_id: str, sink: AudioSink) -> AudioSink:
            entry: Any = super().open(request_id, sink)
            entry.on_chunk = lambda chunk: sink.on_chunk(replace(chunk, **wrong))
            return entry  # type: ignore[no-any-return]

    async with running(Wrong) as branch:
        outcome = await end(feed(branch))
        assert isinstance(outcome, ServerError)
        assert words in str(outcome)
        assert outcome.stage == "gain"


async def test_a_stage_that_calls_its_sink_from_a_thread_is_told_so() -> None:
    class Threaded(Gain):
        def open(self, request_id: str, sink: AudioSink) -> AudioSink:
            entry: Any = super().open(request_id, sink)
            entry.on_chunk = lambda chunk: threading.Thread(
                target=sink.on_chunk, args=(chunk,)
            ).start()
            entry.on_end = lambda terminal: None
            return entry  # type: ignore[no-any-return]

    async with running(Threaded) as branch:
        assert "from another thread" in str(await end(feed(branch)))


async def test_what_is_no_audio_stage_is_refused_with_its_number() -> None:
    not_one: Any = lambda: "a string"  # noqa: E731
    with Endpoints() as endpoints:
        branch = Branch(DecoderStageConfig(build=Decoder, then=[Gain, not_one]), endpoints)
        with pytest.raises(StartupError, match=r"stage 2 behind .* is no AudioStage"):
            await branch.start()
        await branch.aclose()


async def test_closing_fails_what_is_open() -> None:
    async with running(Gain) as branch:
        sink = Sink()
        branch.open("r", sink)
        await branch.aclose()
        assert isinstance(await end(sink), StageClosed)
        with pytest.raises(StageClosed):
            branch.open("s", Sink())

"""Many streams in one decoder stage: whose turn it is, what each keeps, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from omnistage.decoders.base import Rows
from omnistage.errors import OmniStageError
from omnistage.request import AudioChunk, ChunkPolicy, Codes, FinishReason, Pcm, Terminal
from omnistage.stages.decoder import DecoderStage
from omnistage.wire import Update
from tests.stages.factories import END, FRAMES, Decoder, Feed, Sink, audio, running

SLOTS = 8
MEMORY = 1100  # how much of what is over a stage may remember at most, whatever it is for


class Slot:
    """A stream's place in a decoder that has only so many."""


class Pooled(Decoder):
    """A renderer with a place for each of eight streams, which a stream keeps while it lives."""

    rows_per_frame = 1

    def __init__(self) -> None:
        super().__init__()
        self.free = SLOTS

    def open(self, seed: int) -> Slot:
        if not self.free:
            raise RuntimeError("no free slot")
        self.free -= 1
        slot = Slot()
        weakref.finalize(slot, self._give_back)
        return slot

    def _give_back(self) -> None:
        self.free += 1

    def render(self, state: Slot, rows: Rows, *, final: bool) -> Pcm:
        return rows


async def ends(stage: DecoderStage, feed: Feed) -> None:
    feed.send(*FRAMES, terminal=END)
    assert await feed.end() is END


async def is_dropped_while_it_is_decoded(stage: DecoderStage, feed: Feed) -> None:
    feed.send(*FRAMES)
    await asyncio.sleep(0)
    stage.drop(feed.request_id)


async def is_dropped_while_preempted(stage: DecoderStage, feed: Feed) -> None:
    feed.send(*FRAMES[:3])
    stage.on_update(Update(feed.request_id, position=6, paused=True), (), 0)
    await asyncio.sleep(0)
    stage.drop(feed.request_id)


async def ends_in_a_message_without_frames(stage: DecoderStage, feed: Feed) -> None:
    for at in range(0, 30, 10):
        feed.send(*FRAMES[at : at + 10])
        await asyncio.sleep(0)
    feed.send(terminal=END)
    assert await feed.end() is END


async def ends_in_a_message_that_cuts_a_frame(stage: DecoderStage, feed: Feed) -> None:
    feed.send(*FRAMES[:9])
    stage.on_update(Update(feed.request_id, position=18, ids=(1,), terminal=END), (), 0)
    assert isinstance(await feed.end(), OmniStageError)


async def ends_in_an_error_of_the_producers(stage: DecoderStage, feed: Feed) -> None:
    feed.send(*FRAMES[:9], terminal=Terminal(FinishReason.ERROR, 0, 0, "why", "ProcessorError"))
    assert isinstance(await feed.end(), OmniStageError)


ENDINGS = [
    ends,
    is_dropped_while_it_is_decoded,
    is_dropped_while_preempted,
    ends_in_a_message_without_frames,
    ends_in_a_message_that_cuts_a_frame,
    ends_in_an_error_of_the_producers,
]


def held(stage: DecoderStage) -> int:
    """Entries of whatever in a stage can grow without a bound of its own."""
    assert len(stage._gone) <= 1024
    kept = (value for value in vars(stage).values() if isinstance(value, dict | set | list))
    return sum(map(len, kept)) - len(stage._gone)


async def many(stage: DecoderStage, endings: list[Any]) -> None:
    """Run as many streams as there are places; the errors, and what they hold, are forgotten."""
    names = count(stage.late_updates)  # which grows with each of them, so that none comes twice
    feeds = [Feed(stage, f"r{next(names)}") for _ in range(SLOTS)]
    await asyncio.gather(*(end(stage, f) for end, f in zip(endings, feeds, strict=True)))
    for feed in feeds:
        await stage.release(feed.request_id)
        feed.send((1, 1))  # late: it is no new stream


async def all_free(decoder: Pooled) -> None:
    """Wait until the stage's own task has let go of the last batch, and errors of their frames."""
    async with asyncio.timeout(10):
        for attempt in count():
            if decoder.free == SLOTS:
                return
            gc.collect(0 if attempt % 20 != 19 else 2)  # a full one takes long beside vLLM
            await asyncio.sleep(0)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
async def test_a_streams_place_in_the_decoder_is_free_when_it(ending: Any) -> None:
    decoder = Pooled()
    async with running(decoder) as stage:
        for _ in range(3):
            await many(stage, [ending] * SLOTS)
            await all_free(decoder)
        assert held(stage) <= 3 * SLOTS


async def test_2000_streams_that_end_in_any_way_leave_nothing() -> None:
    seeded = random.Random(7)
    decoder = Pooled()
    async with running(decoder) as stage:
        for _ in range(250):
            await many(stage, seeded.choices(ENDINGS, k=SLOTS))
            await all_free(decoder)
        assert stage.late_updates == 2000
        assert held(stage) <= MEMORY
        assert not len(stage)


class Plain(Decoder):
    """Needs no context, so that nothing is pending behind the last whole chunk."""

    left_context = 0
    right_context = 0

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        return [(window.sum(axis=1) / 1000).astype(np.float32) for window in windows]


@pytest.mark.parametrize("decoder", [Plain, Decoder], ids=["no lookahead", "lookahead"])
@pytest.mark.parametrize(
    ("frames", "chunks"), [(50, [25, 25]), (57, [25, 25, 7]), (25, [25]), (0, [])]
)
async def test_an_end_without_frames_gives_what_was_left_and_nothing_twice(
    decoder: type[Decoder], frames: int, chunks: list[int]
) -> None:
    async with running(decoder(), chunks=ChunkPolicy(first=25, growth=1, steady=25)) as stage:
        feed = Feed(stage, "r")
        for frame in FRAMES[:frames]:
            feed.send(frame)
            await asyncio.sleep(0)
        if decoder is Plain:
            async with asyncio.timeout(10):
                while sum(len(chunk.pcm) for chunk in feed.sink.chunks) < frames // 25 * 25:
                    await asyncio.sleep(0.001)
        feed.send(terminal=END)
        assert await feed.end() is END
    assert [len(chunk.pcm) for chunk in feed.sink.chunks] == chunks
    whole = decoder().decode([np.array(FRAMES[:frames]).reshape(-1, 2)])[0]
    assert feed.sink.pcm == [float(sample) for sample in whole]


async def test_an_end_that_waits_behind_a_backlog_cuts_no_stream_short() -> None:
    decoder = Decoder()
    async with running(decoder, max_batch=4) as stage:
        decoder.gate = threading.Event()
        feeds = [Feed(stage, f"r{i}") for i in range(16)]
        for at in range(0, 60, 6):
            for feed in feeds:
                feed.send(*FRAMES[at : at + 6])
            await asyncio.sleep(0)
        for feed in feeds:
            feed.send(terminal=END)
        assert not any(feed.sink.chunks for feed in feeds)
        decoder.gate.set()
        for feed in feeds:
            assert await feed.end() is END
            assert feed.sink.pcm == audio(FRAMES)


class Turns(Sink):
    """Notes in one list, for all streams, who got a chunk."""

    def __init__(self, name: str, turns: list[str]) -> None:
        super().__init__()
        self._name, self._turns = name, turns

    def on_chunk(self, chunk: AudioChunk) -> None:
        super().on_chunk(chunk)
        self._turns.append(self._name)


async def test_streams_take_turns_and_a_late_one_starts_before_the_early_ones_are_through() -> None:
    turns: list[str] = []
    decoder = Decoder()
    chunks = ChunkPolicy(first=6, growth=1, steady=6)
    async with running(decoder, max_batch=4, chunks=chunks) as stage:
        decoder.gate = threading.Event()
        early = [Feed(stage, f"early{i}", sink=Turns(f"early{i}", turns)) for i in range(24)]
        for feed in early:
            feed.send(*FRAMES, terminal=END)
        await asyncio.sleep(0.02)  # the first batch is in the thread
        late = Feed(stage, "late", sink=Turns("late", turns))
        late.send(*FRAMES, terminal=END)
        decoder.gate.set()
        for feed in (*early, late):
            assert await feed.end() is END
    assert len(turns) == 25 * 10
    assert turns.index("late") < 25 + 4
    for i in range(len(turns)):
        counts = [turns[:i].count(f"early{k}") for k in range(24)]
        assert max(counts) - min(counts) <= 1

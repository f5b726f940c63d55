"""Updates that come after their request: ignored, counted, and nothing is made of them again."""

from __future__ import annotations

import asyncio

import pytest

from omnistage.errors import ProtocolError
from omnistage.request import FinishReason, Start, Terminal
from omnistage.wire import Update
from tests.stages.factories import END, FRAMES, Feed, audio, running

LATE = [
    Update("r", ids=(1, 2), position=4),
    Update("r", start=Start(), ids=(1, 2)),
    Update("r", generation=7, start=Start(), terminal=END),
    Update("r", segment=3, segment_end=True),
    Update("r", paused=True),
]


@pytest.mark.parametrize("ended", ["dropped", "finished", "failed", "never opened"])
async def test_late_updates_bring_nothing_back(ended: str) -> None:
    async with running() as stage:
        feed = None if ended == "never opened" else Feed(stage, "r")
        chunks = 0
        if feed is not None:
            feed.send(*FRAMES[:4])
            if ended == "dropped":
                stage.drop("r")
                await stage.release("r")
            elif ended == "finished":
                feed.send(terminal=END)
                assert await feed.end() is END
            else:
                stage.on_update(Update("r", start=Start()), (), 0)
                assert isinstance(await feed.end(), ProtocolError)
            chunks = len(feed.sink.chunks)
        for update in LATE:
            stage.on_update(update, (), 0)
        await asyncio.sleep(0.02)
        assert stage.late_updates == len(LATE)
        assert not len(stage)
        assert not stage._due
        if feed is not None:
            assert len(feed.sink.chunks) == chunks
        # The same id once more is a request like any other.
        again = Feed(stage, "r")
        again.send(*FRAMES, terminal=END)
        assert await again.end() is END
        assert again.sink.pcm == audio(FRAMES)


@pytest.mark.parametrize(
    "late",
    [
        Update("r", generation=1, ids=(1, 2), position=8),
        Update("r", generation=1, position=8, terminal=Terminal(FinishReason.ABORT, 4)),
    ],
    ids=["ids", "terminal"],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_an_id_opened_again_gets_nothing_of_its_former_generation(
    late: Update, begun: bool
) -> None:
    async with running() as stage:
        Feed(stage, "r")
        stage.on_update(Update("r", generation=1, start=Start(), ids=(1, 2) * 4), (), 0)
        stage.drop("r")
        again = Feed(stage, "r")
        if begun:
            stage.on_update(Update("r", generation=2, start=Start()), (), 0)
        stage.on_update(late, (), 0)
        ids = tuple(i for f in FRAMES for i in f)
        start = None if begun else Start()
        stage.on_update(Update("r", generation=2, start=start, ids=ids, terminal=END), (), 0)
        assert await again.end() is END
        assert again.sink.pcm == audio(FRAMES)
        assert stage.late_updates == 1

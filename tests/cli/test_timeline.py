"""A timeline's figures, from events at known times, and what it shows of a pipeline."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.cli.timeline import SUBSCRIBER, Timeline, check_drawable, draw, recording
from omnistage.config import DecoderStageConfig
from omnistage.errors import ClientError, UpdatesLost
from omnistage.pipeline import Pipeline
from omnistage.request import AudioChunk, StageInput, TokenUpdate
from omnistage.subscription import Subscription
from omnistage.testing import FakeDecoder, Script, scripted


def test_slack_is_what_a_player_has_left_and_a_pause_is_not_made_up_for() -> None:
    timeline = Timeline(chunks=[(1.0, 0.5), (1.2, 0.5), (2.5, 0.2), (2.6, 1.0)])
    assert timeline.slack() == [
        pytest.approx((1.2, 0.3)),  # plays until 1.5
        pytest.approx((2.5, -0.5)),  # played until 2.0, silent for half a second
        pytest.approx((2.6, 0.1)),
    ]
    assert timeline.least_slack == pytest.approx(-0.5)


def test_nothing_to_play_has_no_slack() -> None:
    assert Timeline().least_slack is None
    assert Timeline(chunks=[(1.0, 0.5)]).least_slack is None
    assert Timeline().first_id is None


async def test_every_step_and_chunk_of_a_request_is_recorded() -> None:
    timeline = Timeline(label="one")
    decoder = DecoderStageConfig(build=FakeDecoder)
    script = Script(ids=range(60), ids_per_step=3, first_after=0.05, step_after=0.005)
    async with (
        Pipeline(ar=scripted(script), decoder=decoder) as pipeline,
        recording(pipeline, timeline) as complete,
    ):
        timeline.start()
        async for chunk in pipeline.submit("Hello.", subscribers=SUBSCRIBER):
            timeline.heard(chunk)
        await complete(60)
    assert [ids for _, ids in timeline.steps] == [3] * 20
    times = [at for at, _ in timeline.steps]
    assert times == sorted(times)
    assert timeline.first_id is not None
    assert 0.05 <= timeline.first_id < timeline.chunks[0][0]
    assert sum(seconds for _, seconds in timeline.chunks) == pytest.approx(240 / 24_000)


async def test_a_text_of_several_requests_is_recorded_to_its_end() -> None:
    timeline = Timeline()
    pieces = 3 * [StageInput(prompt="Hello.")]
    # Paced: a loop that samples and reads would outrun the credit of its own reading.
    script = Script(ids=range(5000), ids_per_step=2, step_after=0.0001)
    # More updates than a subscription keeps: one that nobody reads would hold the decoder up too.
    ar = scripted(script, split=lambda _: pieces)
    async with (
        Pipeline(ar=ar, decoder=DecoderStageConfig(build=FakeDecoder)) as pipeline,
        recording(pipeline, timeline) as complete,
    ):
        usage = await pipeline.submit("Hello.", subscribers=SUBSCRIBER).finished()
        await complete(usage.output_tokens)
    assert sum(ids for _, ids in timeline.steps) == usage.output_tokens == 15_000


async def test_a_recording_goes_on_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    original = Subscription.__anext__
    lost = iter([True])

    async def once(self: Subscription) -> TokenUpdate:
        if next(lost, False):
            raise UpdatesLost("on purpose")
        return await original(self)

    monkeypatch.setattr(Subscription, "__anext__", once)
    async with (
        Pipeline(ar=scripted(Script(ids=range(60))), decoder=None) as pipeline,
        recording(pipeline, timeline) as complete,
    ):
        await pipeline.submit("Hello.", subscribers=SUBSCRIBER).finished()
        await complete(60)
    assert sum(ids for _, ids in timeline.steps) == 60


@pytest.mark.parametrize("title", ["It costs $5, not $6 {", "a $\\frac$ b", "caf\udce9"])
def test_any_text_can_stand_above_a_timeline(tmp_path: Path, title: str) -> None:
    draw([Timeline(label=title)], tmp_path / "t.png", title)
    assert (tmp_path / "t.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["one.png", "two.svg"])
def test_timelines_are_drawn_one_below_the_other(tmp_path: Path, name: str) -> None:
    steps = [(0.05 + k / 100, 1) for k in range(40)]
    timeline = Timeline(steps, [(0.1, 0.1), (0.2, 0.3), (0.6, 0.4)], label="one")
    draw([timeline, Timeline(label="nothing")], tmp_path / name, "A title")
    assert (tmp_path / name).stat().st_size > 5000


def test_a_chunk_is_heard_when_it_comes() -> None:
    timeline = Timeline()
    timeline.heard(AudioChunk("r", 0, np.zeros(2400, np.float32), 24_000))
    ((at, seconds),) = timeline.chunks
    assert (0 <= at < 5, seconds) == (True, 0.1)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(ClientError, match=r"omnistage\[plot\]"):
        check_drawable(Path("t.png"))

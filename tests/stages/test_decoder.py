"""The decoder stage, fed with updates by hand: order, chunks, batches, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.config import Deadlines, DecoderStageConfig
from omnistage.errors import (
    ConfigError,
    DeadlineExceeded,
    DecoderError,
    OmniStageError,
    ProcessorError,
    ProtocolError,
    ReaderStalled,
    ServerError,
    StageClosed,
    StartupError,
    UpdatesLost,
)
from omnistage.request import ChunkPolicy, Codes, FinishReason, Pcm, Start, Terminal
from omnistage.stages.decoder import DecoderStage
from omnistage.transport.endpoints import Endpoints
from omnistage.wire import Update
from tests.stages.factories import END, FRAMES, SIZE, Decoder, Feed, Sink, audio, running


async def test_the_audio_is_that_of_the_whole_clip_in_growing_chunks() -> None:
    decoder = Decoder()
    async with running(decoder, chunks=ChunkPolicy(first=2, growth=2, steady=16)) as stage:
        feed = Feed(stage, "r")
        for frame in FRAMES:
            feed.send(frame)
            await asyncio.sleep(0)
        feed.send(terminal=END)
        assert await feed.end() is END
    assert feed.sink.pcm == audio(FRAMES)
    assert len(feed.sink.chunks[0].pcm) == 2
    assert max(len(chunk.pcm) for chunk in feed.sink.chunks) <= 16
    assert {chunk.sample_rate for chunk in feed.sink.chunks} == {8000}
    assert threading.current_thread().name not in decoder.threads


async def test_chunk_sizes_of_the_request_go_before_the_stages() -> None:
    async with running(chunks=ChunkPolicy(first=30, steady=30)) as stage:
        feed = Feed(stage, "r", chunks=ChunkPolicy(first=5, growth=1, steady=5))
        feed.send(*FRAMES, terminal=END)
        await feed.end()
    assert [len(chunk.pcm) for chunk in feed.sink.chunks] == [5] * 12


async def test_ready_streams_share_one_decode_up_to_the_largest_batch() -> None:
    decoder = Decoder()
    async with running(decoder, max_batch=4) as stage:
        decoder.batches.clear()
        decoder.gate = threading.Event()
        feeds = [Feed(stage, f"r{i}") for i in range(9)]
        for feed in feeds:
            feed.send(*FRAMES[:8], terminal=END)
        await asyncio.sleep(0.05)
        decoder.gate.set()
        for feed in feeds:
            assert await feed.end() is END
            assert feed.sink.pcm == audio(FRAMES[:8])
    assert max(decoder.batches) == 4


async def test_positions_start_anew_with_a_segment_and_the_audio_goes_on() -> None:
    async with running() as stage:
        feed = Feed(stage, "r")
        feed.send(*FRAMES[:5])
        stage.on_update(Update("r", position=10, segment_end=True), (), 0)
        ids = tuple(i for frame in FRAMES[5:9] for i in frame)
        stage.on_update(Update("r", segment=1, ids=ids, terminal=END), (), 0)
        assert await feed.end() is END
    assert feed.sink.pcm == audio(FRAMES[:9])


async def test_an_empty_stream_ends_at_once() -> None:
    async with running() as stage:
        feed = Feed(stage, "r")
        feed.send(terminal=END)
        assert await feed.end() is END
    assert feed.sink.chunks == []


@pytest.mark.parametrize(
    ("updates", "kind"),
    [
        ([Update("r", ids=(1, 2))], ProtocolError),
        ([Update("r", start=Start()), Update("r", start=Start())], ProtocolError),
        ([Update("r", start=Start(), ids=(1,))], ProtocolError),
        ([Update("r", start=Start(), position=2, ids=(1, 2))], UpdatesLost),
        ([Update("r", start=Start(), ids=(1, 2)), Update("r", position=4)], UpdatesLost),
        ([Update("r", start=Start(), ids=(1, SIZE))], DecoderError),
        ([Update("r", start=Start(), ids=(1, -1))], DecoderError),
        (
            [
                Update(
                    "r",
                    start=Start(),
                    terminal=Terminal(FinishReason.ERROR, 0, 0, "why", "ProcessorError"),
                )
            ],
            ProcessorError,
        ),
        (
            [
                Update(
                    "r",
                    start=Start(),
                    terminal=Terminal(FinishReason.ERROR, 0, 0, "why", "no_such_class"),
                )
            ],
            ServerError,
        ),
    ],
    ids=range(9),
)
async def test_what_cannot_be_is_a_typed_error_of_that_request_alone(
    updates: list[Update], kind: type[OmniStageError]
) -> None:
    async with running() as stage:
        good, bad = Feed(stage, "good"), Sink()
        stage.open("r", bad)
        for update in updates:
            stage.on_update(update, (), 0)
        error = await bad.outcome
        assert type(error) is kind
        ended = updates[-1].terminal
        said_by = "ar" if ended is not None and ended.error is not None else "decoder"
        assert (error.request_id, error.stage) == ("r", said_by)
        good.send(*FRAMES, terminal=END)
        assert await good.end() is END


async def test_a_decoder_that_raises_for_one_stream_serves_its_batch_mates() -> None:
    decoder = Decoder()
    async with running(decoder) as stage:
        decoder.gate = threading.Event()
        feeds = [Feed(stage, f"r{i}") for i in range(6)]
        for i, feed in enumerate(feeds):
            feed.send(*FRAMES[:8], (66, 1) if i == 3 else (5, 1), terminal=END)
        decoder.gate.set()
        outcomes = [await feed.end() for feed in feeds]
    assert [isinstance(outcome, DecoderError) for outcome in outcomes] == [i == 3 for i in range(6)]
    assert "66" in str(outcomes[3])
    assert feeds[0].sink.pcm == audio([*FRAMES[:8], (5, 1)])


@pytest.mark.parametrize(
    "bad", [None, "generator", SystemExit(1), asyncio.CancelledError()], ids=repr
)
async def test_whatever_a_decoder_does_the_stage_lives_on(bad: Any) -> None:
    class Hostile(Decoder):
        def decode(self, windows: Sequence[Codes]) -> Any:
            if not any((w == 77).any() for w in windows):
                return super().decode(windows)
            if isinstance(bad, BaseException):
                raise bad
            return (pcm for pcm in super().decode(windows)) if bad == "generator" else None

    async with running(Hostile()) as stage:
        feed, mate = Feed(stage, "r"), Feed(stage, "mate")
        feed.send(*FRAMES[:8], (77, 1), terminal=END)
        mate.send(*FRAMES[:8], terminal=END)
        outcome = await feed.end()
        assert outcome is END if bad == "generator" else isinstance(outcome, DecoderError)
        assert await mate.end() is END


async def test_closing_waits_for_a_decode_in_the_thread() -> None:
    decoder = Decoder()
    async with running(decoder) as stage:
        decoder.gate = threading.Event()
        Feed(stage, "r").send(*FRAMES)
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(stage.aclose())
        await asyncio.sleep(0.02)
        assert not closing.done()
        decoder.gate.set()
        async with asyncio.timeout(5):
            await closing


async def test_a_dropped_request_is_never_called_again() -> None:
    decoder = Decoder()
    async with running(decoder) as stage:
        decoder.gate = threading.Event()
        feed = Feed(stage, "r")
        feed.send(*FRAMES)
        await asyncio.sleep(0.02)  # it is in the thread now
        stage.drop("r")
        stage.drop("r")
        decoder.gate.set()
        feed.send(*FRAMES)
        assert stage.late_updates == 1
        other = Feed(stage, "other")
        other.send(terminal=END)
        await other.end()
    assert feed.sink.chunks == []
    assert not feed.sink.outcome.done()


async def test_releasing_waits_for_the_thread_to_let_go() -> None:
    decoder = Decoder()
    async with running(decoder) as stage:
        decoder.gate = threading.Event()
        feed = Feed(stage, "r")
        feed.send(*FRAMES)
        await asyncio.sleep(0.02)
        stage.drop("r")
        await stage.release("unknown")
        releasing = asyncio.create_task(stage.release("r"))
        await asyncio.sleep(0.02)
        assert not releasing.done()
        decoder.gate.set()
        async with asyncio.timeout(5):
            await releasing


async def test_a_loss_fails_every_open_request() -> None:
    async with running() as stage:
        feeds = [Feed(stage, f"r{i}") for i in range(3)]
        stage.on_lost(UpdatesLost("5 messages were lost"))
        for i, feed in enumerate(feeds):
            error = await feed.end()
            assert isinstance(error, UpdatesLost)
            assert error.request_id == f"r{i}"
        late = Feed(stage, "late")
        late.send(*FRAMES, terminal=END)
        assert await late.end() is END


def soon(**deadlines: float) -> Deadlines:
    return Deadlines(**{"between_chunks": 0.2, **deadlines})


async def test_an_ar_stage_that_falls_silent_is_late_and_named() -> None:
    async with running(deadlines=soon()) as stage:
        feed = Feed(stage, "r")
        feed.send((1, 2))
        error = await feed.end()
        assert isinstance(error, DeadlineExceeded)
        assert (error.stage, error.request_id) == ("ar", "r")
        assert "no update for 0.2 s" in str(error)


def block_for(seconds: float) -> None:
    """Keep the event loop from everything."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def test_a_decoder_that_is_stuck_is_late_and_named_though_updates_come() -> None:
    decoder = Decoder()
    async with running(decoder, deadlines=soon()) as stage:
        decoder.gate = threading.Event()
        feed = Feed(stage, "r")
        while not feed.sink.outcome.done():
            feed.send((1, 2))
            await asyncio.sleep(0.01)
        error = await feed.end()
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == "decoder"
        decoder.gate.set()


async def test_a_loop_that_was_blocked_blames_nobody_for_what_waits_in_its_sockets() -> None:
    async with running(deadlines=soon()) as stage:
        feed = Feed(stage, "r")
        feed.send((1, 2))
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, block_for, 0.6)
        # What a socket's reader gives once the loop is free again.
        loop.call_later(0.3, lambda: loop.call_soon(lambda: feed.send((3, 4), terminal=END)))
        assert await feed.end() is END


@pytest.mark.parametrize("paused", [True, False])
async def test_before_the_first_update_and_while_preempted_no_update_is_due(paused: bool) -> None:
    async with running(deadlines=soon()) as stage:
        feed = Feed(stage, "r")
        if paused:
            feed.send((1, 2))
            stage.on_update(Update("r", position=2, paused=True), (), 0)
        await asyncio.sleep(0.6)
        assert not feed.sink.outcome.done()
        feed.send((1, 2))
        error = await feed.end()
        assert isinstance(error, DeadlineExceeded)


@pytest.mark.parametrize(("updates", "late"), [(0, "ar"), (1, "ar"), (40, "decoder")])
async def test_the_first_audio_has_a_deadline_of_its_own(updates: int, late: str) -> None:
    decoder = Decoder()
    async with running(decoder, deadlines=Deadlines(first_audio=0.2)) as stage:
        decoder.gate = threading.Event()
        feed = Feed(stage, "r")
        for frame in FRAMES[:updates]:
            feed.send(frame)
        error = await feed.end()
        assert isinstance(error, DeadlineExceeded)
        assert error.stage == late
        assert "no audio within 0.2 s" in str(error)
        decoder.gate.set()


async def test_a_reader_that_does_not_read_holds_its_request_and_no_other() -> None:
    chunks = ChunkPolicy(first=8, growth=1, steady=8)
    async with running(chunks=chunks, max_unread=0.004, deadlines=soon()) as stage:
        slow, quick = Feed(stage, "slow"), Feed(stage, "quick")
        slow.sink.counts = True
        slow.send(*FRAMES, terminal=END)
        quick.send(*FRAMES, terminal=END)
        assert await quick.end() is END
        await asyncio.sleep(0.5)  # held for longer than its deadline
        assert slow.sink.unread_seconds <= 0.004 + 8 / 8000
        assert not slow.sink.outcome.done()
        async with asyncio.timeout(5):
            while not slow.sink.outcome.done():
                slow.sink.unread_seconds = 0
                stage.resume("slow")
                await asyncio.sleep(0.001)
        assert await slow.end() is END
        assert slow.sink.pcm == audio(FRAMES)


async def test_a_reader_that_does_not_read_can_fail_its_request_instead() -> None:
    async with running(max_unread=0.002, slow_reader="fail") as stage:
        feed = Feed(stage, "r")
        feed.sink.counts = True
        feed.send(*FRAMES, terminal=END)
        error = await feed.end()
        assert isinstance(error, ReaderStalled)
        assert error.request_id == "r"


@pytest.mark.parametrize(
    "bad",
    [{"max_batch": 0}, {"max_unread": 0}, {"slow_reader": "drop"}, {"name": "a/b"}],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DecoderStageConfig(build=Decoder, **bad)


@pytest.mark.parametrize("bad", [{"between_chunks": 0}, {"first_audio": -1}], ids=str)
def test_a_deadline_that_is_over_before_it_starts_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Deadlines(**bad)


async def test_draining_refuses_new_requests_and_waits_for_the_open_ones() -> None:
    async with running() as stage:
        feed = Feed(stage, "r")
        draining = asyncio.create_task(stage.drain())
        await asyncio.sleep(0)
        with pytest.raises(StageClosed, match="draining"):
            stage.open("late", Sink())
        assert not draining.done()
        feed.send(terminal=END)
        async with asyncio.timeout(5):
            await draining


async def test_closing_fails_what_is_open() -> None:
    async with running() as stage:
        feed = Feed(stage, "r")
        await stage.aclose()
        assert isinstance(await feed.end(), StageClosed)


async def test_a_decoder_that_breaks_its_declaration_is_refused_at_the_start() -> None:
    class Short(Decoder):
        def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
            return [pcm[:-1] for pcm in super().decode(windows)]

    with Endpoints() as endpoints:
        stage = DecoderStage(DecoderStageConfig(build=Short), endpoints)
        with pytest.raises(DecoderError, match="Short"):
            await stage.start()

        def missing() -> Any:
            raise FileNotFoundError("weights.bin")

        stage = DecoderStage(DecoderStageConfig(build=missing), endpoints)
        with pytest.raises(StartupError, match=r"weights\.bin"):
            await stage.start()


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    first=st.integers(1, 6),
    data=st.data(),
)
def test_any_grouping_and_interleaving_of_streams_gives_each_its_whole_clip(
    lengths: list[int], cuts: list[int], first: int, data: st.DataObject
) -> None:
    clips = [[((i * 7 + k) % 60, k % 9) for k in range(n)] for i, n in enumerate(lengths)]
    schedule = data.draw(
        st.permutations([i for i, n in enumerate(lengths) for _ in range(n // cuts[0] + 1)])
    )

    async def main() -> None:
        policy = ChunkPolicy(first=first, growth=1.5, steady=first * 3)
        async with running(chunks=policy) as stage:
            feeds = [Feed(stage, f"r{i}") for i in range(len(clips))]
            sent = [0] * len(clips)
            for turn, i in enumerate(schedule):
                size = cuts[turn % len(cuts)]
                feeds[i].send(*clips[i][sent[i] : sent[i] + size])
                sent[i] += size
                await asyncio.sleep(0)
            for i, feed in enumerate(feeds):
                feed.send(*clips[i][sent[i] :], terminal=END)
            for i, feed in enumerate(feeds):
                assert await feed.end() is END
                assert feed.sink.pcm == audio(clips[i])

    asyncio.run(main())

"""A submission that is several requests, one after the other: what its reader sees of that."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from omnistage import DecoderStageConfig, Pipeline, StageInput
from omnistage.errors import (
    ConfigError,
    DeadlineExceeded,
    DecoderError,
    InvalidRequest,
    OmniStageError,
    ServerError,
    StreamClosed,
)
from omnistage.request import FinishReason
from omnistage.testing import FakeDecoder, Script, scripted
from tests.parts import branches_of

TEXT = "one two three four"


def words(asked: StageInput) -> Sequence[StageInput]:
    return [replace(asked, prompt=word) for word in str(asked.prompt).split()]


def letters(asked: StageInput) -> Script:
    """A word samples its letters forty times over; some words do something else."""
    word = str(asked.prompt)
    if word == "fails":
        raise InvalidRequest("no such word")
    return Script(
        ids=[ord(c) for c in word] * 40,
        ids_per_step=4,
        reason=FinishReason.LENGTH if word == "long" else FinishReason.STOP,
        stalls=word == "stalls",
    )


def pipeline(*decoders: Any, split: Any = words, **config: Any) -> Pipeline:
    made = [
        DecoderStageConfig(build=decoder, name=f"d{number}", **config)
        for number, decoder in enumerate(decoders or [FakeDecoder])
    ]
    return Pipeline(ar=scripted(letters, split=split), decoder=made)


def said(text: str) -> list[int]:
    return [ord(c) for word in text.split() for c in word * 40]


async def test_the_pieces_are_one_stream() -> None:
    async with pipeline() as running, running.submit(TEXT, request_id="mine") as stream:
        chunks = [chunk async for chunk in stream]
    assert FakeDecoder().indices(chunks) == said(TEXT)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.request_id for chunk in chunks} == {stream.request_id}
    assert stream.usage is not None
    assert stream.usage.output_tokens == len(said(TEXT))
    assert stream.usage.prompt_tokens == len("onetwothreefour")
    assert stream.usage.finish_reason is FinishReason.STOP


async def test_a_piece_that_was_cut_short_says_so_for_the_whole() -> None:
    async with pipeline() as running:
        speech = await running.submit("one long three").collect()
    assert speech.usage.finish_reason is FinishReason.LENGTH


async def test_each_of_several_decoders_keeps_its_order_over_the_pieces() -> None:
    def slow() -> FakeDecoder:
        return FakeDecoder(seconds=0.003)

    async with pipeline(FakeDecoder, slow) as running, running.submit(TEXT) as stream:
        chunks = [chunk async for chunk in stream]
    for name in ("d0", "d1"):
        own = [chunk for chunk in chunks if chunk.decoder == name]
        assert FakeDecoder().indices(own) == said(TEXT)
        assert [chunk.index for chunk in own] == list(range(len(own)))


async def test_the_next_piece_waits_for_a_reader_that_does_not_read() -> None:
    async with pipeline(max_unread=0.01) as running, running.submit(TEXT) as stream:
        await anext(stream)
        await asyncio.sleep(0.2)
        request = stream._request
        assert request._started_takes == 2  # one is decoded, one more is sampled
        rest = [chunk async for chunk in stream]
        assert request._started_takes == 4
    assert rest[-1].request_id == stream.request_id


async def test_an_error_of_a_later_piece_ends_all_of_it() -> None:
    async with pipeline() as running:
        stream = running.submit("one fails three")
        with pytest.raises(InvalidRequest, match="no such word") as failure:
            await stream.finished()
        assert failure.value.request_id == stream.request_id
        assert not running._running
        assert not len(branches_of(running)[0].decoder)


async def test_an_abort_in_a_later_piece_frees_every_side() -> None:
    async with pipeline() as running:
        async with running.submit("one stalls three") as stream:
            read = 0
            while read < 80 * 3:
                read += len((await anext(stream)).pcm) // 4
            await stream.abort()
            with pytest.raises(StreamClosed):
                await anext(stream)
        assert not running._running
        stage: Any = running._routes[0].ar
        assert not len(stage)
        assert not len(branches_of(running)[0].decoder)


async def test_a_timeout_counts_for_all_pieces_together() -> None:
    async with pipeline() as running:
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await running.submit("one two stalls", timeout=0.2).finished()


async def test_an_input_that_cannot_be_cut_is_refused_before_anything_runs() -> None:
    def refuse(asked: StageInput) -> Sequence[StageInput]:
        raise InvalidRequest("too much of it")

    async with pipeline(split=refuse) as running:
        with pytest.raises(InvalidRequest, match="too much of it"):
            await running.submit(TEXT).collect()
        assert not running._running


async def test_without_a_decoder_the_pieces_follow_one_another_too() -> None:
    async with Pipeline(ar=scripted(letters, split=words), decoder=None) as running:
        usage = await running.submit(TEXT).finished()
    assert usage.output_tokens == len(said(TEXT))


async def test_one_request_is_logged_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "omnistage"):
        async with pipeline() as running:
            await running.submit(TEXT).finished()
        async with pipeline() as running:
            stream = running.submit("fails")
            with pytest.raises(InvalidRequest):
                await stream.finished()
    lines = [r.getMessage() for r in caplog.records if "request " in r.getMessage()]
    assert [line.partition(", ")[2] for line in lines] == [
        "stage ar: started",
        "stage d0: finished: stop",
        "stage ar: started",
        "stage ar: failed: no such word",
    ]
    assert lines[-1].startswith(f"request {stream.request_id}, ")


async def test_a_failure_while_pieces_wait_reaches_the_reader() -> None:
    class Fails(FakeDecoder):
        def decode(self, windows: Any) -> Any:
            if any((w == ord("h")).any() for w in windows):
                raise RuntimeError("h")
            return super().decode(windows)

    async with pipeline(Fails) as running:
        with pytest.raises(ServerError, match="RuntimeError"):
            await running.submit(TEXT).collect()


async def test_an_input_adapter_that_fails_to_cut_fails_its_request() -> None:
    def breaks(asked: StageInput) -> Sequence[StageInput]:
        raise ZeroDivisionError

    for split, words in ((breaks, "ZeroDivisionError"), (lambda _: [], "made no request")):
        async with pipeline(split=split) as running:
            with pytest.raises(OmniStageError, match=words):
                await running.submit(TEXT).collect()
            assert not running._running


def test_a_dropped_stream_is_aborted_where_warnings_are_errors() -> None:
    """The warning is raised in a finalizer, which only prints it; the abort came before it."""
    code = """
import asyncio, gc
from omnistage import Pipeline
from omnistage.testing import Script, scripted

async def main():
    async with Pipeline(ar=scripted(Script(ids=[1], stalls=True)), decoder=None) as pipeline:
        stream = pipeline.submit("Hello.")
        await stream.__aenter__()
        del stream
        gc.collect()
        await asyncio.sleep(0.1)
        print(pipeline.health().running)

asyncio.run(main())
"""
    command = (sys.executable, "-W", "error", "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "0", done.stderr


async def test_health_is_asked_from_any_thread() -> None:
    async with pipeline() as running:
        health = await asyncio.to_thread(running.health)
        assert health.ok
        assert await asyncio.to_thread(lambda: (running.sample_rate, len(running.endpoints))) == (
            24_000,
            1,
        )


class Stops:
    """An audio stage whose serve() returns, or that keeps what it is asked to give back."""

    name = "stops"
    sample_rate = 24_000

    def __init__(self, how: str) -> None:
        self.how = how

    async def start(self) -> None:
        pass

    async def serve(self) -> None:
        if self.how != "returns":
            await asyncio.Event().wait()

    async def drain(self) -> None:
        pass

    async def aclose(self) -> None:
        if self.how == "never closes":
            await asyncio.Event().wait()
        if self.how == "cannot close":
            raise RuntimeError("cannot")

    def open(self, request_id: str, sink: Any) -> Any:
        return sink

    def drop(self, request_id: str) -> None:
        pass

    async def release(self, request_id: str) -> None:
        if self.how == "never releases":
            await asyncio.Event().wait()


async def test_a_stage_that_stops_serving_is_named() -> None:
    async with pipeline(then=[lambda: Stops("returns")]) as running:
        async with asyncio.timeout(5):
            while running.health().ok:
                await asyncio.sleep(0.01)
        assert "serve() has returned (stage 'stops')" in (running.health().reason or "")


@pytest.mark.parametrize("how", ["never closes", "cannot close"])
async def test_a_stage_that_does_not_close_keeps_no_other_open(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnistage.stages.branch._CLOSE_SECONDS", 0.1)
    async with asyncio.timeout(10):
        async with pipeline(then=[lambda: Stops(how)]) as running:
            await running.submit(TEXT).finished()
            stage: Any = running._routes[0].ar
        assert stage._publisher is None


async def test_a_stage_that_does_not_release_is_named_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("omnistage.stages.branch._RELEASE_SECONDS", 0.1)
    async with pipeline(then=[lambda: Stops("never releases")]) as running:
        stream = running.submit("stalls")
        await anext(stream)
        with pytest.raises(DeadlineExceeded, match="did not let go") as late:
            await stream.abort()
        assert late.value.stage == "stops"


async def test_what_went_wrong_does_not_wait_for_a_stage_that_does_not_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("omnistage.stream._FAILED_SECONDS", 0.1)
    stages = [lambda: Stops("never releases")]
    async with pipeline(lambda: FakeDecoder(fails_on=ord("x")), then=stages) as running:
        with pytest.raises(DecoderError):
            await running.submit("one x").finished()


@pytest.mark.parametrize("arguments", [{"decoder": "x"}, {"decoder": [None]}, {"ar": 5}])
def test_what_is_no_stage_is_refused(arguments: Any) -> None:
    fields = {"ar": scripted(Script()), "decoder": None, **arguments}
    with pytest.raises(ConfigError):
        Pipeline(**fields)

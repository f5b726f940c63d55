"""A submission that is several requests, one after the other: what its reader sees of that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from omnistage import DecoderStageConfig, Pipeline, StageInput
from omnistage.errors import DeadlineExceeded, InvalidRequest, ServerError, StreamClosed
from omnistage.request import FinishReason
from omnistage.testing import FakeDecoder, Script, scripted

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
        assert not len(running._branches[0].decoder)


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
        stage: Any = running._ar
        assert not len(stage)
        assert not len(running._branches[0].decoder)


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
    lines = [r.getMessage() for r in caplog.records if "request " in r.getMessage()]
    assert [line.split()[-1] for line in lines] == ["started", "stop"]


async def test_a_failure_while_pieces_wait_reaches_the_reader() -> None:
    class Fails(FakeDecoder):
        def decode(self, windows: Any) -> Any:
            if any((w == ord("h")).any() for w in windows):
                raise RuntimeError("h")
            return super().decode(windows)

    async with pipeline(Fails) as running:
        with pytest.raises(ServerError, match="RuntimeError"):
            await running.submit(TEXT).collect()

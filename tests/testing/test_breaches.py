"""What the contracts say of breaches that are easily missed, and of what they cannot judge."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from examples.custom_stage import Resampler, Resampling
from omnistage import testing
from omnistage.adapters.processor import CodecFrames, Emission, Step, TokenUpdates
from omnistage.request import AudioChunk, Codes, FinishReason, Pcm, Start, Terminal
from omnistage.testing import FakeDecoder

FIRST = 128_266


def sentences(contract: Sequence[Callable[[Any], None]], make: Any) -> dict[str, str]:
    """What the checks that something fails say of it; any other error is raised."""
    said = {}
    for check in contract:
        try:
            check(make)
        except AssertionError as error:
            said[check.__name__] = str(error)
    return said


class Table(msgspec.Struct, frozen=True):
    """More than a pipe holds."""

    table: dict[int, int]

    requires_token_updates = True

    def open(self, request_id: str, start: Start) -> None:
        pass

    def update(self, state: None, step: Step) -> Emission:
        return Emission([self.table[i] for i in step.ids])

    def finish(self, state: None, reason: FinishReason) -> None:
        pass


def test_a_processor_of_any_size_is_sent() -> None:
    assert sentences(testing.PROCESSOR_CONTRACT, lambda: Table({i: i for i in range(60_000)})) == {}


class High(TokenUpdates):
    """Takes ids from 128,266 on, others are control ids that it does not count."""

    def update(self, state: None, step: Step) -> Emission:
        return Emission([i - FIRST for i in step.ids if i >= FIRST])


class HighGrouped(High):
    def update(self, state: None, step: Step) -> Emission:
        return super().update(state, step._replace(ids=step.ids[:1]))


def test_ids_are_those_that_the_processor_takes() -> None:
    contract = testing.processor_contract(ids=range(FIRST - 100, FIRST + 4096))
    assert [c.__name__ for c in contract] == [c.__name__ for c in testing.PROCESSOR_CONTRACT]
    assert sentences(contract, High) == {}
    assert "gives_the_same_however_ids_are_grouped" in sentences(contract, HighGrouped)


def test_a_processor_that_takes_no_id_it_is_fed_is_asked_for_others() -> None:
    said = sentences(testing.PROCESSOR_CONTRACT, HighGrouped)
    assert list(said) == ["emits_something"]
    assert "processor_contract(ids=...)" in said["emits_something"]


@pytest.mark.parametrize("books", [1, 4, 8, 16])
def test_whole_frames_are_among_the_ids_of_a_range(books: int) -> None:
    def make() -> CodecFrames:
        return CodecFrames(first_id=FIRST, codebook_size=1024, codebooks=books, stride=1024)

    contract = testing.processor_contract(ids=range(FIRST, FIRST + 1024 * books))
    assert sentences(contract, make) == {}


class Marked(TokenUpdates):
    """Emits what follows a marker."""

    def open(self, request_id: str, start: Start) -> Any:
        return []

    def update(self, state: Any, step: Step) -> Emission:
        emitted = []
        for token in step.ids:
            if state:
                emitted.append(token)
            elif token == 7:
                state.append(token)
        return Emission(emitted)


def test_ids_that_are_no_range_are_fed_in_their_order() -> None:
    assert sentences(testing.processor_contract(ids=[3, 7, *range(50)]), Marked) == {}
    with pytest.raises(ValueError, match="at least one id"):
        testing.processor_contract(ids=[])
    with pytest.raises(ValueError, match="negative"):
        testing.processor_contract(ids=range(-1, 5))


class Huge(TokenUpdates):
    def update(self, state: None, step: Step) -> Emission:
        return Emission([2**70] * len(step.ids))


class WrongSignature(TokenUpdates):
    def open(self, request_id: str) -> None:  # type: ignore[override]
        pass


class Asserts(TokenUpdates):
    def update(self, state: None, step: Step) -> Emission:
        assert not step.ids
        return Emission()


def test_ids_that_the_wire_cannot_carry_are_found() -> None:
    assert f"emitted {2**70}" in sentences(testing.PROCESSOR_CONTRACT, Huge)["emits_something"]


def test_what_a_part_raises_is_a_sentence_with_its_cause() -> None:
    said = sentences(testing.PROCESSOR_CONTRACT, WrongSignature)
    assert said["keeps_requests_apart"].startswith("keeps_requests_apart: it raised TypeError: ")
    assert all(sentences(testing.PROCESSOR_CONTRACT, Asserts).values())
    check = testing.PROCESSOR_CONTRACT[3]
    with pytest.raises(AssertionError) as failure:
        check(WrongSignature)
    assert isinstance(failure.value.__cause__, TypeError)
    for contract in (
        testing.DECODER_CONTRACT,
        testing.INPUT_ADAPTER_CONTRACT,
        testing.AUDIO_STAGE_CONTRACT,
    ):
        assert len(sentences(contract, object)) == len(contract)


class Echo(FakeDecoder):
    """Each frame sounds on into the next one, which it does not declare."""

    deterministic = False

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        pcm = super().decode(windows)
        return [x + np.pad(x, (self.hop_length, 0))[: len(x)] for x in pcm]


class Noise(FakeDecoder):
    deterministic = False

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        random = np.random.default_rng()
        return [random.standard_normal(len(x)).astype(np.float32) for x in super().decode(windows)]


def test_context_is_checked_wherever_a_decoder_repeats_itself() -> None:
    assert list(sentences(testing.DECODER_CONTRACT, Echo)) == ["sounds_the_same_in_any_chunks"]
    assert sentences(testing.DECODER_CONTRACT, Noise) == {}


class Threaded(Resampling):
    """Calls its sink from a thread, the end a little later."""

    def _give(self, pcm: Pcm) -> None:
        thread = threading.Thread(target=super()._give, args=(pcm,))
        thread.start()
        thread.join()


class ThreadedEnd(Resampling):
    def on_end(self, terminal: Terminal) -> None:
        sink, self.sink = self.sink, None
        self._stage.drop(self._request_id)

        def end() -> None:
            time.sleep(0.01)
            if sink is not None:
                sink.on_end(terminal)

        threading.Thread(target=end).start()


class Renamed(Resampling):
    def on_chunk(self, chunk: AudioChunk) -> None:
        super().on_chunk(replace(chunk, decoder="decoder"))


class Twice(Resampling):
    def on_end(self, terminal: Terminal) -> None:
        if self.sink is not None:
            asyncio.get_running_loop().call_later(0.01, self.sink.on_end, terminal)
        super().on_end(terminal)


class Tail(Resampling):
    def on_end(self, terminal: Terminal) -> None:
        late = AudioChunk(self._request_id, 0, np.zeros(4, np.float32), 8000)
        if self.sink is not None:
            asyncio.get_running_loop().call_later(0.01, self.sink.on_chunk, late)
        super().on_end(terminal)


class NotANumber(Resampling):
    def on_chunk(self, chunk: AudioChunk) -> None:
        super().on_chunk(replace(chunk, pcm=chunk.pcm * np.float32(np.nan)))


@pytest.mark.parametrize(
    ("request_class", "sentence"),
    [
        (Threaded, "on_chunk was called from another thread than the event loop's"),
        (ThreadedEnd, "on_end was called from another thread than the event loop's"),
        (Renamed, "chunk.decoder came as 'decoder', it went in as 'voice'"),
        (Twice, "a second end came"),
        (Tail, "a chunk came after the end"),
        (NotANumber, "a chunk has samples that are not finite"),
    ],
)
def test_a_stage_that_misuses_its_sink_is_told_how(request_class: Any, sentence: str) -> None:
    class Misusing(Resampler):
        def open(self, request_id: str, sink: Any) -> Resampling:
            request = super().open(request_id, sink)
            request.__class__ = request_class
            return request

    said = sentences(testing.AUDIO_STAGE_CONTRACT, lambda: Misusing(8000))
    assert said["passes_audio_on_in_order"] == sentence

"""Every implementation of ours keeps the contract of its kind, and each check finds a breach."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.custom_decoder import Tones
from examples.custom_stage import Resampler, Resampling
from omnistage import testing
from omnistage.adapters.input import EngineInput, TextInput
from omnistage.adapters.processor import CodecFrames, Emission, HiddenStates, Step, TokenUpdates
from omnistage.errors import InvalidRequest
from omnistage.models.talker.decoder import TalkerDecoder
from omnistage.models.talker.layout import read_layout
from omnistage.models.talker.preset import TALKER, TalkerFrames, TalkerInput
from omnistage.request import AudioChunk, Codes, FinishReason, Pcm, StageInput, Terminal
from omnistage.stages.base import AudioSink
from omnistage.testing import FakeDecoder
from tests.decoders.factories import RowMixer

Check = Callable[[Callable[[], Any]], None]


def cases(contract: Sequence[Check], *makes: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("check", "make"),
        [
            pytest.param(check, make, id=f"{getattr(make, '__name__', 'other')}-{check.__name__}")
            for make in makes
            for check in contract
        ],
    )


def talker() -> TalkerDecoder:
    return TalkerDecoder(Path(TALKER.model) / "code2wav")


def many_codebooks() -> FakeDecoder:
    return FakeDecoder(codebooks=8, codebook_size=1024)


def codec_frames() -> CodecFrames:
    return CodecFrames(first_id=100, codebook_size=1024, codebooks=4)


def strided() -> CodecFrames:
    return CodecFrames(first_id=100, codebook_size=512, codebooks=4, stride=512)


def talker_frames() -> TalkerFrames:
    return TalkerFrames(layout=read_layout())


def talker_input() -> TalkerInput:
    return TalkerInput(TALKER)


def resampler() -> Resampler:
    return Resampler(8000)


@cases(testing.DECODER_CONTRACT, FakeDecoder, many_codebooks, Tones, RowMixer, talker)
def test_our_decoders_keep_theirs(check: Check, make: Any) -> None:
    check(make)


@cases(testing.PROCESSOR_CONTRACT, TokenUpdates, HiddenStates, codec_frames, strided, talker_frames)
def test_our_processors_keep_theirs(check: Check, make: Any) -> None:
    check(make)


@cases(testing.INPUT_ADAPTER_CONTRACT, TextInput, talker_input)
def test_our_input_adapters_keep_theirs(check: Check, make: Any) -> None:
    check(make)


@cases(testing.AUDIO_STAGE_CONTRACT, resampler)
def test_our_audio_stages_keep_theirs(check: Check, make: Any) -> None:
    check(make)


def breaches(contract: Sequence[Check], make: Any) -> set[str]:
    """The checks that something fails, each with a sentence."""
    failed = {}
    for check in contract:
        try:
            check(make)
        except AssertionError as error:
            failed[check.__name__] = str(error)
    assert all(failed.values())
    return set(failed)


class Echo(FakeDecoder):
    """Each frame sounds on into the next one, which it does not declare."""

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        pcm = super().decode(windows)
        return [x + np.pad(x, (self.hop_length, 0))[: len(x)] for x in pcm]


class Padded(FakeDecoder):
    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        longest = max(map(len, windows))
        return [x * longest for x in super().decode(windows)]


class Remembers(FakeDecoder):
    last: Any = 0.0

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        pcm = [x + self.last for x in super().decode(windows)]
        self.last = np.float32(pcm[-1][-1])
        return pcm


class Writes(FakeDecoder):
    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        pcm = super().decode(windows)
        for window in windows:
            window[:] = 0
        return pcm


class Infinite(FakeDecoder):
    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        with np.errstate(divide="ignore"):
            return [np.log(x) for x in super().decode(windows)]


class Short(FakeDecoder):
    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        return [x[:-1] for x in super().decode(windows)]


class Undeclared(FakeDecoder):
    left_context = -1


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Echo, "sounds_the_same_in_any_chunks"),
        (Padded, "ignores_its_batch_mates"),
        (Remembers, "keeps_nothing_between_calls"),
        (Writes, "leaves_its_input_alone"),
        (Infinite, "accepts_every_index"),
        (Short, "decodes_a_single_frame"),
        (Undeclared, "declares_itself"),
    ],
)
def test_a_decoder_that_breaks_a_rule_is_found(make: Any, check: str) -> None:
    assert check in breaches(testing.DECODER_CONTRACT, make)


class Grouped(TokenUpdates):
    """Takes one id a step: what speculative decoding brings beside it is lost."""

    def update(self, state: None, step: Step) -> Emission:
        return Emission(step.ids[:1])


class Shared(TokenUpdates):
    """Keeps a request's state on itself."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def update(self, state: None, step: Step) -> Emission:
        self.held += step.ids
        return Emission([self.held.pop(0)] if len(self.held) > 3 else [])

    def finish(self, state: None, reason: FinishReason) -> Any:
        held, self.held = self.held, []
        return Emission(held)


class Local(TokenUpdates):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Silent(TokenUpdates):
    def update(self, state: None, step: Step) -> Emission:
        return Emission()


class Final(TokenUpdates):
    """Emits the reason of the end as an id."""

    def finish(self, state: None, reason: FinishReason) -> Any:
        return Emission([len(reason)])


class Unsaid(TokenUpdates):
    requires_token_updates: Any = 1


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Grouped, "gives_the_same_however_ids_are_grouped"),
        (Shared, "keeps_requests_apart"),
        (Local, "reaches_the_engine_process"),
        (Silent, "emits_something"),
        (Final, "ends_a_request_that_sampled_nothing"),
        (Unsaid, "declares_itself"),
    ],
)
def test_a_processor_that_breaks_a_rule_is_found(make: Any, check: str) -> None:
    assert check in breaches(testing.PROCESSOR_CONTRACT, make)


class BadInput:
    """Breaks the rule that its name says."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.count = 0

    async def start(self) -> None:
        pass

    async def adapt(self, stage_input: StageInput) -> EngineInput:
        sampling: Any = dict(stage_input.sampling or {})
        if stage_input.seed is not None:
            sampling["seed"] = stage_input.seed
        if not str(stage_input.prompt).strip() and self.rule != "refuses_an_empty_text":
            raise InvalidRequest("empty")
        if self.rule == "makes_an_engine_input":
            sampling["extra_args"] = {}
        if self.rule == "lets_the_request_choose":
            sampling["temperature"] = 1.0
        if self.rule == "leaves_the_callers_objects_alone" and stage_input.sampling is not None:
            sampling = stage_input.sampling
        prompt = [1, 2]
        if self.rule == "converts_several_at_once":
            self.count += 1
            await asyncio.sleep(0)
            prompt = [self.count]
            self.count -= 1
        return EngineInput(prompt=prompt, sampling=sampling)


@pytest.mark.parametrize("check", testing.INPUT_ADAPTER_CONTRACT, ids=lambda c: c.__name__)
def test_an_input_adapter_that_breaks_a_rule_is_found(check: Check) -> None:
    rule = check.__name__
    assert rule in breaches(testing.INPUT_ADAPTER_CONTRACT, lambda: BadInput(rule))


class BadStage(Resampler):
    """Breaks the rule that its name says."""

    def __init__(self, rule: str) -> None:
        super().__init__(8000)
        self.rule = rule
        self.sinks: dict[str, AudioSink] = {}
        self.mixed = np.float32(0)

    async def serve(self) -> None:
        if self.rule == "lives_and_ends":
            return
        await super().serve()

    async def aclose(self) -> None:
        if self.rule == "closes_twice_and_unstarted" and self._closed:
            raise RuntimeError("closed already")
        await super().aclose()

    async def drain(self) -> None:
        if self.rule == "drains_at_once_when_idle":
            await asyncio.Event().wait()
        if self.rule != "waits_for_open_requests_when_draining":
            await super().drain()

    def open(self, request_id: str, sink: AudioSink) -> Resampling:
        request = super().open(request_id, sink)
        request.__class__ = BadResampling
        return request


class BadResampling(Resampling):
    @property
    def rule(self) -> str:
        assert isinstance(self._stage, BadStage)
        return self._stage.rule

    def on_chunk(self, chunk: AudioChunk) -> None:
        if self.rule == "passes_audio_on_in_order":
            self._index += 1
        if self.rule == "gives_the_same_in_any_chunks":
            chunk = replace(chunk, pcm=chunk.pcm - chunk.pcm.mean())
        if self.rule == "keeps_requests_apart":
            stage: Any = self._stage
            chunk = replace(chunk, pcm=chunk.pcm + stage.mixed)
            stage.mixed = chunk.pcm[-1] if self._request_id in "cd" else np.float32(0)
        if self.rule == "is_silent_once_dropped" and self.sink is not None:
            late = replace(chunk, index=5, sample_rate=8000)
            asyncio.get_running_loop().call_later(0.01, self.sink.on_chunk, late)
        super().on_chunk(chunk)

    def on_end(self, terminal: Terminal) -> None:
        if self.rule == "ends_without_audio" and self._stream is None:
            return
        super().on_end(terminal)

    def on_error(self, error: Any) -> None:
        if self.rule != "passes_errors_on":
            super().on_error(error)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.testing.stages._SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("check", testing.AUDIO_STAGE_CONTRACT, ids=lambda c: c.__name__)
def test_an_audio_stage_that_breaks_a_rule_is_found(check: Check) -> None:
    rule = check.__name__
    assert rule in breaches(testing.AUDIO_STAGE_CONTRACT, lambda: BadStage(rule))


def test_a_fake_decoders_audio_gives_its_indices_back() -> None:
    decoder = FakeDecoder(codebooks=2, codebook_size=1 << 20)
    codes = np.array([[0, 1], [(1 << 20) - 1, 77]])
    assert decoder.indices(decoder.decode([codes])) == codes.reshape(-1).tolist()
    with pytest.raises(ValueError, match="codebook_size"):
        FakeDecoder(codebook_size=1 << 21)


def test_the_contracts_need_no_test_framework() -> None:
    for path in (Path(testing.__file__).parent).glob("*.py"):
        assert "import pytest" not in path.read_text()

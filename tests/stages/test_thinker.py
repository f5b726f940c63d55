"""A thinker and a talker in one pipeline, both scripted: what crosses, is read, and is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnistage import (
    ARStageConfig,
    DecoderStageConfig,
    HiddenStates,
    Pipeline,
    RowsInput,
    StageInput,
    Stream,
    TextInput,
    TokenUpdates,
    subscribe,
)
from omnistage.config import ModelIO
from omnistage.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    OmniStageError,
    ProtocolError,
    ServerError,
    StageClosed,
    StartupError,
    StreamClosed,
    UpdatesLost,
)
from omnistage.payload import Payload, numbers
from omnistage.request import FinishReason, Usage
from omnistage.stages.thinker import ThinkerTalker
from omnistage.testing import FakeDecoder, Script, ScriptedARStage, scripted
from omnistage.transport.endpoints import Endpoints
from tests.parts import branches_of

SIZE = 2
PHASES = ["thinking", "speaking"]


def rows(text: str, first: int = 0) -> Payload:
    """A row a letter: its code and its place."""
    values = np.array([[ord(c), i] for i, c in enumerate(text)], np.float32).reshape(-1, SIZE)
    return Payload("float32", values.shape, first, values.tobytes())


def think(asked: StageInput) -> Script:
    """Answers a text with itself, letter by letter: a row each, and its capital as text."""
    text = str(asked.prompt)
    if text == "refused":
        raise InvalidRequest("no such thought")
    script = Script(
        ids=[ord(c) for c in text],
        payloads=[{"hidden": replace_first(rows(c), i)} for i, c in enumerate(text)],
        text=[c.upper() for c in text],
        reason=FinishReason.LENGTH if text == "long" else FinishReason.STOP,
        error=ServerError("out of thoughts") if text == "fails" else None,
        stalls=text == "thinking",
    )
    if text == "wordless":
        return replace(script, ids=(), payloads=(), text=())
    if text == "gap":
        return replace(script, payloads=[*script.payloads[:1], *script.payloads[2:]])
    return script


def replace_first(payload: Payload, first: int) -> Payload:
    return Payload(payload.dtype, payload.shape, first, payload.data)


def said(prompt: Any) -> str:
    return "".join(chr(int(code)) for code, _ in numbers(prompt))


def speak(asked: StageInput) -> Script:
    """Samples each letter of the rows forty times."""
    text = said(asked.prompt)
    if text == "unspeakable":
        raise InvalidRequest("rows of shape [11, 2] cannot be projected")
    ids = [ord(c) for c in text for _ in range(40)]
    error = ServerError("lost its voice") if text == "hoarse" else None
    return Script(ids=ids, ids_per_step=40, stalls=text == "speaking", error=error)


def pipeline(
    *,
    answers: Callable[[StageInput], Script] = think,
    speaks: Callable[[StageInput], Script] = speak,
    split: Callable[[StageInput], Sequence[StageInput]] | None = None,
    **decoder: Any,
) -> Pipeline:
    thinker = scripted(
        answers, processor=HiddenStates(), gives={"hidden"}, split=split, name="thinker"
    )
    talker = scripted(speaks, name="talker")
    config = DecoderStageConfig(build=FakeDecoder, **decoder)
    return Pipeline(thinker=thinker, ar=talker, decoder=config)


def joint(running: Pipeline) -> ThinkerTalker:
    ar = running._routes[0].ar
    assert isinstance(ar, ThinkerTalker)
    return ar


def nothing_left(running: Pipeline) -> bool:
    """Whether no stage holds a request."""
    ar = joint(running)
    held = [running._running, ar, ar._rows, ar.thinker, ar.talker, branches_of(running)[0].decoder]
    return not any(map(len, held))  # type: ignore[arg-type]


async def spoken(stream: Stream) -> str:
    """What a stream's audio says."""
    async with stream:
        indices = FakeDecoder().indices([chunk async for chunk in stream])
    assert all(indices[i : i + 40] == indices[i : i + 1] * 40 for i in range(0, len(indices), 40))
    return "".join(map(chr, indices[::40]))


async def written(stream: Stream) -> list[str]:
    return [piece async for piece in stream.text]


async def test_text_and_audio_come_side_by_side() -> None:
    async with pipeline() as running:
        async with running.submit("hello") as stream:
            text, audio = await asyncio.gather(written(stream), spoken(stream))
        assert (text, audio) == (list("HELLO"), "hello")
        assert stream.usage == Usage(
            prompt_tokens=5,
            output_tokens=200,
            finish_reason=FinishReason.STOP,
            text="HELLO",
            thinker=Usage(
                prompt_tokens=5, output_tokens=5, finish_reason=FinishReason.STOP, text="HELLO"
            ),
        )
        speech = await running.submit("again").collect()
        assert speech.usage.text == "AGAIN"
        assert nothing_left(running)


async def test_interleaved_requests_get_nothing_of_one_another() -> None:
    def slowly(asked: StageInput) -> Script:
        return replace(think(asked), step_after=0.002 * (len(str(asked.prompt)) % 3))

    words = [chr(ord("a") + i) * (3 + i % 5) + "xyz"[i % 3] for i in range(16)]
    async with pipeline(answers=slowly) as running:
        streams = [running.submit(word) for word in words]
        texts = asyncio.gather(*map(written, streams))
        assert await asyncio.gather(*map(spoken, streams)) == words
        assert ["".join(text) for text in await texts] == [word.upper() for word in words]
        assert nothing_left(running)


async def test_a_request_for_text_alone_never_reaches_the_talker() -> None:
    heard: list[StageInput] = []

    def listen(asked: StageInput) -> Script:
        heard.append(asked)
        return speak(asked)

    async with pipeline(speaks=listen) as running:
        opened: list[str] = []
        updates: list[Any] = []
        ar: Any = joint(running)
        ar.on_update = lambda *update: updates.append(update)  # for which rows would be taken
        branch: Any = branches_of(running)[0]
        branch.open = lambda request_id, *rest, **named: opened.append(request_id)
        stream = running.submit("hello", modalities=["text"])
        assert await written(stream) == list("HELLO")
        usage = await stream.finished()
        assert (usage.text, usage.output_tokens, usage.thinker) == ("HELLO", 5, None)
        assert [chunk async for chunk in stream] == []
        assert not heard
        assert not opened
        assert not updates
        assert nothing_left(running)


async def test_the_thinkers_options_are_its_own_and_the_rest_goes_to_both() -> None:
    seen: list[StageInput] = []

    def note(what: Callable[[StageInput], Script]) -> Callable[[StageInput], Script]:
        def noting(asked: StageInput) -> Script:
            seen.append(asked)
            return what(asked)

        return noting

    async with pipeline(answers=note(think), speaks=note(speak)) as running:
        await running.submit(
            "hi",
            sampling={"temperature": 0.5},
            conditioning={"voice": np.zeros(2)},
            seed=7,
            voice="ann",
            priority=3,
            trace_headers={"traceparent": "00"},
        ).finished()
    first, second = seen
    assert first.sampling == {"temperature": 0.5}
    assert first.conditioning is not None
    assert (second.sampling, second.conditioning) == (None, None)
    for asked in seen:
        assert (asked.seed, asked.voice, asked.priority) == (7, "ann", 3)
        assert asked.trace_headers == {"traceparent": "00"}


async def test_each_reader_gets_the_whole_text_whenever_it_reads() -> None:
    async with pipeline() as running, running.submit("hello") as stream:
        early = asyncio.create_task(written(stream))
        assert await spoken(stream) == "hello"
        assert await early == await written(stream) == list("HELLO")
        half = stream.text
        assert [await anext(half), await anext(half)] == ["H", "E"]
        assert [piece async for piece in half] == ["L", "L", "O"]
        with pytest.raises(StopAsyncIteration):
            await anext(half)


async def test_the_text_ends_with_the_thinker_though_nobody_reads_the_audio() -> None:
    async with asyncio.timeout(10):
        async with pipeline(max_unread=0.001) as running, running.submit("hello") as stream:
            assert await written(stream) == list("HELLO")
            assert stream.usage is None
            assert await spoken(stream) == "hello"


async def test_a_text_that_nobody_reads_is_of_no_consequence() -> None:
    async with pipeline() as running:
        assert await spoken(running.submit("hello")) == "hello"
        assert nothing_left(running)


async def test_a_cancelled_reader_of_the_text_aborts_nothing() -> None:
    def slowly(asked: StageInput) -> Script:
        return replace(think(asked), step_after=0.02)

    async with pipeline(answers=slowly) as running, running.submit("hello") as stream:
        reader = asyncio.create_task(written(stream))
        await asyncio.sleep(0.03)
        reader.cancel()
        assert await spoken(stream) == "hello"


async def test_a_stream_of_which_only_the_text_is_held_is_aborted_when_that_is_dropped() -> None:
    async with pipeline() as running:
        text = running.submit("thinking", modalities=("text",)).text
        assert await anext(text) == "T"
        assert not nothing_left(running)
        with pytest.warns(ResourceWarning, match="dropped unfinished"):
            del text
        async with asyncio.timeout(5):
            while not nothing_left(running):
                await asyncio.sleep(0.01)


async def test_pieces_of_a_submission_are_one_text() -> None:
    def words(asked: StageInput) -> Sequence[StageInput]:
        return [replace(asked, prompt=word) for word in str(asked.prompt).split()]

    for modalities in (("text", "audio"), ("text",)):
        async with pipeline(split=words) as running:
            stream = running.submit("one two three", modalities=modalities)
            text, usage = await asyncio.gather(written(stream), stream.finished())
        assert "".join(text) == usage.text == "ONE TWO THREE"
        thinker = usage if usage.thinker is None else usage.thinker
        assert (thinker.output_tokens, thinker.text) == (11, "ONE TWO THREE")


async def test_an_answer_that_was_cut_is_spoken() -> None:
    async with pipeline() as running:
        stream = running.submit("long")
        assert await spoken(stream) == "long"
    assert stream.usage is not None
    assert stream.usage.finish_reason is FinishReason.STOP
    assert stream.usage.thinker is not None
    assert stream.usage.thinker.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("refused", InvalidRequest, "no such thought"),
        ("fails", ServerError, "out of thoughts"),
        ("wordless", ProtocolError, "no row of 'hidden'"),
        ("gap", UpdatesLost, "rows of 'hidden' from 2 came where 1 was due"),
        ("unspeakable", InvalidRequest, "cannot be projected"),
        ("hoarse", ServerError, "lost its voice"),
    ],
)
async def test_what_goes_wrong_in_either_stage_ends_the_request_alone(
    prompt: str, kind: type[OmniStageError], message: str
) -> None:
    async with pipeline() as running:
        fine = running.submit("fine")
        stream = running.submit(prompt)
        other = asyncio.create_task(spoken(fine))
        with pytest.raises(kind, match=message) as raised:
            await spoken(stream)
        assert raised.value.request_id == stream.request_id
        if prompt in ("wordless", "unspeakable", "hoarse"):  # what was thought is there
            assert "".join(await written(stream)) == (
                "" if prompt == "wordless" else prompt.upper()
            )
        else:
            with pytest.raises(kind, match=message):
                await written(stream)
        assert await other == "fine"
        assert nothing_left(running)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["abort", "leave", "cancel", "close", "timeout"])
async def test_an_end_in_either_phase_frees_both_stages(phase: str, way: str) -> None:
    async with pipeline() as running:
        stream = running.submit(phase, timeout=0.3 if way == "timeout" else None)
        async with stream:
            assert "".join([await anext(stream.text) for _ in range(1)]) == phase[0].upper()
            if phase == "speaking":
                await anext(stream)
            stage = joint(running).talker if phase == "speaking" else joint(running).thinker
            assert len(stage) == 1
            if way == "abort":
                await asyncio.gather(stream.abort(), stream.abort())
                await stream.abort()
            elif way == "cancel":
                reader = asyncio.create_task(spoken(stream))
                await asyncio.sleep(0)
                reader.cancel()
                await asyncio.wait([reader])
            elif way == "close":
                await running.aclose()
                with pytest.raises(StageClosed):
                    await spoken(stream)
            elif way == "timeout":
                with pytest.raises(OmniStageError, match=r"0\.3 s"):
                    await spoken(stream)
        if way != "close":
            assert nothing_left(running)
            assert await spoken(running.submit("next")) == "next"
        with pytest.raises((StreamClosed, StageClosed, OmniStageError)):
            await anext(stream)


async def test_rows_that_are_lost_fail_what_is_thought_about_and_nothing_else() -> None:
    async with pipeline() as running:
        ar = joint(running)
        async with running.submit("thinking") as thinking, running.submit("speaking") as speaking:
            await anext(speaking)
            ar.on_lost(UpdatesLost("sequence 3 to 5"))
            with pytest.raises(UpdatesLost, match="sequence 3 to 5") as raised:
                await anext(thinking)
            assert raised.value.stage == "thinker"
            assert not ar._rows
            assert len(ar.talker) == 1
        assert nothing_left(running)


class Mortal(ScriptedARStage):
    """A scripted stage whose engine can die; its requests fail then, as vLLM's do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dead = asyncio.Event()

    @property
    def closed(self) -> StageClosed | None:
        return EngineDead("gone", stage=self.name) if self.dead.is_set() else super().closed

    async def ended(self) -> None:
        await self.dead.wait()

    def die(self) -> None:
        self.dead.set()
        for running in list(self._running.values()):
            running.fail(EngineDead("gone", stage=self.name))


@pytest.mark.parametrize("victim", ["thinker", "talker"])
async def test_the_death_of_either_engine_ends_what_needs_it_and_admits_no_more(
    victim: str,
) -> None:
    def thinker(endpoints: Endpoints) -> Mortal:
        processor = HiddenStates()
        return Mortal(think, endpoints, processor=processor, gives={"hidden"}, name="thinker")

    def talker(endpoints: Endpoints) -> Mortal:
        return Mortal(speak, endpoints, processor=TokenUpdates(), name="talker")

    config = DecoderStageConfig(build=FakeDecoder)
    async with Pipeline(thinker=thinker, ar=talker, decoder=config) as running:
        dies: Any = getattr(joint(running), victim)
        async with running.submit("thinking") as one, running.submit("speaking") as other:
            await anext(other)
            dies.die()
            needing = [one] if victim == "thinker" else [one, other]
            for stream in needing:
                with pytest.raises(EngineDead, match="gone") as raised:
                    async with asyncio.timeout(2):
                        await spoken(stream)
                assert raised.value.request_id == stream.request_id
        assert "gone" in (running.health().reason or "")
        for modalities in (("text", "audio"), ("text",)):
            with pytest.raises(EngineDead):
                await running.submit("more", modalities=modalities).finished()
        assert nothing_left(running)
        await asyncio.wait_for(joint(running).ended(), 2)


async def test_draining_waits_for_both() -> None:
    async with pipeline() as running:
        stream = running.submit("thinking")
        await anext(stream.text)
        draining = asyncio.create_task(joint(running).drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        with pytest.raises(StageClosed, match="draining"):
            await running.submit("more").finished()
        await stream.abort()
        await asyncio.wait_for(draining, 5)
        assert joint(running).talker.closed is not None


async def test_others_subscribe_to_what_the_talker_samples() -> None:
    async with pipeline() as running:
        assert list(running.endpoints) == joint(running).talker.publishers
        async with subscribe(running.endpoints, subscriber="tokens") as updates:
            await running.submit("hi", subscribers=["tokens"]).finished()
            ids: list[int] = []
            async for update in updates:
                ids += update.ids
                if update.terminal is not None:
                    break
        assert ids == [ord("h")] * 40 + [ord("i")] * 40
        with pytest.raises(InvalidRequest, match="never reaches it") as raised:
            await running.submit("hi", subscribers=["x"], modalities=["text"]).finished()
        assert raised.value.parameter == "subscribers"
        assert nothing_left(running)


async def test_without_a_decoder_a_request_ends_with_the_talker() -> None:
    thinker = scripted(think, processor=HiddenStates(), gives={"hidden"}, name="thinker")
    async with Pipeline(thinker=thinker, ar=scripted(speak), decoder=None) as running:
        usage = await running.submit("hello").finished()
    assert (usage.text, usage.output_tokens) == ("HELLO", 200)


async def test_a_pipeline_without_a_thinker_has_no_text() -> None:
    decoder = DecoderStageConfig(build=FakeDecoder)
    async with Pipeline(ar=scripted(Script(ids=[1])), decoder=decoder) as running:
        async with running.submit("hello") as stream:
            with pytest.raises(ConfigError, match="has no thinker"):
                await written(stream)
            assert len([chunk async for chunk in stream]) == 1
        with pytest.raises(InvalidRequest, match="has no thinker") as raised:
            await running.submit("hello", modalities=("text",)).finished()
        assert raised.value.parameter == "modalities"
        assert not running._running


@pytest.mark.parametrize("modalities", ["text", (), ("audio",), ("text", "image"), 5, [[]]])
def test_other_modalities_are_refused(modalities: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        StageInput(prompt="hello", modalities=modalities)
    assert raised.value.parameter == "modalities"
    assert StageInput(prompt="hello", modalities=["audio", "text"]).wants_audio


async def test_text_alone_is_not_collected_as_audio() -> None:
    async with pipeline() as running:
        with pytest.raises(ConfigError, match="text alone was asked for"):
            await running.submit("hello", modalities=("text",)).collect()


IO = ModelIO(has_tokenizer=True, hidden_size=SIZE, embedding_size=3)


class Described(ScriptedARStage):
    """A scripted stage that says what its model takes and gives."""

    def __init__(self, io: ModelIO, adapter: Any, endpoints: Endpoints, **kwargs: Any) -> None:
        super().__init__(lambda _: Script(), endpoints, processor=TokenUpdates(), **kwargs)
        self.io = io
        self.input_adapter = adapter


class Words:
    """An input adapter that makes ids of rows."""

    async def start(self) -> None:
        pass

    async def adapt(self, asked: StageInput) -> Any:
        return await TextInput().adapt(replace(asked, prompt=[1, 2]))


@pytest.mark.parametrize(
    ("thinks", "speaks", "adapter", "message"),
    [
        ({}, {}, RowsInput(project=lambda x: np.ones((len(x), 3))), None),
        ({}, {"embedding_size": None}, Words(), None),
        ({"has_tokenizer": False}, {}, None, "no tokenizer; leave engine_args skip_tokenizer"),
        ({"gives": set()}, {}, None, "must carry rows of hidden states"),
        ({}, {}, RowsInput(), "become embeddings of 2 numbers, the model's have 3"),
        ({}, {}, RowsInput(project=lambda x: x @ np.ones((5, 3))), "cannot be projected"),
        ({}, {"embedding_size": None}, RowsInput(), "enable_prompt_embeds=True"),
        ({}, {"embedding_size": None}, TextInput(), "enable_prompt_embeds=True"),
    ],
)
async def test_two_stages_that_do_not_fit_together_are_refused_at_start(
    thinks: dict[str, Any], speaks: dict[str, Any], adapter: Any, message: str | None
) -> None:
    made: list[Described] = []

    def thinker(endpoints: Endpoints) -> Described:
        fields = {"gives": {"hidden"}, **thinks}
        gives = fields.pop("gives")
        stage = Described(replace(IO, **fields), None, endpoints, name="thinker")
        stage.row_keys = frozenset(gives)
        made.append(stage)
        return stage

    def talker(endpoints: Endpoints) -> Described:
        made.append(Described(replace(IO, **speaks), adapter, endpoints, name="talker"))
        return made[-1]

    running = Pipeline(thinker=thinker, ar=talker, decoder=None)
    if message is None:
        async with running:
            assert running.health().ok
    else:
        with pytest.raises(ConfigError, match=message):
            await running.__aenter__()
    assert all(stage._publisher is None for stage in made)


async def test_a_talker_that_does_not_come_up_leaves_no_thinker_behind() -> None:
    class Broken(ScriptedARStage):
        async def start(self) -> None:
            raise StartupError("no voice", stage=self.name)

    made: list[Any] = []

    def thinker(endpoints: Endpoints) -> Any:
        made.append(scripted(think, processor=HiddenStates(), gives={"hidden"})(endpoints))
        return made[0]

    def talker(endpoints: Endpoints) -> Any:
        return Broken(speak, endpoints, processor=TokenUpdates(), name="talker")

    with pytest.raises(StartupError, match="no voice"):
        await Pipeline(thinker=thinker, ar=talker, decoder=None).__aenter__()
    assert made[0]._publisher is None


async def test_two_stages_of_one_name_are_refused() -> None:
    config = ARStageConfig(model="m", processor=HiddenStates())
    with pytest.raises(ConfigError, match="two stages are named 'ar'"):
        Pipeline(thinker=config, ar=config, decoder=None)
    with pytest.raises(ConfigError, match="are both named 'ar'"):
        await Pipeline(thinker=scripted(think), ar=scripted(speak), decoder=None).__aenter__()
    thinker: Any = 5
    with pytest.raises(ConfigError, match="thinker is an ARStageConfig"):
        Pipeline(thinker=thinker, ar=scripted(speak), decoder=None)

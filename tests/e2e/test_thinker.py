"""A thinker and a talker on two vLLM engines: what is said, what is left, what a death ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from omnistage import (
    ARStageConfig,
    DecoderStageConfig,
    EngineInput,
    HiddenStates,
    Pipeline,
    RequestRows,
    RowsInput,
    StageInput,
    Stream,
    subscribe,
)
from omnistage.config import AUDIO
from omnistage.errors import ConfigError, EngineDead, InvalidRequest, OmniStageError
from omnistage.payload import numbers
from omnistage.request import FinishReason, StageRequest, Usage
from omnistage.stages.ar import ARStage
from omnistage.stages.thinker import ThinkerTalker
from omnistage.wire import Update
from tests.e2e.conftest import ENGINE_ARGS, IdDecoder, ar_config, ids_of
from tests.e2e.inside import added
from tests.e2e.test_cramped import CRAMPED
from tests.omni_models.checkpoint import checkpoint
from tests.parts import branches_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

WITHIN = 2.0
BYTES = list(range(256))  # what the tokenizer of bytes has a text for
LETTERS = BYTES[:94]  # those of one printable character
TEXT: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": BYTES}
SPOKEN: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 900}
TURN = np.linalg.qr(np.random.default_rng(1).standard_normal((256, 256)))[0].astype(np.float32)


def turned(rows: np.ndarray) -> np.ndarray:
    """What the tests have between the two models; a row of 7s first is refused."""
    made: np.ndarray = rows @ TURN
    return made


def joined(
    models: Path,
    *,
    prompt: bool = True,
    speaks: dict[str, Any] = SPOKEN,
    thinker: dict[str, Any] | None = None,
    talker: dict[str, Any] | None = None,
    start_method: Literal["fork", "spawn"] = "fork",
    project: Any = turned,
) -> Pipeline:
    """A pipeline of two engines that is not entered yet."""
    model = checkpoint(models, "Qwen3ForCausalLM", bytewise=True)
    args = {**ENGINE_ARGS, "skip_tokenizer_init": False, **(thinker or {})}
    return Pipeline(
        thinker=ARStageConfig(
            model=model,
            name="thinker",
            processor=HiddenStates(prompt=prompt),
            engine_args=args,
            start_method=start_method,
        ),
        ar=ar_config(
            name="talker",
            input_adapter=RowsInput(project=project, sampling=speaks),
            engine_args={**ENGINE_ARGS, "enable_prompt_embeds": True, **(talker or {})},
            start_method=start_method,
        ),
        decoder=DecoderStageConfig(build=IdDecoder),
    )


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pipeline(models: Path) -> AsyncIterator[Pipeline]:
    async with joined(models) as running:
        yield running


def joint(pipeline: Pipeline) -> ThinkerTalker:
    ar = pipeline._routes[0].ar
    assert isinstance(ar, ThinkerTalker)
    return ar


def stages_of(pipeline: Pipeline) -> tuple[ARStage, ARStage]:
    ar = joint(pipeline)
    assert isinstance(ar.thinker, ARStage)
    assert isinstance(ar.talker, ARStage)
    return ar.thinker, ar.talker


def llm_of(stage: ARStage) -> Any:
    assert stage._engine is not None
    return stage._engine._llm


def core_of(stage: ARStage) -> int:
    assert stage._control is not None
    return stage._control.hellos[0].pid


async def wait_until_idle(pipeline: Pipeline, within: float = 10) -> None:
    """Return when nothing is held here, and every KV block of both engines is free."""
    ar, (branch,) = joint(pipeline), branches_of(pipeline)
    async with asyncio.timeout(within):
        while len(ar) or ar._rows or any(map(len, stages_of(pipeline))) or len(branch.decoder):
            await asyncio.sleep(0.01)
        for stage in stages_of(pipeline):
            while not await llm_of(stage).reset_prefix_cache():
                await asyncio.sleep(0.01)
    assert not pipeline._running


def answer(i: int) -> tuple[str, dict[str, Any]]:
    """A prompt and its sampling, of another length each."""
    return "abcdefgh"[i % 8] * (2 + i) + f" {i}?", {**TEXT, "max_tokens": 6 + 3 * i % 17}


async def by_hand(
    pipeline: Pipeline, prompt: str, sampling: dict[str, Any], *, first: int = 0
) -> tuple[str, list[int]]:
    """The text of the thinker alone, and the ids of the talker alone behind its rows."""
    from vllm.sampling_params import SamplingParams

    thinker, talker = stages_of(pipeline)
    rows, done = RequestRows(), asyncio.get_running_loop().create_future()
    request = StageRequest(
        request_id="by-hand",
        external_id="by-hand",
        input=StageInput(prompt=prompt, sampling={**sampling, "detokenize": True}),
        consumers=((AUDIO, "hand"),),
    )
    async with subscribe(thinker.publishers, subscriber="hand") as updates:
        thinker.submit(request, on_done=done.set_result)
        async for update in updates:
            if rows.take(update):
                break
    usage = await done
    assert isinstance(usage, Usage)
    embeddings = torch.from_numpy(turned(numbers(rows.joined(first))))
    ids: list[int] = []
    params = SamplingParams(detokenize=False, **SPOKEN)
    async for output in llm_of(talker).generate({"prompt_embeds": embeddings}, params, "by-hand"):
        ids = list(output.outputs[0].token_ids)
    return usage.text or "", ids


async def heard(stream: Stream) -> tuple[str, list[int]]:
    """A stream's text, in pieces put together, and the ids that its audio says."""

    async def listen() -> list[int]:
        return ids_of([chunk async for chunk in stream])

    async with stream:
        pieces, ids = await asyncio.gather(written(stream), listen())
    assert stream.usage is not None
    assert (stream.usage.text or "") == "".join(pieces)
    assert all(pieces)
    return "".join(pieces), ids


async def written(stream: Stream) -> list[str]:
    return [piece async for piece in stream.text]


async def test_16_requests_say_what_the_two_engines_say_by_hand(pipeline: Pipeline) -> None:
    requests = [answer(i) for i in range(16)]
    expected = [await by_hand(pipeline, *request) for request in requests]
    assert len({tuple(ids) for _, ids in expected}) > 8
    streams = [pipeline.submit(prompt, sampling=sampling) for prompt, sampling in requests]
    assert await asyncio.gather(*map(heard, streams)) == expected
    for stream, (prompt, sampling) in zip(streams, requests, strict=True):
        usage = stream.usage
        assert usage is not None
        assert usage.thinker is not None
        took = usage.thinker
        assert (took.prompt_tokens, took.output_tokens) == (len(prompt), sampling["max_tokens"])
        assert took.finish_reason is FinishReason.LENGTH
        assert usage.prompt_tokens == len(prompt) + sampling["max_tokens"] - 1  # its rows
        assert usage.output_tokens == SPOKEN["max_tokens"]
    await wait_until_idle(pipeline)


@pytest.mark.parametrize("modalities", [("text",), ("text", "audio")])
async def test_the_pieces_of_a_text_are_vllms_text_whatever_the_bytes(
    pipeline: Pipeline, modalities: Sequence[str]
) -> None:
    """Bytes at random: characters come in several tokens, and many are none at all."""
    random = {**TEXT, "temperature": 1.5, "max_tokens": 60}
    for seed in range(4):
        sampling = {**random, "seed": seed, "stop_token_ids": [10]}
        text, _ = await by_hand(pipeline, "zażółć gęślą jaźń 日本語", sampling)
        stream = pipeline.submit(
            "zażółć gęślą jaźń 日本語", sampling=sampling, modalities=modalities
        )
        pieces, usage = await asyncio.gather(written(stream), stream.finished())
        assert "".join(pieces) == (usage.text or "") == text
        assert len(pieces) > 1
        assert any(ord(c) > 127 for c in text)
    await wait_until_idle(pipeline)


async def test_text_alone_leaves_the_talker_and_the_decoder_idle(pipeline: Pipeline) -> None:
    thinker, talker = stages_of(pipeline)
    before = await added(llm_of(thinker)), await added(llm_of(talker))
    opened: list[str] = []
    (branch,) = branches_of(pipeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch, "open", lambda request_id, *_, **__: opened.append(request_id))
        prompt, sampling = answer(3)[0], {**TEXT, "allowed_token_ids": LETTERS}
        sampling["max_tokens"] = 40
        expected = (await by_hand(pipeline, prompt, sampling))[0]
        stream = pipeline.submit(prompt, sampling=sampling, modalities=("text",))
        assert "".join(await written(stream)) == expected
        usage = await stream.finished()
        # A stop string is vLLM's to match here, where nothing was published behind it.
        stop = {**sampling, "stop": [expected[4:6]]}
        cut = pipeline.submit(prompt, sampling=stop, modalities=("text",))
        assert "".join(await written(cut)) == (await cut.finished()).text
        assert "".join(await written(cut)) == expected[: expected.index(expected[4:6])]
    assert (usage.text, usage.thinker) == (expected, None)
    assert usage.output_tokens == sampling["max_tokens"]
    after = await added(llm_of(thinker)), await added(llm_of(talker))
    assert after == (before[0] + 3, before[1] + 1)  # one by hand
    assert not opened
    with pytest.raises(InvalidRequest, match="stop strings"):
        await pipeline.submit(prompt, sampling=stop).finished()
    await wait_until_idle(pipeline)


@pytest.mark.parametrize("phase", ["thinking", "between", "speaking"])
async def test_an_abort_in_any_phase_frees_both_engines(
    pipeline: Pipeline, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker, talker = stages_of(pipeline)
    thinks = {**TEXT, "max_tokens": 900 if phase == "thinking" else 4}
    if phase == "between":

        class Waits(RowsInput):
            async def adapt(self, stage_input: StageInput) -> EngineInput:
                await asyncio.Event().wait()
                raise AssertionError

        monkeypatch.setattr(talker, "input_adapter", Waits())
    elif phase == "speaking":
        endless = RowsInput(project=turned, sampling=ENDLESS)
        monkeypatch.setattr(talker, "input_adapter", endless)
    streams = [pipeline.submit("hello", sampling=thinks) for _ in range(4)]
    for stream in streams:
        await stream.__aenter__()
        if phase == "speaking":
            await anext(stream)
        else:
            await anext(stream.text)
    async with asyncio.timeout(WITHIN):
        while (len(thinker), len(talker)) != ((4, 0) if phase == "thinking" else (0, 4)):
            await asyncio.sleep(0.01)
    await asyncio.gather(*(stream.abort() for stream in streams))
    await wait_until_idle(pipeline, within=1)


async def test_a_projection_that_raises_fails_its_request_alone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(rows: np.ndarray) -> np.ndarray:
        if len(rows) == 7:
            raise FloatingPointError("seven rows")
        return turned(rows)

    _, talker = stages_of(pipeline)
    monkeypatch.setattr(talker, "input_adapter", RowsInput(project=refuses, sampling=SPOKEN))
    other = asyncio.create_task(heard(pipeline.submit("abc", sampling=answer(2)[1])))
    stream = pipeline.submit("abcd", sampling={**TEXT, "max_tokens": 4})
    with pytest.raises(InvalidRequest, match="FloatingPointError: seven rows") as raised:
        await heard(stream)
    assert raised.value.stage == "talker"
    assert len("".join(await written(stream))) > 0  # it was thought all the same
    assert len((await other)[1]) == 20
    await wait_until_idle(pipeline)


@asynccontextmanager
async def dying(models: Path) -> AsyncIterator[Pipeline]:
    """A pipeline whose processes are gone when it has been left, whatever died before."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with joined(models, prompt=False) as running:
        children = psutil.Process().children(recursive=True)
        ours = [child for child in children if child.pid not in before]
        assert len(ours) >= 2
        yield running
    async with asyncio.timeout(WITHIN):
        while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ours):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("victim", ["thinker", "talker"])
async def test_a_killed_engine_ends_what_needs_it_and_nothing_stays(
    victim: str, models: Path
) -> None:
    async with dying(models) as pipeline:
        # The answer's rows alone, as its processor leaves those of the prompt out.
        prompt, sampling = answer(5)
        assert await heard(pipeline.submit(prompt, sampling=sampling)) == await by_hand(
            pipeline, prompt, sampling, first=len(prompt) - 1
        )
        stages = dict(zip(("thinker", "talker"), stages_of(pipeline), strict=True))
        endless = RowsInput(project=turned, sampling=ENDLESS)
        stages["talker"].input_adapter = endless
        thinking = [pipeline.submit("hi", sampling={**TEXT, "max_tokens": 900}) for _ in range(3)]
        speaking = [pipeline.submit("hi", sampling={**TEXT, "max_tokens": 2}) for _ in range(3)]
        for stream in speaking:
            await anext(stream)
        for stream in thinking:
            await anext(stream.text)
        needing = thinking if victim == "thinker" else [*thinking, *speaking]
        os.kill(core_of(stages[victim]), signal.SIGKILL)
        async with asyncio.timeout(WITHIN):
            for stream in needing:
                with pytest.raises(EngineDead):
                    async for _ in stream:
                        pass
        assert not pipeline.health().ok
        for modalities in (("text", "audio"), ("text",)):
            with pytest.raises(OmniStageError, match="engine process is gone"):
                await pipeline.submit("hi", modalities=modalities).finished()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thinker": {"skip_tokenizer_init": True}}, "has no tokenizer"),
        ({"talker": {"enable_prompt_embeds": False}}, "enable_prompt_embeds=True"),
    ],
)
async def test_engines_that_do_not_fit_together_are_refused_at_start(
    changes: dict[str, Any], message: str, models: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        await joined(models, **changes).__aenter__()


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_spawned_engines_say_the_same(models: Path) -> None:
    prompt, sampling = answer(5)
    async with joined(models, start_method="spawn", project=None) as pipeline:
        text, ids = await heard(pipeline.submit(prompt, sampling=sampling))
        assert (await by_hand(pipeline, prompt, sampling))[0] == text
        assert len(ids) == SPOKEN["max_tokens"]


async def test_rows_cross_once_whatever_is_preempted(models: Path) -> None:
    thinks = {**TEXT, "max_tokens": 60}
    prompts = [f"{i}" * 54 for i in range(6)]
    cramped = {**CRAMPED, "skip_tokenizer_init": False}
    async with joined(models, thinker=cramped) as pipeline:
        expected = [await by_hand(pipeline, prompt, thinks) for prompt in prompts]
        paused: list[str] = []
        ar: Any = joint(pipeline)
        on_update = ar.on_update

        def note(update: Update, *rest: Any) -> None:
            paused.extend([update.request_id] if update.paused else [])
            on_update(update, *rest)

        ar.on_update = note
        streams = [pipeline.submit(prompt, sampling=thinks) for prompt in prompts]
        assert await asyncio.gather(*map(heard, streams)) == expected
        assert paused  # preempted
        await wait_until_idle(pipeline)

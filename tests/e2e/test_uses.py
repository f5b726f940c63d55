"""The ways to use it beside one pipeline with one decoder, on real vLLM."""

from __future__ import annotations

import asyncio
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import omnistage
from omnistage import ARStageConfig, DecoderStageConfig, Pipeline, Speaker, TokenUpdates, subscribe
from omnistage.errors import (
    ConfigError,
    DecoderError,
    InvalidRequest,
    OmniStageError,
    StageClosed,
    StartupError,
    UnsupportedEnvironment,
    UpdatesLost,
)
from omnistage.request import TokenUpdate
from tests.e2e.conftest import (
    CHECKPOINT,
    ENGINE_ARGS,
    PROMPT,
    IdDecoder,
    ThirdBatchFails,
    ar_config,
    ar_of,
    generate,
    ids_of,
    read,
    wait_until_idle,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def two() -> AsyncIterator[tuple[Pipeline, Pipeline]]:
    """Two pipelines that were started at once: one with two decoders, one with none."""
    async with asyncio.timeout(50):
        double = Pipeline(
            ar=ar_config(),
            decoder=[
                DecoderStageConfig(build=IdDecoder),
                DecoderStageConfig(build=ThirdBatchFails, name="second"),
            ],
        )
        bare = Pipeline(ar=ar_config(), decoder=None)
        await asyncio.gather(double.__aenter__(), bare.__aenter__())
    yield double, bare
    await asyncio.gather(double.aclose(), bare.aclose())


async def test_two_decoders_give_each_request_twice_and_whole(two: Any) -> None:
    double, _ = two
    expected = await generate(double, PROMPT, **GREEDY)
    async with double.submit(PROMPT, sampling=GREEDY) as stream:
        chunks = [chunk async for chunk in stream]
    for name in ("decoder", "second"):
        own = [chunk for chunk in chunks if chunk.decoder == name]
        assert [chunk.index for chunk in own] == list(range(len(own)))
        assert ids_of(own) == list(expected.token_ids)
    assert stream.usage is not None
    assert stream.usage.output_tokens == 40


async def test_one_decoder_that_fails_ends_the_request_in_both(two: Any) -> None:
    double, _ = two
    bias = {**GREEDY, "logit_bias": {77: 100.0}, "max_tokens": 300}
    with pytest.raises(DecoderError) as failure:
        await double.submit(PROMPT, sampling=bias).finished()
    assert failure.value.stage == "second"
    await wait_until_idle(double)


async def test_audio_of_two_decoders_is_not_collected_into_one_piece(two: Any) -> None:
    with pytest.raises(ConfigError, match="2 decoders"):
        await two[0].submit(PROMPT, sampling=GREEDY).collect()


async def test_without_a_decoder_a_request_ends_with_the_ar_stage(two: Any) -> None:
    _, bare = two
    stream = bare.submit(PROMPT, sampling={**GREEDY, "stop": None})
    usage = await stream.finished()
    assert (usage.output_tokens, str(usage.finish_reason)) == (40, "length")
    assert stream.usage is usage
    with pytest.raises(ConfigError, match="no decoder"):
        _ = bare.sample_rate
    await wait_until_idle(bare)


async def updates_of(subscription: Any, request_id: str) -> list[TokenUpdate]:
    """A request's updates, others' left out."""
    taken = []
    async with asyncio.timeout(20):
        async for update in subscription:
            if update.request_id == request_id:
                taken.append(update)
                if update.terminal is not None:
                    return taken
    raise AssertionError("the subscription ended")


async def test_a_subscriber_reads_the_ids_of_the_requests_that_name_it(two: Any) -> None:
    _, bare = two
    expected = await generate(bare, PROMPT, **GREEDY)
    async with subscribe(bare.endpoints, subscriber="captions") as subscription:
        await bare.submit(PROMPT, sampling=GREEDY).finished()  # does not name it
        stream = bare.submit(PROMPT, sampling=GREEDY, seed=7, subscribers=["captions"])
        usage = await stream.finished()
        updates = await updates_of(subscription, stream.request_id)
    assert [i for update in updates for i in update.ids] == list(expected.token_ids)
    assert [update.start is not None for update in updates] == [True] + [False] * (len(updates) - 1)
    assert updates[0].start is not None
    assert updates[0].start.seed == 7
    assert updates[-1].terminal is not None
    assert updates[-1].terminal.tokens == usage.output_tokens
    stamps = [update.stamp for update in updates]
    assert stamps == sorted(stamps)
    await wait_until_idle(bare)


async def test_a_subscription_is_iterated_without_with_and_ends_when_it_is_closed(two: Any) -> None:
    _, bare = two
    subscription = subscribe(bare.endpoints[0])
    reading = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0.2)
    await bare.submit(PROMPT, sampling=GREEDY, subscribers="tokens").finished()
    assert (await reading).ids
    await subscription.aclose()
    assert [update async for update in subscription] == []
    await subscription.aclose()


async def test_a_decoders_topic_can_be_listened_to(two: Any) -> None:
    double, _ = two
    async with subscribe(double.endpoints, subscriber="second") as subscription:
        stream = double.submit(PROMPT, sampling=GREEDY)
        await stream.finished()
        updates = await updates_of(subscription, stream.request_id)
    assert sum(len(update.ids) for update in updates) == 40


async def test_a_subscriber_that_is_not_there_fails_the_request_that_names_it(two: Any) -> None:
    double, _ = two
    with pytest.raises(UpdatesLost, match="nobody is subscribed as 'nobody' on channel 'audio'"):
        await double.submit(PROMPT, sampling=GREEDY, subscribers=["nobody"]).finished()
    await wait_until_idle(double)


async def test_a_name_that_no_subscriber_can_have_is_refused(two: Any) -> None:
    with pytest.raises(InvalidRequest, match="subscriber id") as refusal:
        two[0].submit(PROMPT, subscribers=["a/b"])
    assert refusal.value.parameter == "subscribers"
    with pytest.raises(ConfigError, match="channel name"):
        subscribe(two[0].endpoints, "a/b")


async def test_closing_one_pipeline_leaves_the_other_alone(two: Any) -> None:
    double, bare = two
    running = asyncio.create_task(double.submit(PROMPT, sampling=GREEDY).finished())
    ended = asyncio.create_task(bare.submit(PROMPT, sampling={"max_tokens": 900}).finished())
    await asyncio.sleep(0.1)
    await bare.aclose()
    with pytest.raises(StageClosed):
        await ended
    assert (await running).output_tokens == 40
    await double.submit(PROMPT, sampling=GREEDY).finished()


def make_llm(config: ARStageConfig | None) -> Any:
    """An AsyncLLM as an application makes it, attached to a stage if one is given."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_config = AsyncEngineArgs(model=str(CHECKPOINT), **ENGINE_ARGS).create_engine_config()
    if config is not None:
        omnistage.attach(vllm_config, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        return AsyncLLM.from_vllm_config(vllm_config)


async def test_an_existing_engine_is_used_and_left_running() -> None:
    from vllm.sampling_params import SamplingParams

    config = ARStageConfig(model=str(CHECKPOINT), processor=TokenUpdates())
    llm = make_llm(config)
    try:
        params = SamplingParams(detokenize=False, **GREEDY)

        async def plain(request_id: str) -> list[int]:
            outputs = [
                output
                async for output in llm.generate({"prompt_token_ids": PROMPT}, params, request_id)
            ]
            return list(outputs[-1].outputs[0].token_ids)

        decoder = DecoderStageConfig(build=IdDecoder)
        async with Pipeline(ar=config, decoder=decoder, llm=llm) as pipeline:
            ours, theirs = await asyncio.gather(
                read(pipeline.submit(PROMPT, sampling=GREEDY)), plain("beside")
            )
            assert ours[0] == theirs
            stream = pipeline.submit(PROMPT, sampling={"max_tokens": 900, "ignore_eos": True})
            async with stream:
                await anext(stream)
        assert await plain("afterwards") == theirs
        assert await llm.reset_prefix_cache()  # no block is held

        def broken() -> IdDecoder:
            raise OSError("no weights")

        with pytest.raises(StartupError, match="no weights"):
            await Pipeline(
                ar=config, decoder=DecoderStageConfig(build=broken), llm=llm
            ).__aenter__()
        async with Pipeline(ar=config, decoder=decoder, llm=llm) as again:
            with pytest.raises(ConfigError, match="serves a pipeline already"):
                await Pipeline(ar=config, decoder=decoder, llm=llm).__aenter__()
            assert (await read(again.submit(PROMPT, sampling=GREEDY)))[0] == theirs
            await asyncio.sleep(0.3)  # the engine core is connected again
            stream = again.submit(PROMPT, sampling={"max_tokens": 900, "ignore_eos": True})
            async with stream:
                await anext(stream)
            assert await ar_of(again)._engine._llm.reset_prefix_cache()  # type: ignore[union-attr]
        assert await plain("at last") == theirs
    finally:
        llm.shutdown()


async def test_an_engine_that_was_not_attached_is_refused() -> None:
    stock: Any = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))
    config = ARStageConfig(model=str(CHECKPOINT), processor=TokenUpdates())
    others: list[Any] = [stock, 5]
    for llm in others:
        with pytest.raises(ConfigError, match=r"omnistage\.attach"):
            await Pipeline(ar=config, decoder=None, llm=llm).__aenter__()


async def test_a_stage_that_says_how_to_start_an_engine_is_not_attached() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm_config = AsyncEngineArgs(model=str(CHECKPOINT), **ENGINE_ARGS).create_engine_config()
    with pytest.raises(ConfigError, match="where you make yours"):
        omnistage.attach(vllm_config, ar_config())
    vllm_config.scheduler_config.scheduler_cls = "a.Scheduler"
    with pytest.raises(ConfigError, match="scheduler_cls"):
        omnistage.attach(
            vllm_config, ARStageConfig(model=str(CHECKPOINT), processor=TokenUpdates())
        )
    vllm_config.scheduler_config.scheduler_cls = None
    of_another_kind: Any = object()
    vllm_config.additional_config = of_another_kind
    with pytest.raises(ConfigError, match="additional_config must be a dict"):
        omnistage.attach(
            vllm_config, ARStageConfig(model=str(CHECKPOINT), processor=TokenUpdates())
        )


async def test_synchronous_speech_is_refused_where_it_would_block_a_loop() -> None:
    with pytest.raises(UnsupportedEnvironment, match=r"omnistage\.Pipeline"):
        omnistage.speak("Hello.")
    with pytest.raises(StageClosed, match="use it as `with`"):
        await asyncio.to_thread(Speaker().speak, "Hello.")


async def test_a_speaker_speaks_from_any_thread_and_again_without_a_start(tmp_path: Path) -> None:
    def script() -> tuple[Any, Any, Any]:
        with Speaker(start_method="fork") as speaker:
            first = speaker.speak("Hello world.", seed=1)
            with pytest.raises(InvalidRequest):
                speaker.speak("")
            second = speaker.speak("Hello world.", seed=1)
            both = speaker.speak("Hello world. What time is it?", seed=1)
            other = speaker.speak("What time is it?", seed=1)
        assert np.array_equal(both.pcm, np.concatenate([first.pcm, other.pcm]))
        first.save(tmp_path / "hello.wav")
        with pytest.raises(StageClosed):
            speaker.speak("Hello.")
        return first, second, speaker

    first, second, _ = await asyncio.to_thread(script)
    assert np.array_equal(first.pcm, second.pcm)
    assert first.usage == second.usage
    assert 0.4 < first.seconds < 2
    with wave.open(str(tmp_path / "hello.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, len(first.pcm))


async def test_what_a_speaker_cannot_start_is_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="unknown preset"):
        Speaker("nobody")

    def script() -> None:
        with Speaker(model="/nowhere"):
            pass

    with pytest.raises(OmniStageError):
        await asyncio.to_thread(script)

"""The scripted AR stage in a pipeline: everything but the model is real, and vLLM is not there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from omnistage import AutoregressiveStage, CodecFrames, Deadlines, DecoderStageConfig, Pipeline
from omnistage.errors import (
    ConfigError,
    DeadlineExceeded,
    DecoderError,
    InvalidRequest,
    OmniStageError,
    ProcessorError,
    ServerError,
    StageClosed,
    StreamClosed,
)
from omnistage.request import ChunkPolicy, FinishReason, StageInput, StageRequest
from omnistage.testing import FakeDecoder, Script, ScriptedARStage, scripted
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.keys import make_keys
from tests.parts import branches_of

IDS = list(range(100, 150))


def pipeline(
    script: Any, *, decoder: Any = FakeDecoder, processor: Any = None, **config: Any
) -> Any:
    return Pipeline(
        ar=scripted(script, processor=processor),
        decoder=DecoderStageConfig(build=decoder, **config),
    )


@pytest.mark.parametrize("ids_per_step", [1, 3, 50, 64])
async def test_the_scripts_ids_reach_the_caller_however_they_are_grouped(ids_per_step: int) -> None:
    async with pipeline(Script(ids=IDS, ids_per_step=ids_per_step)) as running:
        speech = await running.submit("Hello.").collect()
    assert FakeDecoder().indices([speech.pcm]) == IDS
    assert (speech.usage.output_tokens, speech.usage.prompt_tokens) == (50, 6)
    assert speech.usage.finish_reason is FinishReason.STOP


async def test_a_script_may_depend_on_what_was_asked() -> None:
    def say(asked: StageInput) -> Script:
        if not asked.prompt:
            raise InvalidRequest("nothing to say")
        return Script(ids=[ord(c) for c in str(asked.prompt)], reason=FinishReason.LENGTH)

    async with pipeline(say) as running:
        texts = ["one", "two", "three"] * 8
        spoken = await asyncio.gather(*(running.submit(text).collect() for text in texts))
        with pytest.raises(InvalidRequest, match="nothing to say"):
            await running.submit("").collect()
    for text, speech in zip(texts, spoken, strict=True):
        assert "".join(map(chr, FakeDecoder().indices([speech.pcm]))) == text
        assert speech.usage.finish_reason is FinishReason.LENGTH


async def test_an_empty_script_is_an_empty_utterance() -> None:
    async with pipeline(Script()) as running:
        speech = await running.submit("Hello.").collect()
    assert (len(speech.pcm), speech.usage.output_tokens) == (0, 0)


async def test_steps_come_when_the_script_says() -> None:
    script = Script(ids=IDS[:4], first_after=0.1, step_after=0.1)
    async with pipeline(script, chunks=ChunkPolicy(first=1, growth=1.0, steady=1)) as running:
        began = time.monotonic()
        times = [time.monotonic() - began async for _ in running.submit("Hello.")]
    assert all(t >= 0.099 * (k + 1) for k, t in enumerate(times))
    assert len(times) == 4


async def test_a_scripted_error_ends_the_request() -> None:
    async with pipeline(Script(ids=IDS, error=ServerError("on purpose"))) as running:
        streams = [running.submit("Hello."), running.submit("Hello.")]
        ends = await asyncio.gather(*(s.collect() for s in streams), return_exceptions=True)
        for stream, end in zip(streams, ends, strict=True):
            assert isinstance(end, ServerError)
            assert (end.message, end.request_id) == ("on purpose", stream.request_id)
        assert not running._running


async def test_a_stalled_script_is_late_and_the_ar_stage_is_named() -> None:
    deadlines = Deadlines(between_chunks=0.2)
    async with pipeline(Script(ids=IDS, stalls=True), deadlines=deadlines) as running:
        with pytest.raises(DeadlineExceeded) as late:
            await running.submit("Hello.").collect()
        assert late.value.stage == "ar"


async def test_an_abort_frees_every_side() -> None:
    async with pipeline(Script(ids=IDS, stalls=True)) as running:
        stream = running.submit("Hello.")
        async with stream:
            await anext(stream)
            await stream.abort()
            with pytest.raises(StreamClosed):
                await anext(stream)
        stage = running._routes[0].ar
        assert isinstance(stage, ScriptedARStage)
        assert isinstance(stage, AutoregressiveStage)
        assert not len(stage)
        assert not len(branches_of(running)[0].decoder)


async def test_a_processor_and_a_decoder_fail_as_they_do_with_vllm() -> None:
    class Raises(CodecFrames, frozen=True):
        def update(self, state: Any, step: Any) -> Any:
            raise RuntimeError("on purpose")

    raises = Raises(first_id=0, codebook_size=10)
    async with pipeline(Script(ids=IDS), processor=raises) as running:
        with pytest.raises(ProcessorError, match="on purpose"):
            await running.submit("Hello.").collect()
    async with pipeline(Script(ids=IDS), decoder=lambda: FakeDecoder(fails_on=120)) as running:
        with pytest.raises(DecoderError):
            await running.submit("Hello.").collect()


async def test_the_processor_decides_what_is_decoded() -> None:
    frames = CodecFrames(first_id=110, codebook_size=20)
    async with pipeline(Script(ids=IDS), processor=frames) as running:
        speech = await running.submit("Hello.").collect()
    assert FakeDecoder().indices([speech.pcm]) == list(range(20))
    assert speech.usage.dropped_tokens == 30


async def test_a_request_without_a_consumer_is_not_published() -> None:
    async with Pipeline(ar=scripted(Script(ids=IDS)), decoder=None) as running:
        usage = await running.submit("Hello.").finished()
    assert usage.output_tokens == 50


async def test_draining_waits_and_refuses() -> None:
    with Endpoints() as endpoints:
        stage = scripted(Script(ids=IDS, step_after=0.01))(endpoints)
        await stage.start()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = StageRequest(
            request_id="r",
            external_id="r",
            input=StageInput(prompt="Hello."),
            final_stage=True,
        )
        stage.submit(request, on_done=done.set_result)
        draining = asyncio.ensure_future(stage.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        with pytest.raises(StageClosed):
            stage.submit(request, on_done=done.set_result)
        await draining
        assert not isinstance(await done, OmniStageError)
        await stage.aclose()
        await stage.aclose()


READER = """
import asyncio, sys
import omnistage

async def main():
    endpoint, keys = sys.argv[1:]
    async with omnistage.subscribe(endpoint, subscriber="reader", keys=keys) as updates:
        print("subscribed", flush=True)
        ids = []
        async for update in updates:
            ids += update.ids
            if update.terminal is not None:
                print(ids)
                return

asyncio.run(main())
"""


async def test_another_process_reads_its_updates_over_tcp_with_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    ar = scripted(Script(ids=IDS), bind="tcp://127.0.0.1:0", keys=tmp_path / "keys")
    async with Pipeline(ar=ar, decoder=DecoderStageConfig(build=FakeDecoder)) as running:
        reader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", READER, running.endpoints[0], str(tmp_path / "keys")),
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None
        assert await reader.stdout.readline() == b"subscribed\n"
        speech = await running.submit("Hello.", subscribers=["reader"]).collect()
        said, _ = await reader.communicate()
    assert FakeDecoder().indices([speech.pcm]) == IDS
    assert said.decode().strip() == str(IDS)


async def test_it_binds_where_a_real_one_may() -> None:
    with pytest.raises(ConfigError, match="omnistage keys"):
        await Pipeline(ar=scripted(Script(), bind="tcp://192.0.2.1:0"), decoder=None).__aenter__()


def test_it_needs_neither_vllm_nor_torch() -> None:
    code = """
import asyncio, sys
sys.modules["vllm"] = sys.modules["torch"] = None
from omnistage import DecoderStageConfig, Pipeline
from omnistage.testing import FakeDecoder, Script, scripted

async def main():
    decoder = DecoderStageConfig(build=FakeDecoder)
    async with Pipeline(ar=scripted(Script(ids=[7] * 9)), decoder=decoder) as pipeline:
        print(len((await pipeline.submit("Hello.").collect()).pcm))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout.strip(), done.stderr) == ("36", "")

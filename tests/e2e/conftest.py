"""Real vLLM for the end-to-end tests: one engine a session, forked, on the embedded talker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import omnistage
from omnistage.adapters.processor import CodecFrames, Emission, Step, TokenUpdates
from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.pipeline import Pipeline
from omnistage.request import AudioChunk, Codes, FinishReason, Pcm, Start
from omnistage.stages.ar import ARStage
from omnistage.stream import Stream
from tests.parts import branches_of

CHECKPOINT = Path(omnistage.__file__).parent / "models" / "talker" / "checkpoint"
VOCABULARY = 1344
EOS = 2
PROMPT = [1, 4, 70, 80, 3]
HOP = 4


class IdDecoder:
    """Writes each id into the samples of its frame, so that a test can read the ids back."""

    sample_rate = 24_000
    hop_length = HOP
    codebooks = 1
    codebook_size = VOCABULARY
    left_context = 0
    right_context = 0
    deterministic = True

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        return [np.repeat(w[:, 0] / VOCABULARY, HOP).astype(np.float32) for w in windows]


class ThirdBatchFails(IdDecoder):
    """Raises on the third batch that decodes a stream holding the id 77."""

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        if any((w == 77).any() for w in windows):
            self.calls += 1
            if self.calls >= 3:
                raise RuntimeError("third batch")
        return super().decode(windows)


class RunsOf77Fail(IdDecoder):
    """Raises from the third batch on that decodes a window of nothing but the id 77."""

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        if any((w == 77).all() for w in windows):
            self.calls += 1
            if self.calls >= 3:
                raise RuntimeError("third batch")
        return super().decode(windows)


class Mixed:
    """Does what the request's external id says; anything else is passed on id by id."""

    requires_token_updates = True
    codec = CodecFrames(first_id=VOCABULARY, codebook_size=1)  # no id of the model is in it

    def open(self, request_id: str, start: Start) -> tuple[str, Any]:
        kind = request_id.rpartition("-")[0]
        return kind, self.codec.open(request_id, start) if kind == "no-valid-id" else None

    def update(self, state: tuple[str, Any], step: Step) -> Any:
        kind, inner = state
        if kind == "raises" and step.position >= 3:
            raise RuntimeError("on purpose")
        if kind.startswith("blocks") and step.position == 3:
            time.sleep(int(kind[-1]))
        if kind == "garbage":
            return "not an emission"
        if kind == "no-valid-id":
            return self.codec.update(inner, step)
        return Emission(step.ids)

    def finish(self, state: tuple[str, Any], reason: FinishReason) -> None:
        if state[0] == "raises-at-the-end":
            raise RuntimeError("on purpose")


ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "enable_chunked_prefill": False,
    "enforce_eager": True,
    # Not bfloat16: there a batch of another shape may round to another id, and ids are compared.
    "dtype": "float32",
    "max_num_seqs": 32,
    "skip_tokenizer_init": True,
}


def ar_config(**changes: Any) -> ARStageConfig:
    """The AR stage of the tests: the talker's model, every id passed on."""
    fields: dict[str, Any] = {
        "model": str(CHECKPOINT),
        "processor": TokenUpdates(),
        "engine_args": ENGINE_ARGS,
        "start_method": "fork",
    }
    return ARStageConfig(**{**fields, **changes})


def make_pipeline(decoder: Any = IdDecoder, **changes: Any) -> Pipeline:
    """A pipeline that is not entered yet."""
    return Pipeline(ar=ar_config(**changes), decoder=DecoderStageConfig(build=decoder))


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def pipeline() -> AsyncIterator[Pipeline]:
    """One running pipeline for all tests that leave it in order."""
    async with make_pipeline(processor=Mixed()) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def crowded() -> AsyncIterator[Pipeline]:
    """A second one in which requests queue, are refused, and prefill in chunks of 32 ids."""
    args = {
        **ENGINE_ARGS,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 16,
        "max_num_queued_reqs": 48,
    }
    pipeline = make_pipeline(decoder=RunsOf77Fail, processor=Mixed(), engine_args=args)
    async with pipeline as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the test models' checkpoints are made."""
    return tmp_path_factory.mktemp("models")


def ids_of(chunks: Sequence[AudioChunk]) -> list[int]:
    """The ids that an :class:`IdDecoder` wrote into the audio."""
    pcm = np.concatenate([np.zeros(0, np.float32), *(chunk.pcm for chunk in chunks)])
    return [int(i) for i in np.rint(pcm[::HOP] * VOCABULARY)]


async def read(stream: Stream) -> tuple[list[int], Any]:
    """All ids of a stream, and its usage."""
    async with stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return ids_of(chunks), stream.usage


def ar_of(pipeline: Pipeline) -> ARStage:
    """The pipeline's AR stage, for a look inside."""
    assert isinstance(pipeline._routes[0].ar, ARStage)
    return pipeline._routes[0].ar


async def generate(pipeline: Pipeline, prompt: Sequence[int], **sampling: Any) -> Any:
    """The same request through vLLM alone."""
    from vllm.sampling_params import SamplingParams

    engine = ar_of(pipeline)._engine
    assert engine is not None
    llm = engine._llm
    params = SamplingParams(detokenize=False, **sampling)
    final = None
    async for output in llm.generate({"prompt_token_ids": list(prompt)}, params, "reference"):
        final = output
    assert final is not None
    return final.outputs[0]


async def wait_until_idle(pipeline: Pipeline, within: float = 10) -> None:
    """Return when no stage holds a request and every KV block of vLLM's is free."""
    ar, decoders = ar_of(pipeline), [branch.decoder for branch in branches_of(pipeline)]
    assert ar._engine is not None
    async with asyncio.timeout(within):
        while len(ar) or any(map(len, decoders)) or pipeline._running:
            await asyncio.sleep(0.01)
        # vLLM resets its prefix cache only while no request holds a block.
        while not await ar._engine._llm.reset_prefix_cache():
            await asyncio.sleep(0.01)

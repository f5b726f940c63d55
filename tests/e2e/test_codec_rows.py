"""Codec frames that a model's forward pass gives, decoded to audio while real vLLM samples.

The model's row at position p is (p, the id that it read there): the audio says which rows it got.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage import ARStageConfig, CodecRows, DecoderStageConfig, Pipeline
from omnistage.errors import ConfigError
from omnistage.request import Codes, Pcm
from tests.e2e.conftest import CHECKPOINT, PROMPT, VOCABULARY, generate, wait_until_idle
from tests.e2e.engines import make_llm
from tests.omni_models.checkpoint import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# Six requests preempt one another and prefill in chunks.
CRAMPED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
}


class PairDecoder:
    """A sample for each of a frame's two indices."""

    sample_rate = 24_000
    hop_length = 2
    codebooks = 2
    codebook_size = VOCABULARY
    left_context = 0
    right_context = 0
    deterministic = True

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        return [(w / VOCABULARY).astype(np.float32).reshape(-1) for w in windows]


async def frames(pipeline: Pipeline, prompt: Sequence[int], **sampling: Any) -> tuple[Any, Any]:
    """The frames that were decoded, and the usage."""
    async with pipeline.submit(prompt, sampling={**GREEDY, **sampling}) as stream:
        pcm = [chunk.pcm async for chunk in stream]
    joined = np.concatenate([np.zeros(0, np.float32), *pcm])
    made = np.rint(joined * VOCABULARY).astype(int).reshape(-1, 2).tolist()
    return [tuple(frame) for frame in made], stream.usage


@pytest_asyncio.fixture(loop_scope="session", scope="module", params=["sampled", "read"])
async def talker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, Pipeline]]:
    of = request.param
    config = ARStageConfig(
        model=checkpoint(tmp_path_factory.mktemp("models"), "OmniTokensOnly"),
        processor=CodecRows(codebooks=2, codebook_size=VOCABULARY, of=of),
    )
    llm = make_llm(config, "async" if of == "read" else "sync", "mp", **CRAMPED)
    try:
        decoder = DecoderStageConfig(build=PairDecoder)
        async with Pipeline(ar=config, decoder=decoder, llm=llm) as pipeline:
            yield of, pipeline
    finally:
        llm.shutdown()


def expected(of: str, prompt: Sequence[int], ids: Sequence[int]) -> list[tuple[int, int]]:
    """The frames of a request that ended by its length."""
    read = [*prompt, *ids[:-1]]
    return list(enumerate(read))[len(prompt) - (of == "sampled") :]


async def test_a_request_has_the_frames_of_its_ids_and_none_of_its_prompt(
    talker: tuple[str, Pipeline],
) -> None:
    of, pipeline = talker
    asked = [[1, 4, *(68 + (i * 11 + k) % 100 for k in range(51)), 3] for i in range(6)]
    made = await asyncio.gather(*(frames(pipeline, p, max_tokens=45) for p in asked))
    for prompt, (got, usage) in zip(asked, made, strict=True):
        ids = (await generate(pipeline, prompt, max_tokens=45, **GREEDY)).token_ids
        assert got == expected(of, prompt, ids)
        assert (usage.output_tokens, usage.dropped_tokens) == (45, 0)
    for tokens in (1, 2, 5):
        ids = (await generate(pipeline, PROMPT, max_tokens=tokens, **GREEDY)).token_ids
        assert (await frames(pipeline, PROMPT, max_tokens=tokens))[0] == expected(of, PROMPT, ids)
    await wait_until_idle(pipeline)


async def test_the_frame_of_a_stop_id_is_none(talker: tuple[str, Pipeline]) -> None:
    of, pipeline = talker
    ids = (await generate(pipeline, PROMPT, max_tokens=30, **GREEDY)).token_ids
    stop = next(i for i in ids if i not in ids[: ids.index(i)] and ids.index(i) > 5)
    until = list(ids[: ids.index(stop) + 1])
    got, usage = await frames(pipeline, PROMPT, max_tokens=30, stop_token_ids=[stop])
    whole = expected(of, PROMPT, until)
    assert got == (whole[:-1] if of == "sampled" else whole)
    assert usage.dropped_tokens == (of == "sampled")


async def test_an_engine_whose_model_has_no_such_rows_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processor = CodecRows(codebooks=2, codebook_size=VOCABULARY)
    config = ARStageConfig(model=str(CHECKPOINT), processor=processor)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="takes rows of 'codes', Qwen3ForCausalLM gives 'hidden'"):
        make_llm(config, "sync", "mp")
    assert not list(tmp_path.glob("omni-*"))

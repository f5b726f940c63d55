"""A decoder of hidden states behind real vLLM: its audio says which rows it got, and in what order.

Its samples are the first numbers of each row; and, as the model's embeddings are its head, the id
that a greedy request sampled from the row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage import (
    DecoderStageConfig,
    HiddenStates,
    Pipeline,
    TokenUpdates,
    subscribe,
)
from omnistage.decoders.base import Rows
from omnistage.errors import ConfigError
from omnistage.payload import numbers
from tests.e2e.conftest import (
    ENGINE_ARGS,
    PROMPT,
    VOCABULARY,
    ar_config,
    generate,
    wait_until_idle,
)
from tests.e2e.test_embeddings import embeddings

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SCALE = 1000.0


class HiddenDecoder:
    """Three samples a row: two of its numbers, and the id that it leads to."""

    sample_rate = 24_000
    hop_length = 3
    rows_key = "hidden"
    row_shape = (256,)
    left_context = 2  # more than it needs: windows overlap
    right_context = 1
    deterministic = True

    def __init__(self) -> None:
        self._head = embeddings(list(range(VOCABULARY)))

    def decode(self, windows: Sequence[Rows]) -> list[Rows]:
        return [self._decode(window) for window in windows]

    def _decode(self, rows: Rows) -> Rows:
        ids = (rows @ self._head.T).argmax(axis=1, keepdims=True) / VOCABULARY
        made: Rows = np.concatenate([rows[:, :2] / SCALE, ids], axis=1).astype(np.float32)
        return made.reshape(-1)


def make_pipeline(**changes: Any) -> Pipeline:
    config = ar_config(processor=HiddenStates(prompt=False), **changes)
    return Pipeline(ar=config, decoder=DecoderStageConfig(build=HiddenDecoder))


async def heard(pipeline: Pipeline, prompt: Sequence[int], **sampling: Any) -> np.ndarray:
    """A request's samples, [rows, 3]."""
    async with pipeline.submit(prompt, sampling={**GREEDY, **sampling}) as stream:
        pcm = [chunk.pcm async for chunk in stream]
    return np.concatenate(pcm).reshape(-1, 3)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def spoken() -> AsyncIterator[Pipeline]:
    args = {**ENGINE_ARGS, "enable_chunked_prefill": True, "max_num_batched_tokens": 32}
    async with make_pipeline(engine_args=args) as pipeline:
        yield pipeline


async def test_each_row_is_decoded_once_and_in_order(spoken: Pipeline) -> None:
    asked = [[1, 4, *(68 + (i * 11 + k) % 100 for k in range(20 * i)), 3] for i in range(5)]
    made = await asyncio.gather(*(heard(spoken, p, max_tokens=40) for p in asked))
    for prompt, samples in zip(asked, made, strict=True):
        reference = await generate(spoken, prompt, max_tokens=40, **GREEDY)
        ids = np.rint(samples[:, 2] * VOCABULARY).astype(int).tolist()
        assert ids == list(reference.token_ids)
    await wait_until_idle(spoken)


async def test_rows_in_bfloat16_are_those_that_a_subscriber_gets() -> None:
    async with (
        make_pipeline(engine_args={**ENGINE_ARGS, "dtype": "bfloat16"}) as pipeline,
        subscribe(pipeline.endpoints, subscriber="reader") as updates,
    ):
        sampling = {**GREEDY, "max_tokens": 30}
        async with pipeline.submit(PROMPT, sampling=sampling, subscribers=["reader"]) as stream:
            pcm = np.concatenate([chunk.pcm async for chunk in stream]).reshape(-1, 3)
        taken: list[np.ndarray] = []
        async for update in updates:
            for rows in update.tensors.values():
                assert rows.dtype == "bfloat16"
                assert rows.first_row == len(PROMPT) - 1 + sum(map(len, taken))
                taken.append(numbers(rows))
            if update.terminal is not None:
                break
    values = np.concatenate(taken)
    assert len(values) == len(pcm) == 30
    np.testing.assert_array_equal(pcm[:, :2], (values[:, :2] / SCALE).astype(np.float32))


async def test_a_pipeline_whose_ar_stage_gives_no_rows_does_not_start() -> None:
    config = ar_config(processor=TokenUpdates())
    pipeline = Pipeline(ar=config, decoder=DecoderStageConfig(build=HiddenDecoder))
    with pytest.raises(ConfigError, match="takes rows of 'hidden', stage 'ar' gives none"):
        async with pipeline:
            pass

"""The talker on real vLLM: its structure enforced in every batch, the audio that of its ids."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from omnistage import Pipeline, StageInput, TokenUpdates, subscribe
from omnistage.models import load_preset
from omnistage.models.talker.layout import read_layout
from omnistage.models.talker.preset import TALKER, TalkerInput
from tests.e2e.test_uses import updates_of
from tests.models.talker.test_forcing import allowed

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LAYOUT = read_layout()
TEXTS = [
    "Hello world.",
    "The kettle is boiling.",
    "No.",
    "Please close the window before it starts to rain.",
    "Twenty-three people, two dogs and a cat.",
    "What time is it?",
    "We left at half past nine.",
    "Thanks!",
]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def talker() -> AsyncIterator[Pipeline]:
    """The preset with every id passed on, and so few KV blocks that requests are preempted."""
    few: dict[str, Any] = {
        "num_gpu_blocks_override": 24,
        "block_size": 32,
        "kv_cache_memory_bytes": None,
        "enable_prefix_caching": False,
        "max_model_len": 640,
        "max_num_batched_tokens": 640,
    }
    ar, _ = load_preset("talker", start_method="fork", engine_args=few)
    async with Pipeline(ar=dataclasses.replace(ar, processor=TokenUpdates()), decoder=None) as p:
        yield p


async def ids_of(pipeline: Pipeline, text: str, **sampling: Any) -> list[int]:
    async with subscribe(pipeline.endpoints) as updates:
        stream = pipeline.submit(text, sampling=sampling, subscribers=["tokens"])
        waiting = asyncio.create_task(updates_of(updates, stream.request_id))
        await stream.finished()
        return [i for update in await waiting for i in update.ids]


@pytest.mark.parametrize("temperature", [0.3, 1.5])
async def test_every_output_has_the_prompts_markers_in_order_and_one_end(
    talker: Pipeline, temperature: float
) -> None:
    """A temperature of 1.5 makes free sampling lose its way at once."""
    outputs = await asyncio.gather(
        *(
            ids_of(talker, text, temperature=temperature, top_p=1.0, max_tokens=560)
            for text in TEXTS * 2
        )
    )
    adapter = TalkerInput(TALKER)
    for text, output in zip(TEXTS * 2, outputs, strict=True):
        prompt = (await adapter.adapt(StageInput(prompt=text))).prompt
        assert isinstance(prompt, list)
        units = prompt[1:-1]
        for position, token in enumerate(output):
            assert token in allowed(units, output[:position]), (text, position)
        assert output[-1] == LAYOUT.eos
        assert [i for i in output if LAYOUT.first_word <= i < LAYOUT.first_code] == units


@pytest.mark.slow
async def test_16_texts_at_once_sound_as_each_alone_where_their_ids_are_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In bfloat16 a batch of another shape may round to another id; that is counted, not judged."""
    texts = [
        *TEXTS,
        *(f"Here comes number {word}." for word in ["one", "two", "five", "nine", "ten"]),
    ]
    texts += ["Good morning.", "The soup is cold.", "Mind the step."]
    assert len(texts) == 16

    async with Pipeline.from_preset("talker", start_method="fork") as pipeline:

        async def say(text: str) -> tuple[list[int], Any]:
            async with subscribe(pipeline.endpoints, subscriber="decoder") as updates:
                stream = pipeline.submit(text, sampling={"temperature": 0.0}, seed=5)
                waiting = asyncio.create_task(updates_of(updates, stream.request_id))
                speech = await stream.collect()
                return [i for update in await waiting for i in update.ids], speech.pcm

        alone = [await say(text) for text in texts]
        together = await asyncio.gather(*map(say, texts))
    same = 0
    for (frames, pcm), (others, other) in zip(alone, together, strict=True):
        if frames == others:
            same += 1
            np.testing.assert_allclose(other, pcm, atol=1e-4)
    with capsys.disabled():
        sys.stdout.write(f"\n{same} of 16 texts gave the same ids at once as alone\n")
    assert same >= 4

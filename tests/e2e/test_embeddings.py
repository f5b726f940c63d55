"""Embeddings as a prompt on real vLLM: what they give, what is refused, two AR stages in line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from omnistage import (
    DecoderStageConfig,
    HiddenStates,
    Pipeline,
    RequestRows,
    RowsInput,
    subscribe,
)
from omnistage.errors import InvalidRequest
from tests.e2e.conftest import (
    CHECKPOINT,
    ENGINE_ARGS,
    PROMPT,
    IdDecoder,
    ar_config,
    generate,
    ids_of,
    wait_until_idle,
)
from tests.e2e.inside import llm_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SIZE = 256
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
TAKES_EMBEDDINGS = {**ENGINE_ARGS, "enable_prompt_embeds": True, "max_model_len": 128}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def second() -> AsyncIterator[Pipeline]:
    """A stage whose prompts are embeddings, with a decoder behind it."""
    config = ar_config(engine_args=TAKES_EMBEDDINGS, name="second", input_adapter=RowsInput())
    decoder = DecoderStageConfig(build=IdDecoder)
    async with Pipeline(ar=config, decoder=decoder) as pipeline:
        yield pipeline


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def first(second: Pipeline) -> AsyncIterator[Pipeline]:
    """A stage whose rows a subscriber gets."""
    async with Pipeline(ar=ar_config(processor=HiddenStates()), decoder=None) as pipeline:
        yield pipeline


async def spoken(pipeline: Pipeline, rows: Any, **sampling: Any) -> tuple[list[int], Any]:
    """The ids of a request, read from its audio, and its usage."""
    async with pipeline.submit(rows, sampling={**GREEDY, **sampling}) as stream:
        return ids_of([chunk async for chunk in stream]), stream


async def directly(pipeline: Pipeline, rows: torch.Tensor) -> list[int]:
    """The ids that vLLM alone samples behind these embeddings."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(detokenize=False, **GREEDY)
    ids: list[int] = []
    async for output in llm_of(pipeline).generate({"prompt_embeds": rows}, params, "reference"):
        ids = list(output.outputs[0].token_ids)
    return ids


async def test_rows_of_one_stage_are_the_prompt_of_the_next(
    first: Pipeline, second: Pipeline
) -> None:
    rows = RequestRows()
    async with subscribe(first.endpoints, subscriber="next") as updates:
        sampling = {**GREEDY, "max_tokens": 40}
        stream = first.submit(PROMPT, sampling=sampling, subscribers=["next"])
        await stream.finished()
        async for update in updates:
            if rows.take(update):
                break
    assert len(rows) == len(PROMPT) + 40 - 1
    joined = rows.joined()
    ids, spoken_by = await spoken(second, joined)
    assert len(ids) == 24
    assert spoken_by.usage.prompt_tokens == len(rows)
    values = np.frombuffer(joined.data, np.float32).reshape(joined.shape)
    assert ids == await directly(second, torch.from_numpy(values.copy()))
    # The answer alone, from the row that the first id was sampled from.
    answer, _ = await spoken(second, rows.joined(len(PROMPT) - 1))
    assert answer == await directly(second, torch.from_numpy(values[len(PROMPT) - 1 :].copy()))
    assert answer != ids
    await wait_until_idle(first)
    await wait_until_idle(second)


async def test_embeddings_of_ids_give_what_the_ids_give(second: Pipeline, first: Pipeline) -> None:
    rows = embeddings(PROMPT)
    reference = await generate(first, PROMPT, **GREEDY)
    expected = list(reference.token_ids)
    for given in (rows, torch.from_numpy(rows), rows.astype(np.float64), rows.T.copy().T):
        ids, _ = await spoken(second, given)
        assert ids == expected
    # The model's weights are bfloat16: nothing is lost.
    halves, _ = await spoken(second, torch.from_numpy(rows).bfloat16())
    assert halves == expected


def embeddings(ids: list[int]) -> np.ndarray:
    """The model's embeddings of ids, [ids, hidden size]."""
    from safetensors import safe_open

    (file,) = CHECKPOINT.glob("*.safetensors")
    with safe_open(str(file), "pt") as tensors:
        weights: torch.Tensor = tensors.get_tensor("model.embed_tokens.weight")
    rows: np.ndarray = weights[ids].float().numpy()
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((3, 255), np.float32), "have 255 numbers a position, the model's 256"),
        (np.zeros((128, SIZE), np.float32), "has 128 positions; with one sampled id at most 128"),
        (np.full((3, SIZE), 1e300), "exceed what torch.float32 holds"),
        ([1, 2], "prompts are rows of embeddings"),
    ],
)
async def test_embeddings_that_do_not_suit_the_model_are_refused(
    second: Pipeline, rows: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        await spoken(second, rows)
    assert raised.value.parameter == "prompt"
    assert len((await spoken(second, np.zeros((127, SIZE), np.float32), max_tokens=1))[0]) == 1
    await wait_until_idle(second)


async def test_an_engine_that_takes_no_embeddings_says_how_it_would(first: Pipeline) -> None:
    with pytest.raises(InvalidRequest, match="enable_prompt_embeds=True") as raised:
        await first.submit(np.zeros((3, SIZE), np.float32)).finished()
    assert raised.value.parameter == "prompt"
    assert (await first.submit(PROMPT, sampling=GREEDY).finished()).output_tokens == 24

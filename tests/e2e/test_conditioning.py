"""Conditioning on real vLLM: each request's own tensors reach its model, and nobody else's.

The model adds ``voice`` to the embeddings of a request's first two positions, and says in a row a
step which one it has. The KV cache holds two and a half requests; a step has four tokens, so that
beside three that decode a prefill's first two positions are in different steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch

from omnistage import ARStageConfig, HiddenStates, Pipeline, subscribe
from omnistage.core import engine as module
from omnistage.errors import InvalidRequest
from tests.e2e.conftest import PROMPT, ar_config, generate, wait_until_idle
from tests.e2e.engines import WAYS, make_llm, workers_have_forgotten
from tests.omni_models.checkpoint import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

CRAMPED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 4,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
    "disable_log_stats": False,
}


class Got(NamedTuple):
    """What came of a request: its ids, and for each of them which voice its model had.

    ``rows`` says how many rows each update brought.
    """

    ids: list[int]
    voices: list[int]
    rows: list[int]


class Voices:
    """A pipeline whose requests have voices, and a subscriber that reads what they say."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._got: dict[str, Got] = {}
        self._ended: dict[str, asyncio.Event] = {}

    async def read(self, updates: Any) -> None:
        async for update in updates:
            got = self._got.setdefault(update.request_id, Got([], [], []))
            got.ids.extend(update.ids)
            if "voices" in update.tensors:
                got.voices.extend(np.frombuffer(update.tensors["voices"].data, np.int64).tolist())
            if "codes" in update.tensors:
                got.rows.append(update.tensors["codes"].shape[0])
            if update.terminal is not None:
                self.end(update.request_id).set()

    async def all_decode(self, count: int) -> None:
        """Return when so many requests have ids and no end."""
        async with asyncio.timeout(10):
            while (
                sum(bool(g.ids) and not self.end(i).is_set() for i, g in self._got.items()) < count
            ):
                await asyncio.sleep(0.001)

    def end(self, request_id: str) -> asyncio.Event:
        return self._ended.setdefault(request_id, asyncio.Event())

    async def say(self, voice: Any, i: int = 0, tokens: int = 20, length: int = 54) -> Got:
        stream = self.pipeline.submit(
            prompt(i, length),
            conditioning=None if voice is None else {"voice": voice},
            sampling={"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens},
            subscribers=["reader"],
        )
        await stream.finished()
        async with asyncio.timeout(20):
            await self.end(stream.request_id).wait()
        return self._got[stream.request_id]


def prompt(i: int = 0, length: int = 54) -> list[int]:
    return [1, 4, *(68 + (i * 11 + k) % 100 for k in range(length - 3)), 3]


def voice(number: int) -> np.ndarray:
    """One whose first element says which it is."""
    made = np.random.default_rng(number).normal(0, 0.5, 256).astype(np.float32)
    made[0] = number / 1000
    return made


@pytest_asyncio.fixture(loop_scope="session", scope="module", params=WAYS)
async def voices(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Voices]:
    model = checkpoint(tmp_path_factory.mktemp("models"), "OmniConditioned")
    config = ARStageConfig(model=model, processor=HiddenStates())
    llm = make_llm(config, *WAYS[request.param], **CRAMPED)
    try:
        async with (
            Pipeline(ar=config, decoder=None, llm=llm) as pipeline,
            subscribe(pipeline.endpoints, subscriber="reader") as updates,
        ):
            made = Voices(pipeline)
            reading = asyncio.create_task(made.read(updates))
            yield made
            await updates.aclose()
            await reading
    finally:
        llm.shutdown()


async def test_requests_at_once_have_each_its_own_voice(voices: Voices) -> None:
    alone = [await voices.say(v) for v in (voice(100), voice(200), None)]
    assert [set(got.voices) for got in alone] == [{100}, {200}, {-1}]
    assert len({tuple(got.ids) for got in alone}) == 3
    plain = await generate(voices.pipeline, prompt(), max_tokens=20, temperature=0, ignore_eos=True)
    assert alone[2].ids == list(plain.token_ids)
    together = await asyncio.gather(*(voices.say(v) for v in (voice(100), voice(200), None)))
    assert [got[:2] for got in together] == [got[:2] for got in alone]
    as_torch = torch.from_numpy(voice(100))
    assert await voices.say(as_torch) == alone[0]
    await workers_have_forgotten(voices.pipeline)


async def test_a_dtype_that_numpy_has_not_reaches_the_model_exactly(voices: Voices) -> None:
    halves = torch.from_numpy(voice(100)).bfloat16()
    got = await voices.say(halves)
    assert got.ids == (await voices.say(halves.float().numpy())).ids
    assert set(got.voices) == {100}


async def test_the_conditioned_positions_may_come_in_different_steps(voices: Voices) -> None:
    alone = await voices.say(voice(100), i=1, tokens=10)
    # Three that decode leave one token a step for the fourth's prefill.
    others = [asyncio.ensure_future(voices.say(voice(n), i=n, tokens=80, length=5)) for n in (1, 2)]
    others.append(asyncio.ensure_future(voices.say(None, i=3, tokens=80, length=5)))
    await voices.all_decode(3)
    got = await voices.say(voice(100), i=1, tokens=10)
    assert got[:2] == alone[:2]
    assert got.rows[:2] == [1, 1]
    assert [set(got.voices) for got in await asyncio.gather(*others)] == [{1}, {2}, {-1}]


async def test_preempted_and_resumed_requests_keep_their_voices(voices: Voices) -> None:
    from prometheus_client import REGISTRY

    def preempted() -> float:
        samples = [s for m in REGISTRY.collect() for s in m.samples]
        return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")

    asked = [voice(100), voice(200), None, voice(300)]
    alone = [await voices.say(v, i=i, tokens=60) for i, v in enumerate(asked)]
    before = preempted()
    together = await asyncio.gather(*(voices.say(v, i=i, tokens=60) for i, v in enumerate(asked)))
    assert preempted() > before
    assert [got[:2] for got in together] == [got[:2] for got in alone]
    await workers_have_forgotten(voices.pipeline)


async def test_only_requests_of_equal_conditioning_share_the_prefix_cache(
    voices: Voices, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[Any] = []
    usage = module._usage

    def note(output: Any) -> Any:
        outputs.append(output)
        return usage(output)

    monkeypatch.setattr(module, "_usage", note)

    async def cached(given: Any) -> tuple[int, tuple[int, ...]]:
        """Tokens that came from the cache, and the ids; without a consumer, who wants all rows."""
        stream = voices.pipeline.submit(
            prompt(7, 70),
            conditioning=given,
            sampling={"temperature": 0.0, "ignore_eos": True, "max_tokens": 5},
        )
        await stream.finished()
        return outputs[-1].num_cached_tokens, tuple(outputs[-1].outputs[0].token_ids)

    await wait_until_idle(voices.pipeline)  # and empties the cache
    first, second = {"voice": voice(100)}, {"voice": voice(200)}
    made = [await cached(given) for given in (first, None, second)]
    assert [count for count, _ in made] == [0, 0, 0]
    assert len({ids for _, ids in made}) == 3
    again = [await cached(given) for given in (None, second, first)]
    assert again == [(64, made[1][1]), (64, made[2][1]), (64, made[0][1])]
    other_name = await cached({"other": voice(100)})
    assert other_name == (0, made[1][1])


async def test_a_conditioned_request_that_is_aborted_is_forgotten(voices: Voices) -> None:
    stream = voices.pipeline.submit(
        prompt(2), conditioning={"voice": voice(100)}, sampling={"max_tokens": 150}
    )
    running = asyncio.ensure_future(stream.finished())
    await asyncio.sleep(0.1)
    await stream.abort()
    await asyncio.gather(running, return_exceptions=True)
    await workers_have_forgotten(voices.pipeline)
    await wait_until_idle(voices.pipeline)


async def test_a_model_without_the_hook_takes_no_conditioning() -> None:
    async with Pipeline(ar=ar_config(), decoder=None) as pipeline:
        with pytest.raises(InvalidRequest, match=r"no conditioning.* leave voice out") as raised:
            await pipeline.submit(PROMPT, conditioning={"voice": voice(1)}).finished()
        assert raised.value.parameter == "conditioning"
        assert (await pipeline.submit(PROMPT, sampling={"max_tokens": 3}).finished()).output_tokens
        await wait_until_idle(pipeline)

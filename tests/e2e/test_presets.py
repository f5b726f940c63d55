"""Every preset on real vLLM, with a small checkpoint of its family in the published format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

from omnistage import Pipeline
from omnistage.models import load_preset
from omnistage.models.prompt import PromptInput
from omnistage.request import Codes, FinishReason, Pcm, Usage
from tests.conftest import Checkpoints
from tests.e2e.conftest import generate, wait_until_idle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(120),
]

TEXT = "Hello there, how do you do?"
ARGS: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_num_seqs": 16}


class Running(NamedTuple):
    """A preset's pipeline, and what by hand would be its parts."""

    pipeline: Pipeline
    adapter: PromptInput
    codec: Path


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two recorded voices."""
    where = tmp_path_factory.mktemp("voices")
    for seed, name in enumerate(("dave", "jo")):
        (where / f"{name}.txt").write_text(f"My name is {name}.")
        np.save(where / f"{name}.npy", np.random.default_rng(seed).integers(0, 65_536, 30))
    return str(where)


async def run(
    checkpoints: Checkpoints, family: str, codec: str, **changes: Any
) -> AsyncIterator[Running]:
    """The pipeline of a family's checkpoint, which is recognized by its tokens."""
    where = str(checkpoints(family))
    weights = checkpoints(codec)
    changes |= {
        "decoder": {"model": str(weights)},
        "engine_args": ARGS,
        "start_method": "fork",
    }
    adapter = load_preset(where, **changes)[0].input_adapter
    assert isinstance(adapter, PromptInput)
    await adapter.start()
    async with Pipeline.from_preset(where, **changes) as pipeline:
        yield Running(pipeline, adapter, weights)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def orpheus(checkpoints: Checkpoints) -> AsyncIterator[Running]:
    """Orpheus and SNAC."""
    async for running in run(checkpoints, "orpheus", "snac"):
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def llasa(checkpoints: Checkpoints, voices: str) -> AsyncIterator[Running]:
    """Llasa and XCodec2."""
    async for running in run(checkpoints, "llasa", "xcodec2", voice_directory=voices):
        yield running


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def neutts(checkpoints: Checkpoints, voices: str) -> AsyncIterator[Running]:
    """NeuTTS and NeuCodec."""
    async for running in run(checkpoints, "neutts", "neucodec", voice_directory=voices):
        yield running


async def speak(pipeline: Pipeline, text: str = TEXT, **options: Any) -> tuple[list[Pcm], Usage]:
    """The chunks of a request."""
    async with pipeline.submit(text, **options) as stream:
        chunks = [chunk.pcm async for chunk in stream]
    return chunks, await stream.finished()


async def sampled(running: Running, text: str, voice: str | None, **sampling: Any) -> list[int]:
    """The ids that vLLM alone samples for the same prompt."""
    prompt = running.adapter.ids(text, voice)
    output = await generate(running.pipeline, prompt, **{**running.adapter.sampling, **sampling})
    return list(output.token_ids)


def orpheus_frames(ids: Sequence[int]) -> Codes:
    """Frames by the rule of Orpheus, written down again."""
    frames: list[list[int]] = []
    frame: list[int] = []
    for token in ids:
        index = token - 128_266 - 4096 * len(frame)
        if not 0 <= index < 4096:
            frame, index = [], token - 128_266
            if not 0 <= index < 4096:
                continue
        frame.append(index)
        if len(frame) == 7:
            frames.append(frame)
            frame = []
    return np.array(frames, np.int64).reshape(-1, 7)


def snac_clip(weights: Path, frames: Codes) -> Pcm:
    """What the snac package makes of frames in one piece, its noise silenced."""
    import torch
    from snac import SNAC
    from snac.layers import NoiseBlock

    model = SNAC.from_pretrained(str(weights))
    for module in model.modules():
        if isinstance(module, NoiseBlock):
            module.forward = lambda x: x
    tree = [frames[:, [0]], frames[:, [1, 4]], frames[:, [2, 3, 5, 6]]]
    with torch.inference_mode():
        audio = model.decode([torch.from_numpy(level.reshape(1, -1)) for level in tree])
    pcm: Pcm = np.asarray(audio)[0, 0]
    return np.clip(pcm, -1, 1)


class TestOrpheus:
    async def test_streamed_audio_is_the_offline_decode_of_the_same_ids(
        self, orpheus: Running
    ) -> None:
        chunks, usage = await speak(
            orpheus.pipeline, voice="leo", seed=3, sampling={"max_tokens": 100}
        )
        ids = await sampled(orpheus, TEXT, "leo", seed=3, max_tokens=100)
        frames = orpheus_frames(ids)
        assert len(frames) == 14
        assert usage.dropped_tokens == 2
        assert [len(pcm) // 2048 for pcm in chunks] == [2, 3, 4, 5]
        pcm = np.concatenate(chunks)
        assert len(pcm) == len(frames) * 2048
        np.testing.assert_allclose(pcm, snac_clip(orpheus.codec, frames), atol=1e-5)

    async def test_the_last_frames_are_not_lost_at_the_models_own_end(
        self, orpheus: Running
    ) -> None:
        # A client that decodes windows of four frames and keeps one loses the tail.
        sure = {"logit_bias": {128_258: 4.0}}
        for seed in range(3):
            chunks, usage = await speak(orpheus.pipeline, seed=seed, sampling=sure)
            ids = await sampled(orpheus, TEXT, None, seed=seed, **sure)
            assert usage.finish_reason is FinishReason.STOP
            assert ids[-1] == 128_258
            assert usage.output_tokens == len(ids) < 1200
            assert usage.dropped_tokens == 1
            assert sum(map(len, chunks)) == len(ids) // 7 * 2048

    async def test_an_end_at_once_is_empty_audio(self, orpheus: Running) -> None:
        chunks, usage = await speak(
            orpheus.pipeline, sampling={"allowed_token_ids": [128_258], "temperature": 0.0}
        )
        assert chunks == []
        assert usage.output_tokens == 1

    async def test_an_id_of_another_slot_costs_its_frame_and_no_other(
        self, orpheus: Running
    ) -> None:
        # One slot's ids are forbidden now and then by chance of the bias: strays come of it.
        stray = {128_266 + 4096 * 3 + i: 40.0 for i in range(0, 4096, 64)}
        sampling = {"logit_bias": stray, "max_tokens": 60, "temperature": 1.0}
        chunks, usage = await speak(orpheus.pipeline, seed=1, sampling=sampling)
        ids = await sampled(orpheus, TEXT, None, seed=1, **sampling)
        frames = orpheus_frames(ids)
        assert sum(map(len, chunks)) == len(frames) * 2048
        assert usage.dropped_tokens == len(ids) - 7 * len(frames) > 0

    async def test_16_voices_at_once_are_each_as_alone(self, orpheus: Running) -> None:
        voices = ["tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe"]
        asked: list[dict[str, Any]] = [
            {"text": text, "voice": voice, "seed": seed, "sampling": {"max_tokens": 15 + seed % 8}}
            for seed, (text, voice) in enumerate(
                (text, voice) for text in (TEXT, "Not at all.") for voice in voices
            )
        ]
        alone = [np.concatenate((await speak(orpheus.pipeline, **a))[0]) for a in asked]
        together = await asyncio.gather(*(speak(orpheus.pipeline, **a) for a in asked))
        for pcm, (chunks, usage), request in zip(alone, together, asked, strict=True):
            np.testing.assert_allclose(np.concatenate(chunks), pcm, atol=1e-5)
            assert usage.output_tokens <= request["sampling"]["max_tokens"]
        assert len({pcm[:2048].tobytes() for pcm in alone}) == len(asked)
        await wait_until_idle(orpheus.pipeline)

    async def test_a_long_text_is_one_stream_of_its_sentences(self, orpheus: Running) -> None:
        sentence = "This sentence has some forty characters. "
        text = sentence * 8
        few: dict[str, Any] = {"sampling": {"max_tokens": 29}, "seed": 2}
        chunks, usage = await speak(orpheus.pipeline, text, by_sentence=True, **few)
        one, alone = await speak(orpheus.pipeline, sentence, **few)
        np.testing.assert_allclose(
            np.concatenate(chunks), np.tile(np.concatenate(one), 8), atol=1e-5
        )
        assert usage.output_tokens == 8 * alone.output_tokens


@pytest.mark.parametrize(
    ("family", "hop", "voice", "first_code"),
    [("llasa", 320, "jo", 128_264), ("llasa", 320, None, 128_264), ("neutts", 480, "jo", 151_652)],
)
async def test_flat_talkers_say_a_frame_for_every_code(
    request: pytest.FixtureRequest,
    llasa: Running,
    neutts: Running,
    family: str,
    hop: int,
    voice: str | None,
    first_code: int,
) -> None:
    running = {"llasa": llasa, "neutts": neutts}[family]
    chunks, usage = await speak(running.pipeline, voice=voice, seed=5, sampling={"max_tokens": 120})
    ids = await sampled(running, TEXT, voice, seed=5, max_tokens=120)
    codes = np.array([i - first_code for i in ids if i >= first_code])[:, None]
    assert usage.output_tokens == len(ids) == len(codes) + usage.dropped_tokens
    pcm = np.concatenate(chunks)
    assert len(pcm) == len(codes) * hop
    whole = np.clip(clip(family, running.codec, codes), -1, 1)
    assert len(whole) == len(pcm)
    # Full attention: chunks only approximate the clip (docs/decoders.md).
    deviation = np.sqrt(np.mean((pcm - whole) ** 2) / np.mean(whole**2))
    assert deviation < 0.35
    np.testing.assert_allclose(
        (await speak(running.pipeline, voice=voice, seed=5, sampling={"max_tokens": 120}))[0][0],
        chunks[0],
        atol=1e-5,
    )


def clip(family: str, weights: Path, codes: Codes) -> Pcm:
    """What transformers makes of codes in one piece."""
    import torch
    import transformers

    kind: Any = {"llasa": transformers.Xcodec2Model, "neutts": transformers.NeuCodecModel}[family]
    model = kind.from_pretrained(str(weights)).eval()
    with torch.inference_mode():
        audio = model.decode(audio_codes=torch.from_numpy(codes.T[None])).audio_values
    return np.asarray(audio.float()).reshape(-1)

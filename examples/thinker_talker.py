"""A thinker that answers in text, and a talker that says it: two models in one pipeline.

The models are made here, tiny and with random weights, so that it runs without a download: what
they write and say means nothing. With models of yours, give their directories to the two stages.

Run it as ``python examples/thinker_talker.py [FOLDER]``; the models and answer.wav go to FOLDER, or
to this one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage import (
    ARStageConfig,
    CodecFrames,
    DecoderStageConfig,
    HiddenStates,
    Pipeline,
    RowsInput,
)
from omnistage.speech import save_wav

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage import Stream
    from omnistage.request import Codes, Pcm

WIDTH = 64  # of both models' hidden states
LETTERS = 94  # ids of the thinker's that are one letter
CODES = 128  # the talker's first ids
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 2**26,
}


def make_model(folder: Path, seed: int) -> str:
    """A tiny model whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(folder)


class Tones:
    """Each code is 20 ms of a tone."""

    sample_rate = 16_000
    hop_length = 320
    codebooks = 1
    codebook_size = CODES
    left_context = right_context = 0
    deterministic = True

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        """Decode each window."""
        time = np.arange(self.hop_length) / self.sample_rate
        return [
            np.sin(2 * np.pi * (200 + 5 * window) * time).astype(np.float32).ravel() / 4
            for window in windows
        ]


def project(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The thinker's rows as embeddings of the talker's, which a trained layer would make."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def joined(folder: Path) -> Pipeline:
    """The pipeline."""
    return Pipeline(
        thinker=ARStageConfig(
            model=make_model(folder / "thinker", seed=1),
            name="thinker",
            processor=HiddenStates(),  # its rows leave vLLM beside its ids
            engine_args=ENGINE,
        ),
        ar=ARStageConfig(
            model=make_model(folder / "talker", seed=2),
            name="talker",
            processor=CodecFrames(first_id=0, codebook_size=CODES),
            input_adapter=RowsInput(project=project, sampling={"max_tokens": 60}),
            engine_args={**ENGINE, "enable_prompt_embeds": True, "skip_tokenizer_init": True},
        ),
        decoder=DecoderStageConfig(build=Tones),
    )


async def write(stream: Stream) -> None:
    """Show the text as it comes, beside the audio."""
    async for piece in stream.text:
        print(piece, end="", flush=True)
    print()


async def main(folder: Path) -> None:
    """Ask for text and audio, then for text alone."""
    answer = {"max_tokens": 40, "allowed_token_ids": list(range(LETTERS))}
    async with joined(folder) as pipeline:
        async with pipeline.submit("How are you?", sampling=answer) as stream:
            writing = asyncio.create_task(write(stream))
            pieces = [chunk.pcm async for chunk in stream]
            await writing
        save_wav(folder / "answer.wav", np.concatenate(pieces), pipeline.sample_rate)
        usage = await stream.finished()
        print(f"text and audio: {usage.output_tokens} tokens of the talker's")

        alone = pipeline.submit("And now?", sampling=answer, modalities=("text",))
        usage = await alone.finished()  # the talker hears nothing of it
        print(f"text alone: {usage.text}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))

"""A thinker and a talker: an answer that is written and spoken at the same time.

    python examples/thinker_talker.py answer.wav

It needs omnistage[talker]. The thinker is made here, so that nothing is downloaded: it knows two
answers by heart. The talker is the embedded voice, which was not trained on a thinker's rows: what
stands between them here reads the words in the rows, where a trained pair has a projection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage import ARStageConfig, HiddenStates, Pipeline, RowsInput
from omnistage.models import load_preset
from omnistage.models.talker.layout import CHECKPOINT, read_layout
from omnistage.models.talker.preset import TALKER
from omnistage.models.talker.text import TextStep

if TYPE_CHECKING:
    from omnistage import Stream

ANSWERS = {
    "hello": "good morning and welcome to this little program",
    "weather": "it will rain until noon but then the sky clears",
}
WORDS = [
    "<end>",
    "<other>",
    *ANSWERS,
    *(word for said in ANSWERS.values() for word in said.split()),
]
SIZE = 64  # of its hidden states; each word is a direction of its own


def make_thinker(directory: Path) -> None:
    """Write a checkpoint of Qwen3's shape that goes from each word to the one that follows it."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    following = dict.fromkeys(range(len(WORDS)), 0)
    for question, said in ANSWERS.items():
        chain = [WORDS.index(word) for word in (question, *said.split())]
        following.update(pairwise(chain))
    words = np.eye(len(WORDS), SIZE, dtype=np.float32)
    head = np.zeros_like(words)
    for word, then in following.items():
        head[then] += words[word]
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": words,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(SIZE, np.float32),
        # Attention and feed-forward add nothing.
        **{f"{layer}self_attn.{p}_proj.weight": np.zeros((SIZE, SIZE), np.float32) for p in "qkvo"},
        **{f"{layer}self_attn.{p}_norm.weight": np.ones(SIZE, np.float32) for p in "qk"},
        **{
            f"{layer}mlp.{p}_proj.weight": np.zeros((SIZE, SIZE), np.float32)
            for p in ("gate", "up", "down")
        },
        f"{layer}input_layernorm.weight": np.ones(SIZE, np.float32),
        f"{layer}post_attention_layernorm.weight": np.ones(SIZE, np.float32),
    }
    save_file(weights, directory / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(WORDS),
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": SIZE,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<other>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("removed"), pre_tokenizers.Whitespace()]
    )
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))


class WordsOfRows:
    """From the thinker's rows, [rows, 64], to the talker's embeddings, [positions, 256]."""

    def __init__(self) -> None:
        self._text = TextStep(read_layout(CHECKPOINT))
        self._table: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def __call__(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Read the words, and embed how they sound."""
        if self._table is None:
            from safetensors.torch import load_file

            weights = load_file(CHECKPOINT / "model.safetensors")
            self._table = weights["model.embed_tokens.weight"].float().numpy()
        read = [WORDS[i] for i in rows[:, : len(WORDS)].argmax(axis=1)]
        said = " ".join(read[1:])  # the first row is that of the question's last word
        return self._table[self._text.prompt_ids(f"{said}.")]


async def write(stream: Stream) -> None:
    """Print the answer as it is written."""
    async for piece in stream.text:
        print(piece, end="", flush=True)
    print()


async def main(path: str) -> None:
    """Ask for an answer in text and audio, and for one in text alone."""
    voice, decoder = load_preset("talker")
    engine_args = {**voice.engine_args, "enable_prompt_embeds": True}
    del engine_args["logits_processors"]  # it reads the prompt's ids, and embeddings have none
    talker = dataclasses.replace(
        voice,
        name="talker",
        input_adapter=RowsInput(project=WordsOfRows(), sampling=TALKER.sampling),
        engine_args=engine_args,
    )
    with tempfile.TemporaryDirectory() as directory:
        await asyncio.to_thread(make_thinker, Path(directory))
        thinker = ARStageConfig(
            model=directory,
            name="thinker",
            processor=HiddenStates(prompt=False),  # the answer's rows alone
            engine_args={
                "dtype": "float32",
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "kv_cache_memory_bytes": 2**24,
            },
            start_method=voice.start_method,
        )
        async with Pipeline(thinker=thinker, ar=talker, decoder=decoder) as pipeline:
            greedy = {"temperature": 0.0}
            async with pipeline.submit("Oh, hello!", sampling=greedy, seed=1) as stream:
                _, speech = await asyncio.gather(write(stream), stream.collect())
            speech.save(path)
            print(f"{path}: {speech.seconds:.2f} s of audio, {speech.usage}")
            asked = pipeline.submit("The weather?", sampling=greedy, modalities=("text",))
            await write(asked)


# vLLM starts its processes by importing this file again, so nothing may run on import.
if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "answer.wav"))

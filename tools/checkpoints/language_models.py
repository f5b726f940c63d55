"""Speech LMs as they are published, shrunk: configuration, tokenizer and sharded weights.

The vocabularies are the real ones, so that every id is; the weights are random but for a few
directions that make the models say codes where codes are due, and stop in the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from pathlib import Path

_HIDDEN: Final = 64
_HEADS: Final = 2  # 32 wide, the least that vLLM runs on a CPU
_LAYERS: Final = 2
_INNER: Final = 128
_MARK: Final = 4.0  # in an embedding: which slot a code is of
_SHARPNESS: Final = 2.0  # of the last norm
# What Llama 3 and Qwen 2 cut text at before they merge bytes.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's checkpoints are published.

    Args:
        architecture: The model's class in transformers, which names its files' keys.
        vocab_size: Rows of the embedding.
        first_added: The id of the first token that is no piece of text.
        added: Names of the tokens from there on.
        specials: Which of them are special, by name.
        first_code: The name of code 0.
        slots: Ids a frame.
        codebook_size: Codes a slot.
        begin: The last token of a prompt.
        end: The token that ends the audio.
        bos: The tokenizer's first token, if it has one.
        eos: The model's own ends, as its configuration lists them.
        ends: How much more the end is said than a code, where a frame begins.
        dtype: Of the weights.
        config: What else its config.json has.
    """

    architecture: str
    vocab_size: int
    first_added: int
    added: list[str]
    specials: frozenset[str]
    first_code: str
    slots: int
    codebook_size: int
    begin: str
    end: str
    bos: str | None
    eos: int | list[int]
    ends: float = 1.08
    dtype: torch.dtype = torch.bfloat16
    config: dict[str, Any] = field(default_factory=dict)

    def id_of(self, name: str) -> int:
        """The id of an added token."""
        return self.first_added + self.added.index(name)


def _llama3_tokens() -> list[str]:
    reserved = iter(range(10_000))
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    return [
        named[i] if i in named else f"<|reserved_special_token_{next(reserved)}|>"
        for i in range(256)
    ]


_LLAMA3: Final = _llama3_tokens()
_LLAMA_CONFIG: Final = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128_000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
}

ORPHEUS: Final = Family(
    architecture="LlamaForCausalLM",
    vocab_size=156_940,
    first_added=128_000,
    added=[*_LLAMA3, *(f"<custom_token_{i}>" for i in range(28_684))],
    specials=frozenset(_LLAMA3),
    first_code="<custom_token_10>",
    slots=7,
    codebook_size=4096,
    begin="<custom_token_1>",
    end="<custom_token_2>",
    bos="<|begin_of_text|>",
    eos=[128_001, 128_008, 128_009],
    config=_LLAMA_CONFIG,
)

_LLASA_MARKS: Final = [
    f"<|{what}_{edge}|>"
    for what in ("TEXT_GENERATION", "TEXT_UNDERSTANDING", "SPEECH_GENERATION")
    for edge in ("START", "END")
] + ["<|SPEECH_UNDERSTANDING_START|>", "<|SPEECH_UNDERSTANDING_END|>"]

LLASA: Final = Family(
    architecture="LlamaForCausalLM",
    vocab_size=193_800,
    first_added=128_000,
    added=[*_LLAMA3, *_LLASA_MARKS, *(f"<|s_{i}|>" for i in range(65_536))],
    specials=frozenset(_LLAMA3),
    first_code="<|s_0|>",
    slots=1,
    codebook_size=65_536,
    begin="<|SPEECH_GENERATION_START|>",
    end="<|SPEECH_GENERATION_END|>",
    bos="<|begin_of_text|>",
    eos=[128_001, 128_008, 128_009],
    config=_LLAMA_CONFIG,
)

_QWEN: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NEUTTS_MARKS: Final = [
    "<|TEXT_REPLACE|>",
    "<|SPEECH_REPLACE|>",
    "<|TEXT_PROMPT_START|>",
    "<|TEXT_PROMPT_END|>",
    "<|SPEECH_GENERATION_START|>",
    "<|SPEECH_GENERATION_END|>",
]

NEUTTS: Final = Family(
    architecture="Qwen2ForCausalLM",
    vocab_size=217_216,
    first_added=151_643,
    added=[*_QWEN, *_NEUTTS_MARKS, *(f"<|speech_{i}|>" for i in range(65_536))],
    specials=frozenset(_QWEN),
    first_code="<|speech_0|>",
    slots=1,
    codebook_size=65_536,
    begin="<|SPEECH_GENERATION_START|>",
    end="<|SPEECH_GENERATION_END|>",
    bos=None,
    eos=151_645,
    config={
        "attention_dropout": 0.0,
        "bos_token_id": 151_643,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32_768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    },
)


def orpheus(directory: Path, *, seed: int = 0) -> Path:
    """A checkpoint in the format of ``canopylabs/orpheus-3b-0.1-ft``."""
    return _write(directory, ORPHEUS, seed)


def llasa(directory: Path, *, seed: int = 0) -> Path:
    """A checkpoint in the format of ``HKUSTAudio/Llasa-1B``."""
    return _write(directory, LLASA, seed)


def neutts(directory: Path, *, seed: int = 0) -> Path:
    """A checkpoint in the format of ``neuphonic/neutts-air``."""
    return _write(directory, NEUTTS, seed)


def _write(directory: Path, family: Family, seed: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    _write_config(directory, family)
    _write_tokenizer(directory, family)
    _write_weights(directory, family, seed)
    return directory


def _write_config(directory: Path, family: Family) -> None:
    config = {
        "architectures": [family.architecture],
        **family.config,
        "eos_token_id": family.eos,
        "head_dim": _HIDDEN // _HEADS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _HEADS // 2,
        "torch_dtype": str(family.dtype).removeprefix("torch."),
        "vocab_size": family.vocab_size,
    }
    _json(directory / "config.json", config)
    generation = {
        "bos_token_id": family.config["bos_token_id"],
        "do_sample": True,
        "eos_token_id": family.eos,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    _json(directory / "generation_config.json", generation)


def _write_tokenizer(directory: Path, family: Family) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The pieces of text that merges would make are there as ids only.
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab |= {f"\u0120piece{i}": i for i in range(len(letters), family.first_added)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(name, special=name in family.specials, normalized=False)
            for name in family.added
        ]
    )
    if family.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A",
            pair=f"{family.bos} $A {family.bos} $B",
            special_tokens=[(family.bos, family.id_of(family.bos))],
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": family.bos, "eos_token": family.added[0]}
    kind = "PreTrainedTokenizerFast" if family.bos else "Qwen2Tokenizer"
    _json(
        directory / "tokenizer_config.json",
        {**names, "model_max_length": 131_072, "tokenizer_class": kind},
    )
    _json(
        directory / "special_tokens_map.json",
        {name: token for name, token in names.items() if token},
    )


def _write_weights(directory: Path, family: Family, seed: int) -> None:
    """Two shards and their index; the head is the embedding, which is not stored twice.

    Dimension k of the hidden state says that an id is of slot k. The embedding of a code of slot k
    has it set; the last layer's MLP takes it away and sets the next slot's, and the head, which is
    the embedding, makes logits of that.
    """
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * scale

    # With one slot even and odd codes take turns, for a code would say itself again and again.
    slots = max(family.slots, 2)
    embedding = noise(family.vocab_size, _HIDDEN, scale=0.25)
    embedding[:, :slots] = 0
    codes = torch.arange(family.slots * family.codebook_size)
    of_slot = codes % 2 if family.slots == 1 else codes // family.codebook_size
    embedding[family.id_of(family.first_code) + codes, of_slot] = _MARK
    embedding[family.id_of(family.begin), slots - 1] = _MARK  # as if a frame had just ended
    # The end stands where slot 0 does, a little above a single code.
    embedding[family.id_of(family.end)] = 0
    embedding[family.id_of(family.end), 0] = _MARK * family.ends
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(_HIDDEN)}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        key_width = _HIDDEN // 2
        attention = noise(_HIDDEN, _HIDDEN, scale=0.03)
        attention[:slots] = 0  # what others said changes the code, not the slot
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{name}.self_attn.q_proj.weight": noise(_HIDDEN, _HIDDEN, scale=0.2),
            f"{name}.self_attn.k_proj.weight": noise(key_width, _HIDDEN, scale=0.2),
            f"{name}.self_attn.v_proj.weight": noise(key_width, _HIDDEN, scale=0.2),
            f"{name}.self_attn.o_proj.weight": attention,
        }
        gate = noise(_INNER, _HIDDEN, scale=0.1)
        up = noise(_INNER, _HIDDEN, scale=0.1)
        down = noise(_HIDDEN, _INNER, scale=0.02)
        down[:slots] = 0
        if layer == _LAYERS - 1:
            gate[:slots], up[:slots], down[:, :slots] = 0, 0, 0
            for slot in range(slots):
                gate[slot, slot] = up[slot, slot] = 0.5
                down[slot, slot] -= 0.3
                down[(slot + 1) % slots, slot] += 0.6
        weights |= {
            f"{name}.mlp.gate_proj.weight": gate,
            f"{name}.mlp.up_proj.weight": up,
            f"{name}.mlp.down_proj.weight": down,
        }
        if family.architecture == "Qwen2ForCausalLM":
            for part, width in (("q", _HIDDEN), ("k", key_width), ("v", key_width)):
                weights[f"{name}.self_attn.{part}_proj.bias"] = noise(width, scale=0.1)
    weights["model.norm.weight"] *= _SHARPNESS
    _shards(directory, {n: w.to(family.dtype).contiguous() for n, w in weights.items()})


def _shards(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    names = sorted(weights)
    halves = [names[:1], names[1:]]
    index: dict[str, str] = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05d}-of-{len(halves):05d}.safetensors"
        save_file({n: weights[n] for n in half}, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(half, file)
    size = sum(w.numel() * w.element_size() for w in weights.values())
    _json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": index},
    )


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

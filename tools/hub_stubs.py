"""Writes a hub cache of stubs: enough of each model that vLLM's scheduler tests name, no weights.

Configurations and a tokenizer of a few words, in the layout that offline loading reads.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Json = dict[str, Any]

REVISION = "0" * 40
SPECIAL = ("<unk>", "<s>", "</s>")
# Named in each configuration: without it vLLM asks the hub what the weights are, and waits.
DTYPE = "float16"


def write_stubs(home: Path) -> None:
    """Fills `home` (HF_HOME) with every stub."""
    for name, files in stubs().items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(REVISION)
        for file, content in files.items():
            (snapshot / file).write_text(json.dumps(content))


def stubs() -> dict[str, dict[str, Json]]:
    """The files of each model, by its name on the hub."""
    opt = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": DTYPE}
    return {
        "facebook/opt-125m": {"config.json": opt, **tokenizer(SPECIAL)},
        "facebook/opt-350m": {"config.json": opt, **tokenizer(SPECIAL)},
        "llava-hf/llava-1.5-7b-hf": llava(),
        "Qwen/Qwen2.5-VL-3B-Instruct": qwen_vl(),
    }


def llava() -> dict[str, Json]:
    """An image model whose images are 576 tokens each."""
    special = (*SPECIAL, "<image>")
    return {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "dtype": DTYPE,
            "image_token_index": special.index("<image>"),
            "image_seq_length": 576,
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
            },
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
        },
        **tokenizer(special),
    }


def qwen_vl() -> dict[str, Json]:
    """A model whose prompts mix text, images and video."""
    marks = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
    special = (*SPECIAL, *(f"<|{mark}|>" for mark in marks))
    first = len(SPECIAL)
    return {
        "config.json": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "dtype": DTYPE,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 128000,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_start_token_id": first,
            "vision_end_token_id": first + 1,
            "vision_token_id": first + 2,
            "image_token_id": first + 3,
            "video_token_id": first + 4,
            "vision_config": {"depth": 32, "out_hidden_size": 2048},
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
        },
        **tokenizer(special),
    }


def tokenizer(special: tuple[str, ...]) -> dict[str, Json]:
    """A tokenizer that knows its special tokens and one word."""
    vocabulary = {word: index for index, word in enumerate((*special, "word"))}
    added = [
        {
            "id": vocabulary[word],
            "content": word,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for word in special
    ]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": special[0]},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": special[0],
            "bos_token": special[1],
            "eos_token": special[2],
            "pad_token": special[0],
        },
    }

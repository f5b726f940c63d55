"""Codecs: rates, hops, codebooks and their sizes as published; only widths and depths are small."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from omnistage.decoders.code2wav import Code2WavDecoder
from omnistage.decoders.dac import DacDecoder
from omnistage.decoders.encodec import EncodecDecoder
from omnistage.decoders.mimi import MimiDecoder
from omnistage.decoders.neucodec import NeuCodecDecoder
from omnistage.decoders.snac import SNAC_24KHZ, SnacDecoder
from omnistage.decoders.xcodec2 import Xcodec2Decoder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from omnistage.decoders.transformers_codec import TransformersCodec

_SEMANTIC: Mapping[str, Any] = {
    "model_type": "wav2vec2-bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "output_hidden_size": 32,
}


def snac(directory: Path, *, seed: int = 0) -> Path:
    """As ``hubertsiuzdak/snac_24khz``: config.json and pytorch_model.bin.

    Args:
        directory: Where to write; made if it is not there.
        seed: Where the weights come from.

    Returns:
        The directory.
    """
    import torch

    config = {**SNAC_24KHZ, "encoder_dim": 2, "decoder_dim": 32}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    weights = SnacDecoder.random_model(config, seed=seed).state_dict()
    torch.save(weights, directory / "pytorch_model.bin")
    return directory


def xcodec2(directory: Path, *, seed: int = 0) -> Path:
    """As ``HKUSTAudio/xcodec2-hf``; see :func:`snac`."""
    return _transformers(Xcodec2Decoder, directory, seed, **_full_attention())


def neucodec(directory: Path, *, seed: int = 0) -> Path:
    """As ``neuphonic/neucodec``; see :func:`snac`."""
    return _transformers(NeuCodecDecoder, directory, seed, **_full_attention())


def mimi(directory: Path, *, seed: int = 0) -> Path:
    """As ``kyutai/mimi``; see :func:`snac`."""
    return _transformers(
        MimiDecoder,
        directory,
        seed,
        hidden_size=16,
        num_filters=2,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        upsample_groups=16,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


def dac(directory: Path, *, seed: int = 0) -> Path:
    """As ``descript/dac_16khz``; see :func:`snac`."""
    return _transformers(
        DacDecoder,
        directory,
        seed,
        downsampling_ratios=(2, 4, 5, 8),
        n_codebooks=12,
        encoder_hidden_size=2,
        decoder_hidden_size=32,
        codebook_dim=4,
    )


def encodec(directory: Path, *, seed: int = 0) -> Path:
    """As ``facebook/encodec_24khz``; see :func:`snac`."""
    return _transformers(
        EncodecDecoder, directory, seed, num_filters=4, hidden_size=16, codebook_dim=16
    )


def code2wav(directory: Path, *, seed: int = 0) -> Path:
    """The code2wav of ``Qwen/Qwen3-Omni-30B-A3B-Instruct``, in one file of several; see `snac`.

    The other parts of the model are named in its index and not there.
    """
    from safetensors.torch import save_file
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )

    config = Qwen3OmniMoeCode2WavConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        decoder_dim=32,
    )
    weights = Code2WavDecoder.random_model(config, seed=seed).state_dict()
    named = {f"code2wav.{key}": tensor.contiguous() for key, tensor in weights.items()}
    mine, other = (f"model-{part:05}-of-00002.safetensors" for part in (2, 1))
    places = {"thinker.lm_head.weight": other, **dict.fromkeys(named, mine)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(named, directory / mine, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}, indent=2)
    )
    contents = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "code2wav_config": {**config.to_dict(), "model_type": ""},
    }
    (directory / "config.json").write_text(json.dumps(contents, indent=2))
    return directory


def _full_attention() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "encoder_hidden_size": 1,
        "quantization_dim": 96,
        "semantic_model_config": dict(_SEMANTIC),
    }


def _transformers(
    decoder: type[TransformersCodec], directory: Path, seed: int, **sizes: Any
) -> Path:
    import transformers

    config = getattr(transformers, decoder.config_class)(**sizes)
    decoder.random_model(config, seed=seed).save_pretrained(directory)
    return directory

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)

from omnistage.decoders.code2wav import Code2WavDecoder
from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import ConfigError
from tests.decoders.factories import endless, random_codes, stream_together, streaming_deviation
from tools.checkpoints import codecs


def tiny_config(**changes: Any) -> Qwen3OmniMoeCode2WavConfig:
    """Every layer of code2wav with few channels; an attention of 4 frames, as loud as the rest."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "decoder_dim": 16,
        "sliding_window": 4,
        "layer_scale_initial_scale": 1.0,
    }
    return Qwen3OmniMoeCode2WavConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def tiny() -> Code2WavDecoder:
    """All that its two layers of attention and its convolutions hear: nothing is approximate."""
    return Code2WavDecoder.from_config(tiny_config(), seed=1, left_context=12)


@settings(deadline=None, max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    most=st.integers(4, 20),
    seed=st.integers(0, 10**6),
)
def test_any_chunking_and_any_batch_mates_equal_the_whole_clip(
    tiny: Code2WavDecoder, lengths: list[int], most: int, seed: int
) -> None:
    assert streaming_deviation(tiny, lengths, most, seed) < 2e-6


def test_streamed_audio_is_that_of_transformers_own_forward(tiny: Code2WavDecoder) -> None:
    codes = random_codes(tiny, 30)
    with torch.inference_mode():
        expected = tiny._model(torch.from_numpy(codes.T[None].copy()))[0, 0].numpy()
    assert len(expected) == 30 * 1920 - 555
    assert (np.abs(expected) < 1).mean() > 0.99  # it clips by itself, which would hide a difference
    [pcm] = stream_together(WindowedDecoder(tiny), [codes], endless(2), 7)
    np.testing.assert_allclose(pcm[:-555], expected, atol=2e-6)
    np.testing.assert_array_equal(pcm[-555:], np.zeros(555, np.float32))


@pytest.mark.parametrize(("context", "frames"), [("left_context", 8), ("right_context", 0)])
def test_too_little_context_is_heard(context: str, frames: int) -> None:
    decoder = Code2WavDecoder.from_config(tiny_config(), seed=1)
    setattr(decoder, context, frames)
    assert streaming_deviation(decoder, [40]) > 1e-4


def test_attention_as_quiet_as_a_new_models_needs_one_window() -> None:
    quiet = tiny_config(layer_scale_initial_scale=0.01, sliding_window=24)
    decoder = Code2WavDecoder.from_config(quiet, seed=1)
    assert (decoder.left_context, decoder.right_context) == (24, 1)
    assert streaming_deviation(decoder, [50]) < 5e-5


def test_padding_changes_no_window_of_any_length(tiny: Code2WavDecoder) -> None:
    windows = [random_codes(tiny, length, length) for length in (1, 3, 30, 7, 1)]
    for window, pcm in zip(windows, tiny.decode(windows), strict=True):
        assert len(pcm) == len(window) * 1920
        np.testing.assert_allclose(pcm, tiny.decode([window])[0], atol=1e-6)


def test_only_the_files_with_its_weights_are_read(tmp_path: Path) -> None:
    codecs.code2wav(tmp_path)
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
    decoder = Code2WavDecoder.from_pretrained(tmp_path, left_context=20)
    assert (decoder.left_context, decoder.codebooks) == (20, 16)


def test_a_model_without_it_is_refused(tmp_path: Path) -> None:
    codecs.code2wav(tmp_path)
    index = {"weight_map": {"thinker.lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="its weights have no code2wav"):
        Code2WavDecoder.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no code2wav"):
        Code2WavDecoder.declare({"model_type": "qwen3_omni_moe"})

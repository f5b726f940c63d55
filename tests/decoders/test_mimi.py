from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MimiConfig

from omnistage.decoders.mimi import MimiDecoder
from omnistage.errors import ConfigError
from tests.decoders.factories import random_codes, streaming_deviation


def tiny_config(**changes: Any) -> MimiConfig:
    """Every layer of Mimi with few channels, and an attention of 4 frames, as loud as the rest."""
    sizes = {
        "hidden_size": 16,
        "num_filters": 2,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "upsample_groups": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "layer_scale_initial_scale": 1.0,
    }
    return MimiConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def tiny() -> MimiDecoder:
    """All that its two layers of attention and its convolutions hear: nothing is approximate."""
    return MimiDecoder.from_config(tiny_config(), codebooks=4, seed=1, left_context=12)


def test_its_left_context_is_one_window_of_its_attention() -> None:
    decoder = MimiDecoder.from_config(tiny_config())
    assert (decoder.left_context, decoder.right_context) == (4, 0)
    assert MimiDecoder.declare({"model_type": "mimi"}).left_context == 125
    assert MimiDecoder.declare({"model_type": "mimi"}, left_context=30).left_context == 30


@settings(deadline=None, max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    most=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_any_chunking_and_any_batch_mates_equal_the_whole_clip(
    tiny: MimiDecoder, lengths: list[int], most: int, seed: int
) -> None:
    assert streaming_deviation(tiny, lengths, most, seed) < 1e-6


@pytest.mark.parametrize(("frames", "deviation"), [(3, 1e-3), (6, 5e-6)])
def test_less_context_is_heard(frames: int, deviation: float) -> None:
    decoder = MimiDecoder.from_config(tiny_config(), codebooks=4, seed=1, left_context=frames)
    assert streaming_deviation(decoder, [60]) > deviation


def test_attention_as_quiet_as_a_new_models_needs_one_window() -> None:
    quiet = tiny_config(layer_scale_initial_scale=0.01, sliding_window=24)
    decoder = MimiDecoder.from_config(quiet, codebooks=4, seed=1)
    assert decoder.left_context == 12
    assert streaming_deviation(decoder, [60]) < 1e-5


def test_padding_changes_no_window_of_any_length(tiny: MimiDecoder) -> None:
    windows = [random_codes(tiny, length, length) for length in (1, 3, 30, 7, 1)]
    for window, pcm in zip(windows, tiny.decode(windows), strict=True):
        assert len(pcm) == len(window) * 1920
        np.testing.assert_allclose(pcm, tiny.decode([window])[0], atol=1e-6)


@pytest.mark.parametrize("codebooks", [1, 8, 32])
def test_a_frame_may_use_fewer_codebooks_than_the_model_has(codebooks: int) -> None:
    decoder = MimiDecoder.from_config(tiny_config(), codebooks=codebooks)
    codes = random_codes(decoder, 3)
    audio = decoder.decode([codes])[0]
    codes[:, codebooks - 1] ^= 1
    assert np.abs(decoder.decode([codes])[0] - audio).max() > 1e-5


def test_models_that_cannot_stream_are_refused() -> None:
    for changes in ({"audio_channels": 2}, {"use_causal_conv": False}):
        with pytest.raises(ConfigError, match="mono causal"):
            MimiDecoder.declare({"model_type": "mimi", **changes})
    with pytest.raises(ConfigError, match=r"codebooks must be in \[1, 32\]"):
        MimiDecoder.declare({"model_type": "mimi"}, codebooks=33)


def test_a_model_without_its_last_upsampling_has_frames_half_as_long() -> None:
    declaration = MimiDecoder.declare({"model_type": "mimi", "frame_rate": 25})
    assert (declaration.hop_length, declaration.left_context) == (960, 250)

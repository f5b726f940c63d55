from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EncodecConfig

from omnistage.decoders.base import Decoder, Renderer
from omnistage.decoders.encodec import EncodecDecoder
from omnistage.errors import ConfigError, DecoderError
from tests.decoders.factories import random_codes, streaming_deviation


def tiny_config(**changes: Any) -> EncodecConfig:
    """The 24 kHz model's layers with a tenth of the channels."""
    return EncodecConfig(**{"num_filters": 4, "hidden_size": 16, "codebook_dim": 16, **changes})


@pytest.fixture(scope="module")
def tiny() -> EncodecDecoder:
    return EncodecDecoder.from_config(tiny_config(), codebooks=4, seed=1)


def test_it_declares_what_transformers_says(tiny: EncodecDecoder) -> None:
    assert isinstance(tiny, Decoder)
    assert not isinstance(tiny, Renderer)
    assert (tiny.sample_rate, tiny.hop_length) == (24000, 320)
    assert (tiny.codebooks, tiny.codebook_size) == (4, 1024)
    assert (tiny.left_context, tiny.right_context) == (25, 6)


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    most=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_any_chunking_and_any_batch_mates_equal_the_whole_clip(
    tiny: EncodecDecoder, lengths: list[int], most: int, seed: int
) -> None:
    assert streaming_deviation(tiny, lengths, most, seed) < 1e-5


def test_the_24_khz_architecture_streams_within_its_declared_context() -> None:
    decoder = EncodecDecoder.from_config()
    assert streaming_deviation(decoder, [60], 16) < 1e-5
    assert np.abs(decoder.decode([random_codes(decoder, 60)])[0]).max() > 1e-2


@pytest.mark.parametrize("context", ["left_context", "right_context"])
def test_too_little_context_is_heard(context: str) -> None:
    decoder = EncodecDecoder.from_config(tiny_config(), codebooks=4, seed=1)
    setattr(decoder, context, 3)
    assert streaming_deviation(decoder, [40]) > 1e-4


def test_padding_changes_no_window_of_any_length(tiny: EncodecDecoder) -> None:
    windows = [random_codes(tiny, length, length) for length in (1, 3, 6, 7, 8, 1, 20)]
    together = tiny.decode(windows)
    for window, pcm in zip(windows, together, strict=True):
        assert len(pcm) == len(window) * 320
        np.testing.assert_allclose(pcm, tiny.decode([window])[0], atol=1e-6)


def test_without_reflection_there_is_no_lookahead() -> None:
    decoder = EncodecDecoder.from_config(tiny_config(pad_mode="constant"), codebooks=2)
    assert decoder.right_context == 0
    assert streaming_deviation(decoder, [40], 5, 3) < 1e-5


def test_codes_and_seeds_matter_and_the_global_generator_does_not(tiny: EncodecDecoder) -> None:
    codes = random_codes(tiny, 10)
    audio = tiny.decode([codes])[0]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = EncodecDecoder.from_config(tiny_config(), codebooks=4, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(again.decode([codes])[0], audio)
    other = EncodecDecoder.from_config(tiny_config(), codebooks=4, seed=2)
    assert np.abs(other.decode([codes])[0] - audio).max() > 1e-3
    for book in range(4):
        changed = codes.copy()
        changed[:, book] = (changed[:, book] + 1) % 1024
        assert np.abs(tiny.decode([changed])[0] - audio).max() > 1e-4


@pytest.mark.parametrize(
    "changes",
    [{"audio_channels": 2}, {"use_causal_conv": False}, {"chunk_length_s": 1.0}],
)
def test_models_that_cannot_stream_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mono causal"):
        EncodecDecoder.from_config(tiny_config(**changes))


@pytest.mark.parametrize("codebooks", [0, 33])
def test_more_codebooks_than_the_model_has_are_refused(codebooks: int) -> None:
    with pytest.raises(ConfigError, match="codebooks must be in"):
        EncodecDecoder.from_config(tiny_config(), codebooks=codebooks)


@pytest.mark.parametrize(
    "changes",
    [{"target_bandwidths": []}, {"target_bandwidths": ["loud"]}, {"codebook_size": 1}],
)
def test_a_config_that_has_no_codebooks_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="target_bandwidths must be numbers"):
        EncodecDecoder.declare({"model_type": "encodec", **changes})


def test_a_window_without_frames_is_an_error(tiny: EncodecDecoder) -> None:
    with pytest.raises(DecoderError, match="without frames"):
        tiny.decode([random_codes(tiny, 3), random_codes(tiny, 0)])
    assert tiny.decode([]) == []

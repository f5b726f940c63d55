from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DacConfig

from omnistage.decoders.dac import DacDecoder
from omnistage.errors import ConfigError
from tests.decoders.factories import random_codes, streaming_deviation


def tiny_config(**changes: Any) -> DacConfig:
    """Every layer of DAC with few channels; small ratios reach over more frames."""
    sizes = {"encoder_hidden_size": 1, "decoder_hidden_size": 32, "codebook_dim": 4}
    return DacConfig(**{**sizes, "downsampling_ratios": (2, 3, 5), "n_codebooks": 4, **changes})


@pytest.fixture(scope="module")
def tiny() -> DacDecoder:
    return DacDecoder.from_config(tiny_config(), seed=1)


@settings(deadline=None, max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=3),
    most=st.integers(4, 20),
    seed=st.integers(0, 10**6),
)
def test_any_chunking_and_any_batch_mates_equal_the_whole_clip(
    tiny: DacDecoder, lengths: list[int], most: int, seed: int
) -> None:
    assert streaming_deviation(tiny, lengths, most, seed) < 2e-6


@pytest.mark.parametrize("ratios", [(2, 4, 8, 8), (2, 4, 5, 8)])
def test_the_published_models_ratios_stream_with_ten_frames_on_each_side(
    ratios: tuple[int, ...],
) -> None:
    decoder = DacDecoder.from_config(tiny_config(downsampling_ratios=ratios), seed=1)
    assert (decoder.left_context, decoder.right_context) == (10, 10)
    assert streaming_deviation(decoder, [50, 31]) < 2e-6


@pytest.mark.parametrize("context", ["left_context", "right_context"])
def test_two_frames_less_of_context_are_heard(context: str) -> None:
    config = tiny_config(downsampling_ratios=(2, 4, 8, 8))
    less: dict[str, Any] = {context: 8}
    decoder = DacDecoder.from_config(config, seed=1, **less)
    assert streaming_deviation(decoder, [50]) > 2e-5


def test_an_odd_ratio_loses_samples_at_the_end_of_a_clip_only(tiny: DacDecoder) -> None:
    codes = random_codes(tiny, 12)
    with torch.inference_mode():
        made = tiny._forward(torch.from_numpy(codes.T[None].copy()))[0].numpy()
    lost = 12 * 30 - len(made)
    assert lost == 8  # one of the layer of 5, then of the layer of 3: (1 * 3 + 1) * 2
    pcm = tiny.decode([codes])[0]
    np.testing.assert_allclose(pcm[:-lost], made, atol=1e-6)
    np.testing.assert_array_equal(pcm[-lost:], np.zeros(lost, np.float32))


def test_no_windows_padding_is_heard_by_another(tiny: DacDecoder) -> None:
    windows = [random_codes(tiny, length, length) for length in (1, 5, 30, 5, 29)]
    for window, pcm in zip(windows, tiny.decode(windows), strict=True):
        np.testing.assert_allclose(pcm, tiny.decode([window])[0], atol=1e-6)


def test_a_frame_may_use_fewer_codebooks_than_the_model_has(tiny: DacDecoder) -> None:
    decoder = DacDecoder.from_config(tiny_config(), codebooks=2, seed=1)
    codes = random_codes(decoder, 9)
    assert len(decoder.decode([codes])[0]) == 9 * 30
    with pytest.raises(ConfigError, match=r"codebooks must be in \[1, 4\]"):
        DacDecoder.from_config(tiny_config(), codebooks=5)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snac.layers import NoiseBlock

from omnistage.decoders.snac import SNAC_24KHZ, SnacDecoder, slot_levels
from omnistage.errors import ConfigError
from tests.decoders.factories import random_codes, streaming_deviation

TINY = {**SNAC_24KHZ, "encoder_dim": 1, "decoder_dim": 32}


@pytest.fixture(scope="module")
def tiny() -> SnacDecoder:
    return SnacDecoder.from_config(TINY, seed=1)


@settings(deadline=None, max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    most=st.integers(2, 9),
    seed=st.integers(0, 10**6),
)
def test_any_chunking_and_any_batch_mates_equal_the_whole_clip(
    tiny: SnacDecoder, lengths: list[int], most: int, seed: int
) -> None:
    assert streaming_deviation(tiny, lengths, most, seed) < 2e-6


def test_the_24_khz_model_needs_the_context_that_it_declares() -> None:
    decoder = SnacDecoder.from_config()
    assert (decoder.left_context, decoder.right_context) == (3, 3)
    codes = random_codes(decoder, 9)
    whole = decoder.decode([codes])[0][4 * 2048 : 5 * 2048]
    assert np.abs(whole).max() > 1e-2
    for left, right in ((3, 3), (2, 3), (3, 2)):
        pcm = decoder.decode([codes[4 - left : 5 + right]])[0][left * 2048 : (left + 1) * 2048]
        assert (np.abs(pcm - whole).max() < 2e-6) == ((left, right) == (3, 3))


@pytest.mark.parametrize("context", ["left_context", "right_context"])
def test_a_frame_less_of_context_is_heard(context: str) -> None:
    less: dict[str, Any] = {context: 2}
    decoder = SnacDecoder.from_config(TINY, seed=1, **less)
    assert getattr(decoder, context) == 2
    assert streaming_deviation(decoder, [20], 4) > 2e-5


def test_a_frame_holds_its_levels_depth_first() -> None:
    assert slot_levels([4, 2, 1]) == (0, 1, 2, 2, 1, 2, 2)
    assert slot_levels([8, 4, 2, 1]) == (0, 1, 2, 3, 3, 2, 3, 3, 1, 2, 3, 3, 2, 3, 3)
    assert slot_levels([1]) == (0,)
    with pytest.raises(ConfigError, match="divide"):
        slot_levels([3, 2, 1])


def test_slots_go_to_the_levels_that_orpheus_means() -> None:
    model = SnacDecoder.random_model({**TINY, "noise": False}, seed=4)
    decoder = SnacDecoder.from_config({**TINY, "noise": False}, seed=4)
    codes = random_codes(decoder, 5)
    levels: list[list[int]] = [[], [], []]
    for a, b, c, d, e, f, g in codes:  # as Orpheus' own decoder redistributes its codes
        levels[0].append(a)
        levels[1] += [b, e]
        levels[2] += [c, d, f, g]
    with torch.inference_mode():
        expected = model.decode([torch.tensor([level]) for level in levels])[0, 0].numpy()
    np.testing.assert_allclose(decoder.decode([codes])[0], expected, atol=1e-6)


def test_the_noise_of_a_published_model_is_off(tiny: SnacDecoder) -> None:
    model = SnacDecoder.random_model(TINY, seed=1)
    assert any(isinstance(module, NoiseBlock) for module in model.modules())
    assert not any(isinstance(module, NoiseBlock) for module in tiny._model.modules())
    codes = random_codes(tiny, 6)
    first, second = tiny.decode([codes])[0], tiny.decode([codes])[0]
    np.testing.assert_array_equal(first, second)
    with torch.inference_mode():
        noisy, other = (model.decode(_levels(codes))[0, 0].numpy() for _ in range(2))
    assert np.abs(noisy - other).max() > 1e-3  # what windows would do without this
    assert np.abs(noisy - first).max() > 1e-3


def test_other_models_of_the_family_have_other_frames() -> None:
    config = {**TINY, "vq_strides": [8, 4, 2, 1], "decoder_rates": [7, 7, 3, 3]}
    config |= {"encoder_rates": [3, 3, 7, 7], "sampling_rate": 44100, "codebook_size": 64}
    decoder = SnacDecoder.from_config(config)
    assert (decoder.sample_rate, decoder.hop_length, decoder.codebooks) == (44100, 3528, 15)
    assert streaming_deviation(decoder, [9], 3) < 1e-5


def test_no_windows_padding_is_heard_by_another(tiny: SnacDecoder) -> None:
    windows = [random_codes(tiny, length, length) for length in (1, 5, 9, 5, 2)]
    for window, pcm in zip(windows, tiny.decode(windows), strict=True):
        np.testing.assert_allclose(pcm, tiny.decode([window])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attn_window_size": 32}, "without attention"),
        ({"vq_strides": None}, "vq_strides must be positive integers"),
        ({"vq_strides": [4, 0]}, "vq_strides must be a positive integer"),
        ({"decoder_rates": "8842"}, "decoder_rates must be positive integers"),
        ({"sampling_rate": 24000.5}, "sampling_rate must be a positive integer"),
    ],
)
def test_what_cannot_be_streamed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SnacDecoder.declare({**SNAC_24KHZ, **changes})


def test_negative_context_is_refused() -> None:
    for context in ("left_context", "right_context"):
        with pytest.raises(ConfigError, match=f"{context} must be 0 frames or more"):
            SnacDecoder.declare(SNAC_24KHZ, **{context: -1})


def _levels(codes: Any) -> list[torch.Tensor]:
    slots = ([0], [1, 4], [2, 3, 5, 6])
    return [torch.from_numpy(codes[:, level].reshape(1, -1)) for level in slots]

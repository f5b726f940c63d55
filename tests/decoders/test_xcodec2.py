"""XCodec2 and NeuCodec, which share their layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.decoders.neucodec import NeuCodecDecoder
from omnistage.decoders.window import WindowedDecoder
from omnistage.decoders.xcodec2 import Xcodec2Decoder
from omnistage.errors import ConfigError
from tests.decoders.factories import endless, random_codes, stream_together, streaming_deviation

BOTH = pytest.mark.parametrize("kind", [Xcodec2Decoder, NeuCodecDecoder])


@cache
def tiny(kind: type[Xcodec2Decoder], **options: Any) -> Xcodec2Decoder:
    config = getattr(transformers, kind.config_class)(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        encoder_hidden_size=1,
        quantization_dim=96,
        semantic_model_config={
            "model_type": "wav2vec2-bert",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "output_hidden_size": 32,
        },
    )
    return kind.from_config(config, seed=1, **options)


@BOTH
def test_a_frame_is_one_index_of_65536(kind: type[Xcodec2Decoder]) -> None:
    decoder = tiny(kind)
    assert (decoder.codebooks, decoder.codebook_size) == (1, 65536)
    rates = {Xcodec2Decoder: (16000, 320), NeuCodecDecoder: (24000, 480)}
    assert (decoder.sample_rate, decoder.hop_length) == rates[kind]
    for frames in (1, 2, 60):
        assert len(decoder.decode([random_codes(decoder, frames)])[0]) == frames * rates[kind][1]


@BOTH
@settings(deadline=None, max_examples=5)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    most=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_any_chunking_of_clips_within_the_context_equals_the_whole_clip(
    kind: type[Xcodec2Decoder], lengths: list[int], most: int, seed: int
) -> None:
    decoder = tiny(kind, left_context=40, right_context=40)
    assert streaming_deviation(decoder, lengths, most, seed) < 1e-6


@BOTH
def test_longer_clips_come_close(kind: type[Xcodec2Decoder]) -> None:
    decoder = tiny(kind)
    assert (decoder.left_context, decoder.right_context) == (50, 5)
    windowed = WindowedDecoder(decoder)
    codes = random_codes(decoder, 150)
    whole = windowed.decode_clip(codes)
    [pcm] = stream_together(windowed, [codes], endless(1), 25)
    assert len(pcm) == len(whole)
    assert 1e-4 < np.std(pcm - whole) / np.std(whole) < 0.3


@BOTH
def test_no_windows_padding_is_heard_by_another(kind: type[Xcodec2Decoder]) -> None:
    decoder = tiny(kind)
    windows = [random_codes(decoder, length, length) for length in (1, 5, 30, 5, 29)]
    for window, pcm in zip(windows, decoder.decode(windows), strict=True):
        np.testing.assert_allclose(pcm, decoder.decode([window])[0], atol=1e-6)


def test_rates_that_do_not_fit_are_refused() -> None:
    config = {"model_type": "neucodec", "output_sampling_rate": 24001}
    with pytest.raises(ConfigError, match="a frame of 320 samples at 16000 Hz is none at 24001 Hz"):
        NeuCodecDecoder.declare(config)

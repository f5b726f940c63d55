"""XCodec2, the codec of Llasa, through transformers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omnistage.decoders.base import Declaration
from omnistage.decoders.transformers_codec import TransformersCodec
from omnistage.decoders.values import factors, frames_of_context, positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

LEFT_CONTEXT = 50
RIGHT_CONTEXT = 5
"""One second back and a tenth ahead: what NeuTTS itself streams NeuCodec with."""


class Xcodec2Decoder(TransformersCodec):
    """XCodec2's decoder: one index of 65536 a frame, 50 frames a second, 16 kHz.

    Every frame of a window attends to every other one and is normalised over all of them, so no
    context is exact: chunked audio approximates that of the whole clip. With full-size seeded
    weights and the declared 50 frames back and 5 ahead, a chunk's samples deviate by 10% (rms) of
    the audio's, and by 15% in its last frame; with 150 and 25 by 4%. Trained weights were not
    measured. A clip no longer than its first window is exact.
    """

    label = "XCodec2"
    model_type = "xcodec2"
    model_class = "Xcodec2Model"
    config_class = "Xcodec2Config"
    unused = ("semantic_encoder", "semantic_adapter", "acoustic_encoder", "fc_encoder")

    @classmethod
    def declare(
        cls,
        config: Mapping[str, Any],
        /,
        *,
        left_context: int | None = None,
        right_context: int | None = None,
    ) -> Declaration:
        """As :meth:`TorchCodec.declare`.

        Args:
            config: The contents of config.json.
            left_context: Frames to decode again before each chunk, 50 if none are given.
            right_context: Frames to wait for after each chunk, 5 if none are given.

        Raises:
            ConfigError: Another architecture, or no count of frames.
        """
        cls._check(config)
        rate, hop = cls._rate(config, math.prod(_ratios(config)))
        return Declaration(
            sample_rate=rate,
            hop_length=hop,
            codebooks=1,
            codebook_size=math.prod(factors(config, "quantization_levels", (4,) * 8)),
            left_context=frames_of_context("left_context", left_context, LEFT_CONTEXT),
            right_context=frames_of_context("right_context", right_context, RIGHT_CONTEXT),
        )

    @classmethod
    def _rate(cls, config: Mapping[str, Any], hop: int) -> tuple[int, int]:
        return positive(config, "sampling_rate", 16000), hop

    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        audio: torch.Tensor = self._model.decode(audio_codes=codes).audio_values
        return audio[:, 0]


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    return factors(config, "downsampling_ratios", (2, 2, 4, 4, 5))

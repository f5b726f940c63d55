"""DAC, the codec of Parler-TTS, Dia and OuteTTS, through transformers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omnistage.decoders.base import Declaration
from omnistage.decoders.reach import Span
from omnistage.decoders.transformers_codec import TransformersCodec, reset_convolutions
from omnistage.decoders.values import chosen, factors, frames_of_context, positive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


class DacDecoder(TransformersCodec):
    """DAC's decoder: 9 to 32 indices of 1024 a frame, 50 to 86 frames a second, 16 to 44.1 kHz.

    It looks as far ahead as back, 10 frames or a little less. Both are exact: no layer reaches
    further. Models with an odd ratio, such as the 16 kHz one, lose a few samples at the end of a
    clip, which are silence here.
    """

    label = "DAC"
    model_type = "dac"
    model_class = "DacModel"
    config_class = "DacConfig"
    unused = ("encoder",)

    @classmethod
    def declare(
        cls,
        config: Mapping[str, Any],
        /,
        *,
        codebooks: int | None = None,
        left_context: int | None = None,
        right_context: int | None = None,
    ) -> Declaration:
        """As :meth:`TorchCodec.declare`.

        Args:
            config: The contents of config.json.
            codebooks: How many of the model's quantizers a frame uses; all if none are given.
            left_context: Frames to decode again before each chunk; all that are heard otherwise.
            right_context: Frames to wait for after each chunk; all that are heard otherwise.

        Raises:
            ConfigError: Another architecture, too many codebooks, or no number of frames.
        """
        cls._check(config)
        ratios = factors(config, "downsampling_ratios", (2, 4, 8, 8))
        hop = math.prod(ratios)
        span = convolution_reach(Span(0, hop - 1), ratios)
        return Declaration(
            sample_rate=positive(config, "sampling_rate", 16000),
            hop_length=hop,
            codebooks=chosen(codebooks, positive(config, "n_codebooks", 9)),
            codebook_size=positive(config, "codebook_size", 1024),
            left_context=frames_of_context("left_context", left_context, span.left_context),
            right_context=frames_of_context("right_context", right_context, span.right_context),
        )

    @classmethod
    def _fill(cls, model: Any) -> None:
        reset_convolutions(model)

    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        audio: torch.Tensor = self._model.decode(audio_codes=codes).audio_values
        return audio


def convolution_reach(samples: Span, ratios: Sequence[int]) -> Span:
    """The frames that samples depend on, through the layers that DAC and SNAC share.

    Args:
        samples: The samples.
        ratios: The upsampling layers' ratios, last to first.
    """
    span = samples.convolved(7, left=3)
    for ratio in ratios:
        for dilation in (9, 3, 1):
            span = span.convolved(7, left=3 * dilation, dilation=dilation)
        span = span.upsampled(ratio, kernel=2 * ratio, trim=-(-ratio // 2))
    return span.convolved(7, left=3)

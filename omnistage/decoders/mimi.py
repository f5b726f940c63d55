"""Mimi, the codec of Moshi, CSM and Kyutai's speech models, through transformers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omnistage.decoders.base import Declaration
from omnistage.decoders.transformers_codec import TransformersCodec, reset_convolutions
from omnistage.decoders.values import chosen, factors, frames_of_context, positive
from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class MimiDecoder(TransformersCodec):
    """Mimi's decoder: up to 32 indices of 2048 a frame, 12.5 frames a second, 24 kHz, causal.

    Declares one sliding window of its attention as left context, 125 frames (10 s). Its 8 layers
    together hear 1001 frames, so that is exact only for clips up to then. With full-size seeded
    weights a chunk's samples deviate by 7e-6 of the peak; with attention as loud as all else (layer
    scale 1 in place of a new model's 0.01) by 6e-3. 25 frames leave 1e-4 and 2e-2. Trained weights
    lie between the two and were not measured.
    """

    label = "Mimi"
    model_type = "mimi"
    model_class = "MimiModel"
    config_class = "MimiConfig"
    unused = ("encoder", "encoder_transformer", "downsample")

    @classmethod
    def declare(
        cls,
        config: Mapping[str, Any],
        /,
        *,
        codebooks: int | None = None,
        left_context: int | None = None,
    ) -> Declaration:
        """As :meth:`TorchCodec.declare`.

        Args:
            config: The contents of config.json.
            codebooks: How many of the model's quantizers a frame uses; all if none are given.
            left_context: Frames to decode again before each chunk; one sliding window otherwise.

        Raises:
            ConfigError: Another architecture, one that is not mono and causal, or too many
                codebooks.
        """
        cls._check(config)
        if config.get("audio_channels", 1) != 1 or not config.get("use_causal_conv", True):
            raise ConfigError(f"{cls.__name__} streams mono causal models, such as kyutai/mimi")
        steps = _steps_per_frame(config)
        window = positive(config, "sliding_window", 250)
        return Declaration(
            sample_rate=positive(config, "sampling_rate", 24000),
            hop_length=math.prod(_ratios(config)) * steps,
            codebooks=chosen(codebooks, positive(config, "num_quantizers", 32)),
            codebook_size=positive(config, "codebook_size", 2048),
            left_context=frames_of_context("left_context", left_context, -(-window // steps)),
            right_context=0,
        )

    @classmethod
    def _fill(cls, model: Any) -> None:
        reset_convolutions(model)
        for quantizer in (
            model.quantizer.semantic_residual_vector_quantizer,
            model.quantizer.acoustic_residual_vector_quantizer,
        ):
            for layer in quantizer.layers:
                # transformers leaves codebooks at zero, which would make every code sound alike.
                layer.codebook.embed_sum.normal_()

    def _padding_group(self, length: int) -> int:
        return 0  # causal: what follows a window changes nothing in it

    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        audio: torch.Tensor = self._model.decode(codes).audio_values
        return audio[:, 0]


def _ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    return factors(config, "upsampling_ratios", (8, 6, 5, 4))


def _steps_per_frame(config: Mapping[str, Any]) -> int:
    """Steps of the transformer for a frame: 2, unless the model says that it has none more."""
    rate = config.get("frame_rate")
    steps = math.ceil(positive(config, "sampling_rate", 24000) / math.prod(_ratios(config)))
    return 1 if rate == steps else 2

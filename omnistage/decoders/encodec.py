"""EnCodec through transformers: the smallest decoder of a published codec."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omnistage.decoders.base import Declaration
from omnistage.decoders.transformers_codec import TransformersCodec
from omnistage.decoders.values import chosen, factors, positive
from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_LSTM_MEMORY = 25
"""Frames after which the decoder's LSTM has forgotten: 7e-7 of full scale (10 leave 4e-4)."""


class EncodecDecoder(TransformersCodec):
    """EnCodec's decoder, mono and causal: up to 32 indices of 1024, 75 frames a second, 24 kHz.

    Declares 25 frames of left context. The lookahead, 6 frames with the default configuration, is
    needed at the start of a clip only: the first layer pads it with its own reflection.
    """

    label = "EnCodec"
    model_type = "encodec"
    model_class = "EncodecModel"
    config_class = "EncodecConfig"
    unused = ("encoder",)

    @classmethod
    def declare(cls, config: Mapping[str, Any], /, *, codebooks: int = 8) -> Declaration:
        """As :meth:`TorchCodec.declare`.

        Args:
            config: The contents of config.json.
            codebooks: How many of the model's quantizers a frame uses.

        Raises:
            ConfigError: Another architecture, one that is not mono, not causal or works in chunks
                of its own, or too many codebooks.
        """
        cls._check(config)
        if (
            config.get("audio_channels", 1) != 1
            or not config.get("use_causal_conv", True)
            or config.get("chunk_length_s")
        ):
            raise ConfigError(
                f"{cls.__name__} streams mono causal models without chunks of their own, such as "
                "the 24 kHz one"
            )
        reflects = config.get("pad_mode", "reflect") == "reflect"
        return Declaration(
            sample_rate=positive(config, "sampling_rate", 24000),
            hop_length=_hop(config),
            codebooks=chosen(codebooks, _quantizers(config)),
            codebook_size=positive(config, "codebook_size", 1024),
            left_context=_LSTM_MEMORY,
            right_context=positive(config, "kernel_size", 7) - 1 if reflects else 0,
        )

    @classmethod
    def _fill(cls, model: Any) -> None:
        for layer in model.quantizer.layers:
            # transformers leaves codebooks at zero, which would make every code sound alike.
            layer.codebook.embed.normal_()

    def _padding_group(self, length: int) -> int:
        # Causal, except that a window too short for the first layer's reflection would find the
        # padding in it.
        return length if length <= self.right_context else 0

    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        audio: torch.Tensor = self._model.decode(codes[None], [None]).audio_values
        return audio[:, 0]


def _hop(config: Mapping[str, Any]) -> int:
    return math.prod(factors(config, "upsampling_ratios", (8, 5, 4, 2)))


def _quantizers(config: Mapping[str, Any]) -> int:
    """As many as the highest bandwidth has room for."""
    bandwidths = config.get("target_bandwidths", (1.5, 3.0, 6.0, 12.0, 24.0))
    frames = math.ceil(positive(config, "sampling_rate", 24000) / _hop(config))
    bits = math.ceil(math.log2(positive(config, "codebook_size", 1024)))
    try:
        return int(1000 * bandwidths[-1] // (frames * bits))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's target_bandwidths must be numbers, got {bandwidths!r}, and its codebooks "
            "must have 2 indices or more"
        ) from error

"""Code2wav, the decoder of Qwen3-Omni, through transformers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from omnistage.decoders.base import Declaration
from omnistage.decoders.reach import Span
from omnistage.decoders.transformers_codec import TransformersCodec, reset_convolutions
from omnistage.decoders.values import factors, frames_of_context, positive
from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from transformers import PreTrainedConfig

    from omnistage.checkpoint import Checkpoint

_PREFIX = "code2wav."


class Code2WavDecoder(TransformersCodec):
    """Qwen3-Omni's code2wav: 16 indices of 2048 a frame, 12.5 frames a second, 24 kHz.

    Declares one frame of lookahead: a call loses its last samples, 555 of the published model, and
    the lookahead is where they are lost. At the end of a clip there is no lookahead, and they are
    silence (23 ms), so that a clip has exactly ``frames * hop_length`` samples.

    Declares one sliding window of its attention as left context, 72 frames (6 s). Its 8 layers and
    its convolutions together hear 578 frames, so that is exact only for clips up to then. With
    full-size seeded weights a chunk's samples deviate by 2e-2 of the peak, and with attention as
    loud as all else (layer scale 1 in place of a new model's 0.01) by 9e-2. Trained weights were
    not measured; Qwen's own chunked decoding gives them 25 frames.

    Of a whole Qwen3-Omni model only the files with code2wav's weights are read.
    """

    label = "Qwen3-Omni code2wav"
    model_type = "qwen3_omni_moe"
    library = "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe"
    model_class = "Qwen3OmniMoeCode2Wav"
    config_class = "Qwen3OmniMoeCode2WavConfig"

    @classmethod
    def declare(
        cls, config: Mapping[str, Any], /, *, left_context: int | None = None
    ) -> Declaration:
        """As :meth:`TorchCodec.declare`.

        Args:
            config: The contents of the whole model's config.json.
            left_context: Frames to decode again before each chunk; one sliding window otherwise.

        Raises:
            ConfigError: Another architecture, or no number of frames.
        """
        cls._check(config)
        code2wav = _code2wav_config(config)
        rates = factors(code2wav, "upsample_rates", (8, 5, 4, 3))
        ratios = factors(code2wav, "upsampling_ratios", (2, 2))
        hop = math.prod(rates) * math.prod(ratios)
        window = positive(code2wav, "sliding_window", 72)
        return Declaration(
            sample_rate=24000,  # config.json does not say it
            hop_length=hop,
            codebooks=positive(code2wav, "num_quantizers", 16),
            codebook_size=positive(code2wav, "codebook_size", 2048),
            left_context=frames_of_context("left_context", left_context, window),
            right_context=_convolution_reach(Span(0, hop - 1), rates, ratios).right_context,
        )

    @classmethod
    def _published(cls, config: PreTrainedConfig) -> Mapping[str, Any]:
        return {"model_type": cls.model_type, "code2wav_config": config.to_dict()}

    @classmethod
    def _load(cls, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
        from safetensors import safe_open

        weights = {}
        for file in _weight_files(checkpoint):
            with safe_open(checkpoint.file(file), framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 it is no mapping
                    if key.startswith(_PREFIX):
                        weights[key.removeprefix(_PREFIX)] = tensors.get_tensor(key)
        contents = cls._class(cls.config_class)(**_code2wav_config(config))
        return cls._complete(checkpoint, None, config=contents, state_dict=weights, dtype=dtype)

    @classmethod
    def _fill(cls, model: Any) -> None:
        reset_convolutions(model)

    def _padding_group(self, length: int) -> int:
        return 0  # what a call loses is cut off; all else of it looks back

    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        audio: torch.Tensor = self._model(codes)
        return audio[:, 0]


def _code2wav_config(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("code2wav_config")
    if not isinstance(found, dict):
        raise ConfigError("this Qwen3-Omni model has no code2wav: its config.json does not have it")
    return found


def _weight_files(checkpoint: Checkpoint) -> list[str]:
    """The files with code2wav's weights: all the weights of a 30B model lie beside them."""
    index = checkpoint.find("model.safetensors.index.json")
    if index is None:
        return ["model.safetensors"]
    places = json.loads(index.read_bytes())["weight_map"]
    files = sorted({file for key, file in places.items() if key.startswith(_PREFIX)})
    if not files:
        raise checkpoint.failure("its weights have no code2wav")
    return files


def _convolution_reach(samples: Span, rates: Sequence[int], ratios: Sequence[int]) -> Span:
    """The frames that samples depend on through code2wav's convolutions, last to first."""
    span = samples.convolved(7, left=6)
    for rate in reversed(rates):
        for dilation in (9, 3, 1):
            span = span.convolved(7, left=6 * dilation, dilation=dilation)
        span = span.upsampled(rate, kernel=2 * rate, trim=rate)
    span = span.convolved(7, left=6)
    for ratio in reversed(ratios):
        span = span.convolved(7, left=6).upsampled(ratio)
    return span

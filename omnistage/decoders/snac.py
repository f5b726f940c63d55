"""SNAC through its own package, with its noise off: the codec of Orpheus.

Knows how SNAC's levels lie in a frame and how far its convolutions reach.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from omnistage.decoders.base import Declaration
from omnistage.decoders.dac import convolution_reach
from omnistage.decoders.reach import Span
from omnistage.decoders.torch_codec import TorchCodec, torch_device, torch_dtype
from omnistage.decoders.values import factors, frames_of_context, positive
from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from omnistage.checkpoint import Checkpoint

SNAC_24KHZ: Mapping[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
"""config.json of ``hubertsiuzdak/snac_24khz``."""


def slot_levels(strides: Sequence[int]) -> tuple[int, ...]:
    """Which of SNAC's levels each index of a frame belongs to, depth first.

    The 24 kHz model's strides 4, 2, 1 give 0, 1, 2, 2, 1, 2, 2: the order in which Orpheus speaks.

    Args:
        strides: Steps that one code of each level stands for, coarsest first.

    Raises:
        ConfigError: A level's codes do not divide those of the level above it.
    """
    if any(above % below for above, below in pairwise(strides)):
        raise ConfigError(f"the model's vq_strides must divide one another, got {list(strides)}")

    def below(level: int) -> list[int]:
        if level == len(strides) - 1:
            return [level]
        return [level, *below(level + 1) * (strides[level] // strides[level + 1])]

    return tuple(below(0))


class SnacDecoder(TorchCodec):
    """SNAC's decoder; a frame is one code of the coarsest level and all those below it.

    With the 24 kHz model that is 7 indices for 2048 samples, 11.7 frames a second, in the order of
    :func:`slot_levels`. The 3 frames of context on each side are exact: no layer reaches further.
    With 2 frames of lookahead seeded weights deviate by 2e-4 of full scale, with 1 by 1e-2, and a
    chunk waits 85 ms less for each.

    SNAC's noise layers are taken out, so equal codes give equal audio. Left in, each call would
    draw its own noise, also for the frames that two windows share, and chunks would not fit
    together. What is missing is what the noise has on average, which is nothing; breath and
    sibilants may sound a little plainer.
    """

    extra = "snac"
    packages = ("torch", "snac")
    label = "SNAC"

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
            left_context: Frames to decode again before each chunk; all that are heard otherwise.
            right_context: Frames to wait for after each chunk; all that are heard otherwise.

        Raises:
            ConfigError: Another architecture, one with attention, or no number of frames.
        """
        if "vq_strides" not in config or "decoder_rates" not in config:
            raise ConfigError(
                f"{cls.__name__} decodes SNAC models, whose config.json has vq_strides and "
                f"decoder_rates; this one describes {config.get('model_type', 'something else')!r}"
            )
        if config.get("attn_window_size", 32) is not None:
            raise ConfigError(
                f"{cls.__name__} streams SNAC models without attention, such as the 24 kHz one; "
                "this one's attention cuts a clip into fixed windows of its own"
            )
        strides = factors(config, "vq_strides")
        rates = factors(config, "decoder_rates")
        hop = math.prod(rates) * strides[0]
        span = convolution_reach(Span(0, hop - 1), rates[::-1]).upsampled(strides[0])
        return Declaration(
            sample_rate=positive(config, "sampling_rate", 44100),
            hop_length=hop,
            codebooks=len(slot_levels(strides)),
            codebook_size=positive(config, "codebook_size", 4096),
            left_context=frames_of_context("left_context", left_context, span.left_context),
            right_context=frames_of_context("right_context", right_context, span.right_context),
        )

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] = SNAC_24KHZ,
        *,
        seed: int = 0,
        device: str = "cpu",
        dtype: str = "float32",
        max_frames: int | None = None,
        **options: Any,
    ) -> Self:
        """A decoder with random weights, equal for equal seeds.

        Args:
            config: The contents of a config.json.
            seed: Where the weights come from; torch's global generator is left as it was.
            device: As in :meth:`from_pretrained`.
            dtype: As in :meth:`from_pretrained`.
            max_frames: As for the class.
            options: As in :meth:`declare`.

        Raises:
            ConfigError: A package or the device is missing, or as in :meth:`declare`.
        """
        cls._libraries()
        declaration = cls.declare(config, **options)
        place = torch_device(device)
        model = cls.random_model(config, seed=seed)
        model = _decoding_half(model).to(place, torch_dtype(dtype))
        return cls(model, declaration, max_frames=max_frames)

    @classmethod
    def random_model(cls, config: Mapping[str, Any], *, seed: int) -> Any:
        """The whole model of the snac package with random weights.

        Args:
            config: The contents of a config.json.
            seed: Where the weights come from; torch's global generator is left as it was.
        """
        import snac
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return snac.SNAC(**config).eval()

    @classmethod
    def _load(cls, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
        import snac
        import torch

        path = checkpoint.file("pytorch_model.bin")
        weights = torch.load(path, map_location="cpu", weights_only=True)  # runs no code of theirs
        model = snac.SNAC(**config)
        model.load_state_dict(weights)
        return _decoding_half(model).to(dtype)

    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        levels = slot_levels(self._model.vq_strides)
        tree = []
        for level in range(max(levels) + 1):
            slots = [slot for slot, other in enumerate(levels) if other == level]
            # [windows, slots, frames] to the order of time, [windows, frames * slots].
            tree.append(codes[:, slots].transpose(1, 2).flatten(1))
        audio: torch.Tensor = self._model.decode(tree)  # [windows, 1, samples]
        return audio[:, 0]


def _decoding_half(model: Any) -> Any:
    """The model without its encoder and without its noise."""
    from snac.layers import NoiseBlock
    from torch import nn

    del model.encoder
    for module in list(model.decoder.modules()):
        for name, child in module.named_children():
            if isinstance(child, NoiseBlock):
                setattr(module, name, nn.Identity())
    return model

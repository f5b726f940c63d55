"""EnCodec through transformers: the reference decoder, small enough for tests with seeded weights.

Knows how much context transformers' layers need; torch and transformers load when one is made.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from omnistage.errors import ConfigError, DecoderError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import EncodecConfig, EncodecModel

    from omnistage.request import Codes, Pcm

_LSTM_MEMORY = 25
"""Frames after which the decoder's LSTM has forgotten: 7e-7 of full scale (10 leave 4e-4)."""


class EncodecDecoder:
    """EnCodec's decoder, mono and causal, on the CPU.

    Declares 25 frames of left context. The lookahead, 6 frames with the default configuration, is
    needed at the start of a clip only: the first layer pads it with its own reflection.

    Args:
        model: A transformers model in evaluation mode.
        codebooks: How many of the model's quantizers a frame uses.

    Raises:
        ConfigError: The model is not mono, not causal or works in chunks of its own, or it has
            fewer quantizers than asked for.
    """

    deterministic = True
    left_context = _LSTM_MEMORY

    def __init__(self, model: EncodecModel, *, codebooks: int) -> None:
        config = model.config
        if config.audio_channels != 1 or not config.use_causal_conv or config.chunk_length_s:
            raise ConfigError(
                "EncodecDecoder streams mono causal models without chunks of their own, such as "
                "the 24 kHz one"
            )
        if not 1 <= codebooks <= config.num_quantizers:
            raise ConfigError(
                f"codebooks must be in [1, {config.num_quantizers}] for this model, got {codebooks}"
            )
        self._model: Any = model
        self.codebooks = codebooks
        self.codebook_size: int = config.codebook_size
        self.sample_rate: int = config.sampling_rate
        self.hop_length = math.prod(config.upsampling_ratios)
        self.right_context: int = config.kernel_size - 1 if config.pad_mode == "reflect" else 0

    @classmethod
    def from_config(
        cls, config: EncodecConfig | None = None, *, codebooks: int = 8, seed: int = 0
    ) -> EncodecDecoder:
        """A decoder with random weights, equal for equal seeds.

        Args:
            config: The architecture; without one, that of the 24 kHz model.
            codebooks: How many quantizers a frame uses.
            seed: Where the weights come from; torch's global generator is left as it was.

        Raises:
            ConfigError: torch or transformers is missing, or as for the class.
        """
        torch, transformers = _libraries()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.EncodecModel(config or transformers.EncodecConfig())
            for layer in model.quantizer.layers:
                # transformers leaves codebooks at zero, which would make every code sound alike.
                layer.codebook.embed.normal_()
        return cls(model.eval(), codebooks=codebooks)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, codebooks: int = 8) -> EncodecDecoder:
        """A decoder with trained weights.

        Args:
            path: What transformers accepts: a directory or the name of a model.
            codebooks: How many quantizers a frame uses.

        Raises:
            ConfigError: torch or transformers is missing, the model is not there, or as for the
                class.
        """
        _, transformers = _libraries()
        try:
            model = transformers.EncodecModel.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no EnCodec model could be loaded from {path}: {error}") from error
        return cls(model.eval(), codebooks=codebooks)

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        """Decode windows of codes, each [frames, codebooks], into [frames * hop_length] samples.

        Raises:
            DecoderError: A window has no frames.
        """
        audio: list[Pcm] = [np.zeros(0, np.float32)] * len(windows)
        for indices in self._batches([len(window) for window in windows]):
            for index, pcm in zip(
                indices, self._decode([windows[i] for i in indices]), strict=True
            ):
                audio[index] = pcm
        return audio

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        """Which windows may be padded to one length.

        Padding follows a window's frames and all layers look back, so it changes nothing, except
        that a window too short for the first layer's reflection would find padding in it.
        """
        batches: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            if length < 1:
                raise DecoderError("EncodecDecoder cannot decode a window without frames")
            batches.setdefault(length if length <= self.right_context else 0, []).append(index)
        return list(batches.values())

    def _decode(self, windows: list[Codes]) -> list[Pcm]:
        import torch

        longest = max(len(window) for window in windows)
        codes = np.zeros((1, len(windows), self.codebooks, longest), np.int64)
        for row, window in zip(codes[0], windows, strict=True):
            row[:, : len(window)] = window.T
        with torch.inference_mode():
            audio = self._model.decode(
                torch.from_numpy(codes), [None]
            ).audio_values  # [n, 1, samples]
        samples = audio[:, 0].float().numpy()
        return [
            pcm[: len(window) * self.hop_length]
            for pcm, window in zip(samples, windows, strict=True)
        ]


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"EncodecDecoder needs {error.name}: install omnistage[codecs]"
        ) from error
    return torch, transformers

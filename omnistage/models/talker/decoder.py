"""The talker's decoder: a small causal network from codes and phones to the vocoder's rows.

Knows the network's shape and how far it looks back and ahead; the vocoder makes the samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from omnistage.errors import ConfigError, DecoderError
from omnistage.models.talker import vocoder
from omnistage.models.talker.vocoder import BANDS, Vocoder, VocoderState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from omnistage.decoders.base import Rows
    from omnistage.request import Codes, Pcm

_LEVELS = (9, 5, 5, 5)  # of each dimension of a code; 1125 codes
_CODES = 1125
_UNKNOWN_PHONE = 108  # trained as "any phone"
_WIDTH = 192
_LOOKAHEAD = 2


def _neighbours(x: Tensor, before: int, after: int) -> Tensor:
    """Each step with those around it, zeros past the ends: [batch, time, width, steps]."""
    return functional.pad(x, (0, 0, before, after)).unfold(1, before + 1 + after, 1)


class _PastOfChannel(nn.Module):
    """A causal convolution of each channel with itself.

    Written out because torch's own takes ten times as long in double precision.
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, kernel))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        past = _neighbours(x, self.weight.shape[2] - 1, 0)
        return (past * self.weight[:, 0]).sum(-1) + self.bias


class _Block(nn.Module):
    """A residual block: a causal convolution over time, then two layers over channels."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.dw = _PastOfChannel(width, kernel)
        self.n = nn.LayerNorm(width)
        self.a = nn.Linear(width, 2 * width)
        self.b = nn.Linear(2 * width, width)
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        hidden = functional.silu(self.a(self.n(self.dw(x))))
        return torch.addcmul(x, self.g, self.b(hidden))


class _Network(nn.Module):
    """Codes and phones at 40 frames a second to rows at 80; named as in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(len(_LEVELS), _WIDTH)
        self.p = nn.Embedding(_UNKNOWN_PHONE + 1, _WIDTH)
        self.i = nn.Conv1d(_WIDTH, _WIDTH, 5)
        self.bl = nn.ModuleList(_Block(_WIDTH, 7) for _ in range(4))
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.b2 = nn.ModuleList(_Block(_WIDTH, 5) for _ in range(2))
        self.n = nn.LayerNorm(_WIDTH)
        self.o = nn.Linear(_WIDTH, 2 * BANDS + 2)

    def forward(self, points: Tensor, phones: Tensor, inside: Tensor) -> Tensor:
        # points [batch, frames, 4], phones [batch, frames], inside [batch, frames, 1]: 0
        # past a window's end, where the convolution that looks ahead must find what ends a clip.
        x = (self.z(points) + self.p(phones)) * inside
        x = _neighbours(x, 2, _LOOKAHEAD).flatten(2)
        x = functional.silu(functional.linear(x, self.i.weight.flatten(1), self.i.bias))
        for block in self.bl:
            x = block(x)
        x = self.up(x).reshape(x.shape[0], 2 * x.shape[1], _WIDTH)
        for block in self.b2:
            x = block(x)
        out: Tensor = self.o(self.n(x))
        return out


class TalkerDecoder:
    """Frames of (code, phone) to speech, 25 ms a frame; a Decoder and a Renderer.

    Equal frames and seeds give audio within 1e-4, whatever the chunks and the batch: the network
    runs in double precision, because a rounding error in the pitch adds up in the phase (single
    precision reached 1.2e-4 in half a minute). The network needs 30 frames of the past and two of
    the future; the vocoder holds back two frames more.

    Args:
        checkpoint: The decoder's folder, with ``decoder.safetensors`` in it.

    Raises:
        ConfigError: The weights are missing or are not this network's.
    """

    sample_rate = vocoder.SAMPLE_RATE
    hop_length = 2 * vocoder.ROW
    rows_per_frame = 2
    codebooks = 2
    codebook_size = _CODES
    left_context = 30
    right_context = _LOOKAHEAD
    deterministic = True

    def __init__(self, checkpoint: Path) -> None:
        path = checkpoint / "decoder.safetensors"
        # Without memory until the weights are assigned, and without a draw from torch's generator.
        with torch.device("meta"):
            self._network = _Network()
        try:
            weights = {name: tensor.double() for name, tensor in load_file(path).items()}
            self._mean, self._scale = weights.pop("st.m"), weights.pop("st.s")
            self._pitch = weights.pop("st.lf").tolist()  # mean and spread of the logarithm
            self._network.load_state_dict(
                {name.removeprefix("dec."): tensor for name, tensor in weights.items()},
                assign=True,
            )
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"{path} does not hold the talker's decoder: {error}") from error
        self._network.eval().requires_grad_(False)
        self._points = _code_points()
        self._vocoder = Vocoder()

    def decode(self, windows: Sequence[Codes]) -> list[Rows]:
        """Rows of windows, each [frames, 2], frames >= 1, lengths may differ.

        A phone that does not exist counts as unknown.

        Returns:
            The rows of each window, [2 * frames, COLUMNS].

        Raises:
            DecoderError: A window has no frames.
        """
        lengths = [len(window) for window in windows]
        if min(lengths, default=1) < 1:
            raise DecoderError("TalkerDecoder cannot decode a window without frames")
        if not lengths:
            return []
        frames = np.zeros((len(windows), max(lengths), 2), np.int64)
        inside = np.zeros((len(windows), max(lengths), 1), np.float64)
        for index, window in enumerate(windows):
            frames[index, : len(window)] = window
            inside[index, : len(window)] = 1.0
        with torch.inference_mode():
            codes, phones = torch.from_numpy(frames).unbind(-1)
            phones = phones.clamp(max=_UNKNOWN_PHONE)
            out = self._network(self._points[codes], phones, torch.from_numpy(inside))
            rows = self._rows(out).float().numpy()
        return [rows[index, : 2 * length] for index, length in enumerate(lengths)]

    def open(self, seed: int) -> VocoderState:
        """A new stream's vocoder state."""
        return self._vocoder.open(seed)

    def render(self, state: VocoderState, rows: Rows, *, final: bool) -> Pcm:
        """The samples that a stream's next rows complete; see :meth:`Vocoder.render`."""
        return self._vocoder.render(state, rows, final=final)

    def _rows(self, out: Tensor) -> Tensor:
        mean, spread = self._pitch
        bands = out[..., : 2 * BANDS] * self._scale + self._mean
        pitch = torch.exp(out[..., -2].clamp(-4, 4) * spread + mean) * (out[..., -1] > 0)
        return torch.cat([bands, pitch[..., None]], -1)


def _code_points() -> Tensor:
    """Each code's place on the lattice it was quantized to, [codes, 4], the last one fastest."""
    axes = [torch.arange(levels, dtype=torch.float64) - (levels - 1) // 2 for levels in _LEVELS]
    return torch.cartesian_prod(*axes)

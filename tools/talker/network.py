"""The codec's two halves: an encoder that only training needs, and the package's decoder.

Codes are finite scalar quantization: four numbers, each rounded to one of a few levels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from omnistage.models.talker import decoder as shipped
from omnistage.models.talker.vocoder import BANDS
from tools.talker import training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.talker.settings import Run

LEVELS: Sequence[int] = shipped._LEVELS
UNKNOWN_PHONE: int = shipped._UNKNOWN_PHONE
COLUMNS = 2 * BANDS + 2
"""Of a row of features: bands, logarithm of the pitch, voice or none."""

_ENCODER_WIDTH = 128
_UNVOICED = -3.0  # for the bands of a voice that is not there, in spreads


class Scale(nn.Module):
    """Rows to features of about one in size, and what that takes; saved as in the checkpoint."""

    m: Tensor
    s: Tensor
    lf: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(2 * BANDS))
        self.register_buffer("s", torch.ones(2 * BANDS))
        self.register_buffer("lf", torch.tensor([5.3, 0.25]))

    def fit(self, bands: Tensor, pitch: Tensor) -> None:
        """Take mean and spread from rows; those of the voice from the rows that have one."""
        voiced = pitch > 0
        self.m.copy_(bands.mean(0))
        self.s.copy_(bands.std(0))
        self.m[:BANDS] = bands[voiced, :BANDS].mean(0)
        self.s[:BANDS] = bands[voiced, :BANDS].std(0)
        hertz = pitch[voiced].log()
        self.lf.copy_(torch.stack([hertz.mean(), hertz.std()]))

    def forward(self, bands: Tensor, pitch: Tensor) -> Tensor:
        """Features, [..., COLUMNS], of bands [..., 2 * BANDS] and pitch [...]."""
        voiced = pitch > 0
        scaled = (bands - self.m) / self.s
        voice = torch.where(voiced[..., None], scaled[..., :BANDS], _UNVOICED)
        height = (pitch.clamp(min=1).log() - self.lf[0]) / self.lf[1] * voiced
        return torch.cat(
            [voice, scaled[..., BANDS:], height[..., None], voiced[..., None].float()], -1
        )


class _EncoderBlock(nn.Module):
    """A residual block that sees as far ahead as back."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.time = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.time(x.transpose(1, 2)).transpose(1, 2)
        hidden = functional.silu(self.wide(self.norm(seen)))
        return torch.addcmul(x, self.gain.to(x.dtype), self.narrow(hidden).to(x.dtype))


class Encoder(nn.Module):
    """Features, [batch, 2 * frames, COLUMNS], to places on the lattice, [batch, frames, 4]."""

    reach: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = _ENCODER_WIDTH
        self.first = nn.Conv1d(COLUMNS, width, 5, padding=2)
        self.rows = _EncoderBlock(width, 5)
        self.join = nn.Conv1d(width, width, 2, stride=2)
        self.frames = nn.ModuleList(_EncoderBlock(width, 5) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, len(LEVELS))
        reach = torch.tensor([(levels - 1) / 2 for levels in LEVELS])
        self.register_buffer("reach", reach, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Places as the decoder gets them, with a gradient that ignores the rounding."""
        x = functional.silu(self.first(features.transpose(1, 2))).transpose(1, 2)
        x = self.join(self.rows(x).transpose(1, 2)).transpose(1, 2)
        for block in self.frames:
            x = block(x)
        place = torch.tanh(self.last(self.norm(x)).float()) * self.reach
        return place + (place.round() - place).detach()

    def codes(self, features: Tensor) -> Tensor:
        """Each frame's code, [batch, frames], numbered as the decoder numbers them."""
        levels = (self(features).round() + self.reach).long()
        code = torch.zeros_like(levels[..., 0])
        for index, count in enumerate(LEVELS):
            code = code * count + levels[..., index]
        return code


class _Past(shipped._PastOfChannel):
    """The decoder's causal convolution by torch's own, which trains twice as fast in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        width, _, kernel = self.weight.shape
        padded = functional.pad(x.transpose(1, 2), (kernel - 1, 0))
        return functional.conv1d(padded, self.weight, self.bias, groups=width).transpose(1, 2)


class Decoder(shipped._Network):
    """The package's own network, with weights to begin with."""

    def __init__(self) -> None:
        super().__init__()
        for block in [*self.bl, *self.b2]:
            past = _Past(*_shape(block))
            nn.init.kaiming_uniform_(past.weight, a=math.sqrt(5))
            nn.init.zeros_(past.bias)
            block.dw = past
            nn.init.constant_(block.get_parameter("g"), 0.3)


def _shape(block: nn.Module) -> tuple[int, int]:
    width, _, kernel = block.get_parameter("dw.weight").shape
    return width, kernel


class Codec(nn.Module):
    """Scale, encoder and decoder; the first and the last are what the checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.st = Scale()
        self.enc = Encoder()
        self.dec = Decoder()


def lattice() -> Tensor:
    """Each code's place, [codes, 4]."""
    return shipped._code_points().float()


def load_codec(run: Run) -> Codec:
    """The trained codec, encoder and all.

    Raises:
        StageError: It is not trained, or not to the end.
    """
    codec = Codec()
    codec.load_state_dict(training.finished(run, "codec", run.settings.codec_steps))
    return codec.eval()

"""Trains the codec: encoder and decoder together, then, with the codes fixed, the decoder alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from omnistage.models.talker.vocoder import BANDS
from tools.talker import tokens, training
from tools.talker.network import Codec, lattice, load_codec
from tools.talker.settings import SEED
from tools.talker.speech import QUIET, Speech, shards

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from tools.talker.settings import Run
    from tools.talker.speech import Windows

_BATCH = 16
_CODEC_FRAMES, _DECODER_FRAMES = 72, 96
_CODEC_LEAD, _DECODER_LEAD = 4, 10
_CODEC_HIDDEN, _DECODER_HIDDEN = 0.25, 0.05
_MEASURES = range(10**9, 10**9 + 4)  # as steps, so that no training has the same windows


def train_codec(run: Run) -> None:
    """Encoder and decoder; the phone is hidden from a quarter, so the codes carry the sound too.

    Raises:
        StageError: The teacher has not spoken.
    """
    torch.manual_seed(SEED)
    device = training.device()
    codec = Codec().to(device)
    speech = Speech(shards(run, run.settings.codec_shards), device)
    sample = slice(0, len(speech.pitch), 37)
    codec.st.fit(speech.bands[sample].float().clamp(min=QUIET), speech.pitch[sample].float())
    some, rest = _split(run, speech)
    run.log("codec", f"{speech.hours:.2f} hours of speech")

    def loss(step: int, among: slice = rest, hidden: float = _CODEC_HIDDEN) -> Tensor:
        windows = speech.windows(
            step, count=_BATCH, frames=_CODEC_FRAMES, lead=_CODEC_LEAD, hidden=hidden, among=among
        )
        features = codec.st(windows.bands, windows.pitch)
        with torch.autocast(device.type, torch.bfloat16):
            points = codec.enc(features * _of_rows(windows.inside))
            out = codec.dec(points, windows.phones, windows.inside)
        return error(out.float(), features, windows)

    training.train(
        run,
        training.Training(
            name="codec",
            module=codec,
            optimizers=(
                torch.optim.AdamW(codec.parameters(), 2e-3, betas=(0.9, 0.98), weight_decay=1e-3),
            ),
            steps=run.settings.codec_steps,
            loss=loss,
            measure=lambda: _mean(loss(step, some, 0.0) for step in _MEASURES),
            warm_up=100,
            hold=0.3,
            floor=0.02,
        ),
    )


def train_decoder(run: Run) -> None:
    """The decoder alone, from where the codec's training left it, on its codes.

    Raises:
        StageError: The codec is not trained or the codes are not made.
    """
    torch.manual_seed(SEED)
    device = training.device()
    codec, points = load_codec(run).to(device).train(), lattice().to(device)
    speech = Speech(shards(run, run.settings.codec_shards), device, tokens.read_codes(run))
    some, rest = _split(run, speech)

    def loss(step: int, among: slice = rest, hidden: float = _DECODER_HIDDEN) -> Tensor:
        windows = speech.windows(
            step,
            count=_BATCH,
            frames=_DECODER_FRAMES,
            lead=_DECODER_LEAD,
            hidden=hidden,
            among=among,
        )
        features = codec.st(windows.bands, windows.pitch)
        with torch.autocast(device.type, torch.bfloat16):
            out = codec.dec(points[windows.codes], windows.phones, windows.inside)
        return error(out.float(), features, windows)

    training.train(
        run,
        training.Training(
            name="decoder",
            module=codec.dec,
            optimizers=(
                torch.optim.AdamW(
                    codec.dec.parameters(), 1.5e-3, betas=(0.9, 0.98), weight_decay=1e-3
                ),
            ),
            steps=run.settings.decoder_steps,
            loss=loss,
            measure=lambda: _mean(loss(step, some, 0.0) for step in _MEASURES),
            warm_up=50,
            hold=0.4,
            floor=0.03,
        ),
    )


def error(out: Tensor, features: Tensor, windows: Windows) -> Tensor:
    """How far the decoder is off; quiet bands count less, and a voice only where there is one.

    The differences between neighbouring bands count too, or formants would be smoothed away.
    """
    counted = _of_rows(windows.counted[..., None])
    voiced = features[..., -1:]
    rows = counted.sum()

    def mean(values: Tensor) -> Tensor:
        return (values * counted).sum() / (rows * values.shape[-1])

    loud = torch.sigmoid(windows.bands + 2.5) * 0.9 + 0.1
    off = out - features
    voice, noise, pitch = off[..., :BANDS], off[..., BANDS : 2 * BANDS], off[..., -2:-1]
    loud_voice, loud_noise = loud[..., :BANDS], loud[..., BANDS:]
    is_voiced = functional.binary_cross_entropy_with_logits(out[..., -1:], voiced, reduction="none")
    return (
        1.5 * mean(voice.abs() * loud_voice * voiced)
        + mean(noise.abs() * loud_noise)
        + 0.5 * mean(voice.diff().abs() * loud_voice[..., 1:] * voiced)
        + 0.5 * mean(noise.diff().abs() * loud_noise[..., 1:])
        + mean(pitch.abs() * voiced)
        + 0.5 * mean(is_voiced)
    )


def _mean(losses: Iterable[Tensor]) -> str:
    return f"kept back {torch.stack(list(losses)).mean().item():.4f}"


def _of_rows(frames: Tensor) -> Tensor:
    """What holds for frames, [batch, frames, 1], for their rows."""
    return frames.repeat_interleave(2, dim=1)


def _split(run: Run, speech: Speech) -> tuple[slice, slice]:
    """Utterances to measure with and the others."""
    kept = min(run.settings.kept_back, len(speech.ends) // 4)
    return slice(0, kept), slice(kept, None)

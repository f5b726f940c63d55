"""The contract of a decoder: it is what it declares, and a pure function of its windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from omnistage.decoders.base import AnyDecoder, Decoder, RowDecoder
from omnistage.decoders.frames import FrameFormat
from omnistage.decoders.window import WindowedDecoder
from omnistage.testing.checks import contract

if TYPE_CHECKING:
    from omnistage.decoders.frames import Frames
    from omnistage.request import Pcm

Make = Callable[[], AnyDecoder]

_TOLERANCE: Final = 1e-4
_FRAMES: Final = 60


def declares_itself(make: Make) -> None:
    """Sizes are positive whole numbers, contexts are not negative, ``decode`` is there."""
    decoder = make()
    takes_rows = bool(getattr(decoder, "rows_key", ""))
    kind = RowDecoder if takes_rows else Decoder
    assert isinstance(decoder, kind), "an attribute or decode() of the protocol is missing"
    sizes = [] if takes_rows else ["codebooks", "codebook_size"]
    for name in ("sample_rate", "hop_length", *sizes):
        value = getattr(decoder, name)
        assert type(value) is int, f"{name} must be an int, got {value!r}"
        assert value >= 1, f"{name} must be positive, got {value}"
    for name in ("left_context", "right_context"):
        value = getattr(decoder, name)
        assert type(value) is int, f"{name} must be an int, got {value!r}"
        assert value >= 0, f"{name} must not be negative, got {value}"
    assert isinstance(decoder.deterministic, bool), "deterministic must be a bool"


def accepts_every_index(make: Make) -> None:
    """The smallest and the largest index decode to finite samples; rows have none."""
    decoder = make()
    if isinstance(decoder, RowDecoder):
        return
    for index in (0, decoder.codebook_size - 1):
        codes = np.full((_FRAMES, decoder.codebooks), index, np.int64)
        pcm = WindowedDecoder(decoder).decode_clip(codes)
        assert np.isfinite(pcm).all(), f"index {index} decodes to samples that are not finite"


def decodes_a_single_frame(make: Make) -> None:
    """A clip of one frame has audio of one frame: no context is there at either end."""
    decoder = make()
    pcm = WindowedDecoder(decoder).decode_clip(_frames(decoder, 1))
    expected = decoder.hop_length
    assert len(pcm) == expected, f"one frame gave {len(pcm)} samples, hop_length is {expected}"


def ignores_its_batch_mates(make: Make) -> None:
    """A window decodes to the same audio alone and beside others, whatever their lengths."""
    decoder = make()
    if not _repeats_itself(decoder):
        return
    windows = [_frames(decoder, frames, seed=frames) for frames in _lengths(decoder)]
    together = decoder.decode(windows)
    for window, pcm in zip(windows, together, strict=True):
        alone = decoder.decode([window])[0]
        _same(pcm, alone, f"a window of {len(window)} frames decodes otherwise in a batch")


def keeps_nothing_between_calls(make: Make) -> None:
    """The same window decodes to the same audio before and after other windows."""
    decoder = make()
    if not _repeats_itself(decoder):
        return
    window = _frames(decoder, _lengths(decoder)[-1])
    before = decoder.decode([window])[0].copy()
    decoder.decode([_frames(decoder, n, seed=99) for n in _lengths(decoder)])
    _same(decoder.decode([window])[0], before, "a second decode of a window gave other audio")


def leaves_its_input_alone(make: Make) -> None:
    """Windows are views of a stream's frames: writing into one changes what comes later."""
    decoder = make()
    window = _frames(decoder, _FRAMES)
    before = window.copy()
    decoder.decode([window])
    assert np.array_equal(window, before), "decode() changed the window that it was given"


def sounds_the_same_in_any_chunks(make: Make) -> None:
    """The declared context is enough: chunks of any sizes together are the whole clip."""
    decoder = make()
    if not _repeats_itself(decoder):
        return
    windowed = WindowedDecoder(decoder)
    codes = _frames(decoder, _FRAMES)
    whole = windowed.decode_clip(codes, seed=3)
    for size in (1, 7, 25, _FRAMES):
        _same(_chunked(windowed, codes, size), whole, f"chunks of {size} frames sound otherwise")


DECODER_CONTRACT: Final = contract(
    declares_itself,
    accepts_every_index,
    decodes_a_single_frame,
    ignores_its_batch_mates,
    keeps_nothing_between_calls,
    leaves_its_input_alone,
    sounds_the_same_in_any_chunks,
)
"""Checks of a :class:`~omnistage.Decoder` or a :class:`~omnistage.RowDecoder`, renderers included.

Each takes what makes the decoder. Those that compare audio allow 1e-4. Of a decoder that says it is
not deterministic they compare it only where two decodes of one clip and seed agree; where they do
not, its context is not checked.
"""


def _repeats_itself(decoder: AnyDecoder) -> bool:
    if decoder.deterministic:
        return True
    windowed, codes = WindowedDecoder(decoder), _frames(decoder, _FRAMES)
    first, second = (windowed.decode_clip(codes, seed=3) for _ in range(2))
    return first.shape == second.shape and bool(np.allclose(first, second, atol=_TOLERANCE))


def _frames(decoder: AnyDecoder, frames: int, *, seed: int = 0) -> Frames:
    random = np.random.default_rng(seed)
    shape = FrameFormat(decoder).zeros(frames).shape
    if isinstance(decoder, RowDecoder):
        return random.standard_normal(shape, np.float32)
    return random.integers(0, decoder.codebook_size, shape)


def _lengths(decoder: AnyDecoder) -> list[int]:
    context = decoder.left_context + decoder.right_context
    return [context + 1, context + 4, context + 31]


def _chunked(windowed: WindowedDecoder, codes: Frames, size: int) -> Pcm:
    stream = windowed.open(3)
    pieces: list[Pcm] = []
    for start in range(0, len(codes), size):
        stream.push(codes[start : start + size])
        pieces += windowed.decode([(stream, size)])
    stream.finish()
    while not stream.done:
        pieces += windowed.decode([(stream, size)])
    return np.concatenate(pieces)


def _same(pcm: Pcm, expected: Pcm, what: str) -> None:
    assert len(pcm) == len(expected), f"{what}: {len(pcm)} samples, expected {len(expected)}"
    worst = float(np.abs(pcm - expected).max(initial=0.0))
    assert worst <= _TOLERANCE, f"{what}: samples differ by up to {worst:.2g}"

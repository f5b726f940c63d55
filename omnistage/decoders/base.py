"""What a decoder is: a batched function from frames to audio that declares the context it needs.

A decoder knows no request and no transport; :mod:`omnistage.decoders.window` cuts streams into the
windows that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.request import Codes, Pcm

Rows = npt.NDArray[np.float32]
"""What a decoder computes for a window: [frames * rows_per_frame, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a decoder declares, apart from the decoder: known before any weights are loaded.

    Attributes:
        sample_rate: As in :class:`Decoder`, and so are the others.
        hop_length: Samples of audio a frame stands for.
        codebooks: Indices in a frame.
        codebook_size: Every index is in ``[0, codebook_size)``.
        left_context: Frames before a frame that its audio depends on.
        right_context: Frames after a frame that its audio depends on.
        deterministic: Whether equal codes give equal audio.
    """

    sample_rate: int
    hop_length: int
    codebooks: int
    codebook_size: int
    left_context: int
    right_context: int
    deterministic: bool = True


@runtime_checkable
class Decoder(Protocol):
    """Turns windows of codec frames into audio, several streams in one call.

    ``decode`` is a pure function of the codes: called from one worker thread at a time, never with
    more frames of context than declared, and with the same answer whatever else is in the batch.

    Attributes:
        sample_rate: Samples a second of the audio it makes.
        hop_length: Samples of audio a frame stands for.
        codebooks: Indices in a frame.
        codebook_size: Every index is in ``[0, codebook_size)``.
        left_context: Frames before a frame that its audio depends on.
        right_context: Frames after a frame that its audio depends on (lookahead).
        deterministic: Whether equal codes (and seed) give equal audio.
    """

    sample_rate: int
    hop_length: int
    codebooks: int
    codebook_size: int
    left_context: int
    right_context: int
    deterministic: bool

    def decode(self, windows: Sequence[Codes]) -> Sequence[Rows]:
        """Decode each window on its own.

        Args:
            windows: Codebook indices, each [frames, codebooks], frames >= 1, lengths may differ.

        Returns:
            One array a window. Samples [frames * hop_length], or, for a decoder that is also a
            :class:`Renderer`, rows [frames * rows_per_frame, ...]. A decoder that loses samples at
            the end of a call pads there; the window's right context hides it.
        """
        ...


@runtime_checkable
class RowDecoder(Protocol):
    """A decoder that takes rows of floats, such as hidden states, instead of codes.

    All else is as with a :class:`Decoder`; a frame is a row.

    Attributes:
        rows_key: The key of the tensors of the AR stage's updates that it takes.
        sample_rate: Samples a second of the audio it makes.
        hop_length: Samples of audio a row stands for.
        left_context: Rows before a row that its audio depends on.
        right_context: Rows after a row that its audio depends on (lookahead).
        deterministic: Whether equal rows (and seed) give equal audio.
    """

    rows_key: str
    sample_rate: int
    hop_length: int
    left_context: int
    right_context: int
    deterministic: bool

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row; an attribute will do."""
        ...

    def decode(self, windows: Sequence[Rows]) -> Sequence[Rows]:
        """Decode each window on its own.

        Args:
            windows: float32, each [rows, ...], rows >= 1, lengths may differ.

        Returns:
            As :meth:`Decoder.decode`.
        """
        ...


AnyDecoder = Decoder | RowDecoder


@runtime_checkable
class Renderer(Protocol):
    """The second half of a decoder whose audio depends on the whole past, as a phase does.

    Its ``decode`` returns rows instead of samples; the window wrapper passes each stream's new
    rows, in order and each once, through ``render`` with that stream's state.

    Attributes:
        rows_per_frame: Rows that ``decode`` returns for a frame.
    """

    rows_per_frame: int

    def open(self, seed: int) -> Any:
        """A new stream's state; all randomness of the stream comes from ``seed``."""
        ...

    def render(self, state: Any, rows: Rows, *, final: bool) -> Pcm:
        """Turn a stream's next rows into the samples that are final now.

        Args:
            state: What :meth:`open` returned for this stream.
            rows: The next rows, [n * rows_per_frame, ...], possibly none.
            final: Whether these are the last ones; then everything held back is returned too.

        Returns:
            Samples [m]; over the whole stream ``frames * hop_length`` of them.
        """
        ...

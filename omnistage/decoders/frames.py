"""What a decoder's frames are: codes, or rows of floats; the one place that tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from omnistage.errors import ConfigError, DecoderError, ProtocolError
from omnistage.payload import numbers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from omnistage.decoders.base import AnyDecoder
    from omnistage.request import Payload

Frames = npt.NDArray[Any]
"""Frames in order: codes, int64 [frames, codebooks], or rows, float32 [frames, ...]."""

_EXACT: Final = ("float16", "bfloat16", "float32")  # as float32


class FrameFormat:
    """The format of a decoder's frames, as it declares it.

    Args:
        decoder: The decoder.

    Attributes:
        name: Names the decoder in errors.
        key: The key of the rows that it takes; empty for one that takes codes.
        width: Ids a frame; 0 for one that takes rows.

    Raises:
        ConfigError: It declares what cannot be.
    """

    def __init__(self, decoder: AnyDecoder) -> None:
        self.name = f"decoder {type(decoder).__name__}"
        self.key: str = getattr(decoder, "rows_key", "")
        self.width = 0
        self._size = 0
        if self.key:
            self._shape = _row_shape(self.name, decoder)
        else:
            self.width = declared(decoder, "codebooks", 1)
            self._size = declared(decoder, "codebook_size", 1)
            self._shape = (self.width,)
        self._dtype: Any = np.float32 if self.key else np.int64

    def zeros(self, count: int) -> Frames:
        """So many frames of zeros."""
        return np.zeros((count, *self._shape), self._dtype)

    def checked(self, frames: Frames) -> Frames:
        """Frames that a stream can take.

        Raises:
            DecoderError: Another shape or dtype, or an index out of range.
        """
        given = np.asarray(frames)
        if given.shape[1:] != self._shape or given.ndim == 0 or given.dtype.kind not in self._kinds:
            kind = "float rows" if self.key else "integer frames"
            shape = ", ".join(map(str, ("n", *self._shape)))
            raise DecoderError(
                f"{self.name} takes {kind} of shape [{shape}], got {given.dtype} "
                f"{list(given.shape)}"
            )
        if not self.key and given.size and not (given.min() >= 0 and given.max() < self._size):
            raise DecoderError(
                f"{self.name} takes indices in [0, {self._size}), got {given.min()} to "
                f"{given.max()}"
            )
        return given.astype(self._dtype, copy=False)

    def of_ids(self, ids: Sequence[int]) -> Frames:
        """Frames out of a flat list of indices.

        Raises:
            ProtocolError: They are no whole frames.
        """
        if len(ids) % self.width:
            raise ProtocolError(f"{len(ids)} ids are no whole frames of {self.width}")
        return np.array(ids, np.int64).reshape(-1, self.width)

    def of_rows(self, rows: Payload) -> Frames:
        """Rows as float32, the exact value of each number.

        Raises:
            DecoderError: A dtype of which that cannot be said, or another shape.
        """
        if rows.dtype not in _EXACT:
            raise DecoderError(
                f"{self.name} takes rows of {self.key!r} in {', '.join(_EXACT)}, got {rows.dtype}"
            )
        return self.checked(numbers(rows))

    def check_given(self, keys: Collection[str] | None, stage: str) -> None:
        """Check that an AR stage's updates carry the rows.

        Args:
            keys: The keys of their tensors; None if that is not known.
            stage: Names the stage.

        Raises:
            ConfigError: They do not.
        """
        if self.key and keys is not None and self.key not in keys:
            raise ConfigError(
                f"{self.name} takes rows of {self.key!r}, stage {stage!r} gives "
                f"{', '.join(map(repr, sorted(keys))) or 'none'}; a model gives them, and a "
                "processor passes them on or names its own in row_keys"
            )

    @property
    def _kinds(self) -> str:
        return "f" if self.key else "iu"


def declared(decoder: AnyDecoder, name: str, least: int) -> int:
    """A number that a decoder declares.

    Raises:
        ConfigError: It is no integer, or too small.
    """
    value = getattr(decoder, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"decoder {type(decoder).__name__} must declare {name} as an integer >= {least}, got "
            f"{value!r}"
        )
    return value


def _row_shape(name: str, decoder: AnyDecoder) -> tuple[int, ...]:
    key, shape = getattr(decoder, "rows_key", None), getattr(decoder, "row_shape", None)
    if not isinstance(key, str):
        raise ConfigError(f"{name} must declare rows_key as a string, got {key!r}")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 1 for n in shape):
        raise ConfigError(f"{name} must declare row_shape as positive integers, got {shape!r}")
    return shape

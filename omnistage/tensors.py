"""Tensors on the wire: what may cross, and whether a buffer is what its description says.

A tensor is a raw buffer in C order, little endian; nothing is allocated or used before its size is
checked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from omnistage.errors import ProtocolError
from omnistage.payload import ITEM_BYTES as ITEM_BYTES
from omnistage.payload import MAX_DIMENSIONS, Payload
from omnistage.request import TokenUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.wire import Update

MAX_BUFFER_BYTES: Final = 256 << 20
MAX_BUFFERS: Final = 16_384

Buffer = bytes | bytearray | memoryview


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that travels as a raw buffer after the header.

    Args:
        name: Key of the payload.
        dtype: One of :data:`ITEM_BYTES`.
        shape: Its shape; the first dimension is rows.
        first_row: Absolute position of its first row in the request.
        frame: Index of its buffer among the message's buffers, from 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    first_row: int
    frame: int


def check_tensors(claimed: Sequence[TensorInfo], buffers: Sequence[Buffer]) -> None:
    """Check that every buffer is what exactly one tensor says it is.

    Raises:
        ProtocolError: It is not, or there are too many.
    """
    if len(buffers) > MAX_BUFFERS:
        raise ProtocolError(f"{len(buffers)} buffers exceed the limit of {MAX_BUFFERS}")
    if sorted(info.frame for info in claimed) != list(range(len(buffers))):
        raise ProtocolError(f"{len(claimed)} tensors do not match {len(buffers)} buffers")
    for info in claimed:
        size = buffer_bytes(info)
        actual = memoryview(buffers[info.frame]).nbytes
        if size != actual:
            raise ProtocolError(
                f"tensor {info.name!r} {info.dtype}{list(info.shape)} needs {size} bytes, "
                f"its buffer has {actual}"
            )


def token_update(update: Update, buffers: Sequence[Buffer], stamp: int) -> TokenUpdate:
    """A published update as a reader without a decoder gets it.

    Args:
        update: The update.
        buffers: Those of its message, checked.
        stamp: Its message's.
    """
    tensors = {
        info.name: Payload(info.dtype, info.shape, info.first_row, buffers[info.frame])
        for info in update.tensors
    }
    return TokenUpdate(
        request_id=update.request_id,
        segment=update.segment,
        position=update.position,
        ids=update.ids,
        tensors=tensors,
        start=update.start,
        terminal=update.terminal,
        segment_end=update.segment_end,
        stamp=stamp,
    )


def buffer_bytes(info: TensorInfo) -> int:
    """Bytes that a tensor of this dtype and shape occupies.

    Raises:
        ProtocolError: An unknown dtype, a negative dimension, or more than
            :data:`MAX_BUFFER_BYTES`.
    """
    item = ITEM_BYTES.get(info.dtype)
    if item is None:
        raise ProtocolError(f"tensor {info.name!r} has unknown dtype {info.dtype!r}")
    if len(info.shape) > MAX_DIMENSIONS or any(n < 0 for n in info.shape) or info.first_row < 0:
        raise ProtocolError(f"tensor {info.name!r} has impossible shape {info.shape[:9]}")
    size = item * math.prod(info.shape)
    if size > MAX_BUFFER_BYTES:
        raise ProtocolError(
            f"tensor {info.name!r} of {size} bytes exceeds the limit of {MAX_BUFFER_BYTES}"
        )
    return size

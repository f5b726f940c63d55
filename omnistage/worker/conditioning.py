"""Tensors that a request brings for its model, between the AR stage and vLLM's workers.

They travel as bytes in ``extra_args``: vLLM loses or dies of tensors there.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omnistage.request import Payload

CONDITIONING: Final = "omnistage_conditioning"
"""In a request's ``extra_args``: what :func:`encode_conditioning` returned."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, _Tensor])


def encode_conditioning(tensors: Mapping[str, Payload]) -> bytes:
    """A request's conditioning as it travels; equal tensors make equal bytes."""
    return _encoder.encode(
        {name: _Tensor(t.dtype, t.shape, bytes(t.data)) for name, t in sorted(tensors.items())}
    )


def decode_conditioning(raw: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a request, on the host.

    Raises:
        ValueError: The bytes are no conditioning.
    """
    tensors = {}
    for name, tensor in _decoder.decode(raw).items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {name!r} has unknown dtype {tensor.dtype!r}")
        if len(tensor.data) != math.prod(tensor.shape) * dtype.itemsize:
            raise ValueError(
                f"tensor {name!r} {tensor.dtype}{list(tensor.shape)} has {len(tensor.data)} bytes"
            )
        flat = torch.frombuffer(bytearray(tensor.data), dtype=dtype) if tensor.data else None
        tensors[name] = (torch.empty(0, dtype=dtype) if flat is None else flat).reshape(
            tensor.shape
        )
    return tensors


def cache_salt(raw: bytes) -> str:
    """What keeps requests of other conditioning out of one's part of vLLM's prefix cache."""
    return hashlib.sha256(raw).hexdigest()

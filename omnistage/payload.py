"""Tensors as plain bytes, which is how they cross every border, and how callers' become so.

Knows numpy, and torch's tensors by their shape: torch is not imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from omnistage.errors import InvalidRequest

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes an element of each dtype that may cross."""

MAX_DIMENSIONS: Final = 8
MAX_GIVEN_BYTES: Final = 64 << 20
"""What a caller may give with one request, all its tensors together."""
MAX_GIVEN: Final = 64
"""Tensors of conditioning."""

FLOATS: Final = ("float16", "bfloat16", "float32", "float64")


class Payload(msgspec.Struct, frozen=True):
    """One tensor of one request in one step, as plain bytes.

    Args:
        dtype: Name of its dtype, as torch spells it.
        shape: Its shape; the first dimension is rows.
        first_row: Absolute position of its first row in the request.
        data: The elements, C order.
    """

    dtype: str
    shape: tuple[int, ...]
    first_row: int
    data: bytes | bytearray | memoryview


class TorchTensor(Protocol):
    """What is asked of a tensor of torch's."""

    @property
    def dtype(self) -> Any:
        """Its dtype, whose text ends in the name."""
        ...

    def detach(self) -> Any:
        """The same without its history."""
        ...


Array = npt.NDArray[Any] | TorchTensor | Payload
"""A tensor as a caller gives it: of numpy (with ml_dtypes bfloat16 too), of torch, or as bytes."""


def is_array(value: object) -> bool:
    """Whether a value is an :data:`Array`."""
    return isinstance(value, Payload | np.ndarray) or _is_torch(value)


def payload_of(value: object, what: str, parameter: str) -> Payload:
    """A caller's tensor as bytes of our own, C order, bit for bit.

    Args:
        value: The tensor.
        what: Names it in errors.
        parameter: The argument it came in.

    Raises:
        InvalidRequest: It is none, has a dtype that does not cross, or its parts disagree.
    """
    try:
        made = _payload(value)
        if made is None:
            raise TypeError(
                f"is a {type(value).__name__}; give a numpy array, a torch tensor or a Payload"
            )
        _check(made)
    except Exception as error:
        raise InvalidRequest(f"{what} {error}", parameter=parameter) from error
    return made


def conditioning_of(given: object) -> dict[str, Payload] | None:
    """A request's conditioning as bytes; None if there is none.

    Raises:
        InvalidRequest: It is no mapping of names to tensors, or too much of it.
    """
    if not isinstance(given, Mapping | None):
        raise _refused(f"must map names to tensors, got {type(given).__name__}")
    if not given:
        return None
    if len(given) > MAX_GIVEN:
        raise _refused(f"has {len(given)} tensors, at most {MAX_GIVEN} may be")
    made = {}
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 64:
            raise _refused(f"names are identifiers of at most 64 characters, got {name!r}")
        made[name] = payload_of(value, f"conditioning[{name!r}]", "conditioning")
    size = sum(len(payload.data) for payload in made.values())
    if size > MAX_GIVEN_BYTES:
        raise _refused(f"has {size} bytes, at most {MAX_GIVEN_BYTES} may be")
    return made


def embeddings_of(given: object) -> Payload:
    """Embeddings that are a prompt, [positions, hidden size], as bytes.

    Raises:
        InvalidRequest: They are no rows of finite floating-point numbers, none, or too many.
    """
    made = payload_of(given, "the prompt", "prompt")
    problem = None
    if made.dtype not in FLOATS or len(made.shape) != 2 or not made.shape[1]:
        problem = (
            "a prompt of embeddings is [positions, hidden size] in floating point, got "
            f"{made.dtype} {list(made.shape)}; token ids are a list of int"
        )
    elif not made.shape[0]:
        problem = "the prompt has no positions; give at least one"
    elif len(made.data) > MAX_GIVEN_BYTES:
        problem = f"the prompt has {len(made.data)} bytes, at most {MAX_GIVEN_BYTES} may be"
    elif not np.isfinite(numbers(made)).all():
        problem = "the prompt's embeddings are not all finite"
    if problem is not None:
        raise InvalidRequest(problem, parameter="prompt")
    return made


def numbers(payload: Payload) -> npt.NDArray[Any]:
    """A payload's elements, read-only where its bytes are; bfloat16 as float32, which is exact.

    Raises:
        ValueError: A dtype that numpy has not.
    """
    if payload.dtype == "bfloat16":
        halves = np.frombuffer(payload.data, "<u2").astype("<u4")
        return (halves << 16).view(np.float32).reshape(payload.shape)
    if payload.dtype.startswith("float8"):
        raise ValueError(f"{payload.dtype} cannot be read")
    flat: npt.NDArray[Any] = np.frombuffer(payload.data, payload.dtype)
    return flat.reshape(payload.shape)


def rows_from(payload: Payload, position: int) -> Payload:
    """A payload's rows from a position on, without a copy; all of them if it begins there."""
    skipped, count = position - payload.first_row, payload.shape[0]
    if skipped <= 0:
        return payload
    data = memoryview(payload.data).cast("B")
    size = len(data) // count
    shape = (count - skipped, *payload.shape[1:])
    return Payload(payload.dtype, shape, position, data[skipped * size :])


def _is_torch(value: object) -> bool:
    return callable(getattr(value, "detach", None)) and str(getattr(value, "dtype", "")).startswith(
        "torch."
    )


def _payload(value: Any) -> Payload | None:
    if isinstance(value, Payload):
        if type(value.data) is bytes and type(value.shape) is tuple and not value.first_row:
            return value  # most likely made here before: an input that is split copies nothing
        view = memoryview(value.data)
        if not view.c_contiguous:
            raise ValueError("has data that is not contiguous")
        return Payload(value.dtype, tuple(value.shape), 0, bytes(view))
    if isinstance(value, np.ndarray):
        native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
        return Payload(native.dtype.name, tuple(native.shape), 0, native.tobytes("C"))
    if _is_torch(value):
        torch = sys.modules["torch"]
        name = str(value.dtype).removeprefix("torch.")
        host = value.detach().cpu().contiguous()
        flat = host.reshape(-1).view(torch.uint8).numpy()
        return Payload(name, tuple(host.shape), 0, flat.tobytes())
    return None


def _check(payload: Payload) -> None:
    item = ITEM_BYTES.get(payload.dtype)
    if item is None:
        raise ValueError(f"has dtype {payload.dtype!r}; known: {', '.join(ITEM_BYTES)}")
    shape = payload.shape
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"has the impossible shape {shape[:9]}")
    if len(payload.data) != item * math.prod(payload.shape):
        raise ValueError(
            f"{payload.dtype}{list(payload.shape)} has {len(payload.data)} bytes, not "
            f"{item * math.prod(payload.shape)}"
        )


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"conditioning: {problem}", parameter="conditioning")

"""Tensors of callers as bytes: exact, owned, and refused with the argument's name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from omnistage import StageInput
from omnistage.adapters.input import EngineInput, TextInput, conditioning, split
from omnistage.errors import InvalidRequest
from omnistage.payload import ITEM_BYTES, MAX_GIVEN_BYTES, conditioning_of, embeddings_of, numbers
from omnistage.request import Payload


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def given(value: Any) -> Payload:
    made = conditioning_of({"voice": value})
    assert made is not None
    return made["voice"]


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_tensor_of_torchs_keeps_its_bits(dtype: str) -> None:
    flat = torch.arange(12 * ITEM_BYTES[dtype], dtype=torch.uint8)
    if dtype == "bool":
        flat %= 2
    tensor = flat.view(getattr(torch, dtype)).reshape(3, 4)
    assert given(tensor) == Payload(dtype, (3, 4), 0, bits(tensor))
    columns = tensor.T  # not contiguous
    assert given(columns) == Payload(dtype, (4, 3), 0, bits(columns))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64"])
def test_an_array_of_numpys_keeps_its_values_in_c_order(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    assert given(array) == Payload(dtype, (3, 4), 0, array.tobytes())
    assert given(array.T) == Payload(dtype, (4, 3), 0, array.T.tobytes("C"))
    swapped = array.astype(array.dtype.newbyteorder(">"))
    assert given(swapped) == given(array)


def test_a_parameter_with_a_history_and_a_number_alone_are_tensors_too() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert given(weight * 2).data == np.full(2, 2, np.float32).tobytes()
    assert given(torch.tensor(1.5)).shape == ()
    assert given(np.zeros((0, 3), np.float32)) == Payload("float32", (0, 3), 0, b"")


def test_what_the_caller_does_later_changes_nothing() -> None:
    array, tensor = np.ones(3, np.float32), torch.ones(3)
    raw = bytearray(array.tobytes())
    asked = StageInput(
        prompt="x", conditioning={"a": array, "b": tensor, "c": Payload("float32", (3,), 7, raw)}
    )
    array[:], tensor[:], raw[:] = 0, 0, bytes(12)
    one = Payload("float32", (3,), 0, np.ones(3, np.float32).tobytes())
    assert asked.conditioning == {"a": one, "b": one, "c": one}
    assert StageInput(prompt="x", conditioning={}).conditioning is None


@pytest.mark.parametrize(
    ("conditioning", "message"),
    [
        ([1], "must map names to tensors, got list"),
        ({"a b": np.zeros(1)}, "names are identifiers"),
        ({1: np.zeros(1)}, "names are identifiers"),
        ({"a" * 65: np.zeros(1)}, "names are identifiers"),
        ({f"t{i}": np.zeros(1) for i in range(65)}, "65 tensors, at most 64"),
        ({"a": [1.0, 2.0]}, "is a list; give a numpy array"),
        ({"a": 1.0}, "is a float"),
        ({"a": np.zeros(1, np.complex64)}, "dtype 'complex64'; known: bool, uint8"),
        ({"a": np.array(["x"])}, "dtype 'str"),
        ({"a": np.array([object()])}, "dtype 'object'"),
        ({"a": np.zeros((1,) * 9)}, "impossible shape"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "dtype 'complex64'"),
        ({"a": torch.zeros(2, device="meta")}, "conditioning"),
        ({"a": torch.zeros(2).to_sparse()}, "conditioning"),
        ({"a": Payload("float32", (2,), 0, b"1234")}, "has 4 bytes, not 8"),
        ({"a": Payload("float32", (-1,), 0, b"")}, "impossible shape"),
        ({"a": Payload("float32", ("1",), 0, b"1234")}, "impossible shape"),  # type: ignore[arg-type]
        ({"a": Payload("nothing", (1,), 0, b"1")}, "dtype 'nothing'"),
        ({"a": Payload("uint8", (2,), 0, memoryview(b"1234")[::2])}, "not contiguous"),
        (
            {"a": np.zeros(MAX_GIVEN_BYTES // 2, np.uint8), "b": np.zeros(MAX_GIVEN_BYTES)},
            "bytes, at most 67108864",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conditioning_that_cannot_be_is_refused(conditioning: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        StageInput(prompt="x", conditioning=conditioning)
    assert raised.value.parameter == "conditioning"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_embeddings_are_a_prompt(dtype: str) -> None:
    rows = torch.ones((3, 4), dtype=getattr(torch, dtype))
    assert StageInput(prompt=rows).prompt == Payload(dtype, (3, 4), 0, bits(rows))
    again = StageInput(prompt=embeddings_of(rows))
    assert again.prompt == embeddings_of(rows)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array([1, 2, 3]), r"got int64 \[3\]; token ids are a list"),
        (np.zeros((2, 3), np.int64), "floating point"),
        (np.zeros(4, np.float32), r"got float32 \[4\]"),
        (np.zeros((1, 2, 3), np.float32), "floating point"),
        (np.zeros((0, 3), np.float32), "no positions"),
        (np.zeros((3, 0), np.float32), "hidden size"),
        (np.full((2, 3), math.nan, np.float32), "not all finite"),
        (torch.full((2, 3), math.inf, dtype=torch.bfloat16), "not all finite"),
        (np.zeros((4097, 4096), np.float32), "at most 67108864"),
        (torch.zeros((2, 3), dtype=torch.float8_e5m2), "floating point"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_prompt_of_other_arrays_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        StageInput(prompt=prompt)
    assert raised.value.parameter == "prompt"
    with pytest.raises(InvalidRequest, match=message):
        EngineInput(prompt=prompt, sampling={})


def test_bfloat16_is_read_as_the_float32_of_its_value() -> None:
    values = torch.tensor([[1.0, -2.5], [3e38, 0.1]], dtype=torch.bfloat16)
    assert np.array_equal(numbers(given(values)), values.float().numpy())
    codes = np.array([[1, -2]], np.int16)
    assert np.array_equal(numbers(given(codes)), codes)
    with pytest.raises(ValueError, match="float8_e5m2 cannot be read"):
        numbers(given(torch.zeros(1, dtype=torch.float8_e5m2)))


class TestAdapters:
    voice = Payload("uint8", (1,), 0, b"v")

    async def test_the_plain_adapter_passes_embeddings_on(self) -> None:
        rows = np.ones((2, 3), np.float32)
        made = await TextInput().adapt(StageInput(prompt=rows))
        assert made.prompt == embeddings_of(rows)

    def test_an_adapter_that_says_nothing_leaves_the_requests_conditioning(self) -> None:
        asked = StageInput(prompt="x", conditioning={"voice": self.voice})
        other = np.zeros(1, np.uint8)
        assert conditioning(asked, EngineInput(prompt="x", sampling={})) == {"voice": self.voice}
        made = EngineInput(prompt="x", sampling={}, conditioning={"other": other})
        assert conditioning(asked, made) == {"other": Payload("uint8", (1,), 0, b"\0")}
        assert conditioning(asked, EngineInput(prompt="x", sampling={}, conditioning={})) == {}
        assert conditioning(StageInput(prompt="x"), EngineInput(prompt="x", sampling={})) == {}

    def test_every_part_of_a_split_input_keeps_the_conditioning(self) -> None:
        class Words(TextInput):
            def split(self, stage_input: StageInput) -> list[StageInput]:
                assert isinstance(stage_input.prompt, str)
                return [StageInput(prompt=word) for word in stage_input.prompt.split()]

        asked = StageInput(prompt="a b", conditioning={"voice": self.voice})
        parts = split(Words(), asked)
        assert [part.prompt for part in parts] == ["a", "b"]
        assert [part.conditioning for part in parts] == [{"voice": self.voice}] * 2
        assert split(TextInput(), asked) == [asked]

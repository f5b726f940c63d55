"""Input adapters: what is passed on, and what is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.adapters.input import InputAdapter, TextInput, check_consumable
from omnistage.errors import InvalidRequest
from omnistage.request import ChunkPolicy, StageInput


async def test_text_and_ids_pass_with_the_requests_sampling_over_the_defaults() -> None:
    adapter = TextInput({"temperature": 0.3, "max_tokens": 9})
    out = await adapter.adapt(StageInput(prompt="hello", sampling={"max_tokens": 5}, seed=4))
    assert (out.prompt, out.sampling) == (
        "hello",
        {"temperature": 0.3, "max_tokens": 5, "seed": 4},
    )
    assert isinstance(adapter, InputAdapter)


async def test_the_callers_objects_are_copied() -> None:
    ids, sampling = [1, 2], {"max_tokens": 5}
    out = await TextInput().adapt(StageInput(prompt=ids, sampling=sampling))
    out.prompt.append(3)  # type: ignore[union-attr]
    out.sampling["x"] = 1
    assert (ids, sampling) == ([1, 2], {"max_tokens": 5})


@pytest.mark.parametrize(
    "prompt", ["", "  \n", [], [1, -2], [1, "2"], [1.0], [True], 7, None, b"ids"]
)
async def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await TextInput().adapt(StageInput(prompt=prompt))
    assert raised.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"sampling": {"extra_args": {}}}, "extra_args"),
        ({"sampling": {"output_kind": 1}}, "output_kind"),
        ({"seed": -1}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"seed": 2**63}, "seed"),
    ],
)
async def test_sampling_that_the_stage_owns_or_cannot_use_is_refused(
    given: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await TextInput().adapt(StageInput(prompt="x", **given))
    assert raised.value.parameter == parameter


@pytest.mark.parametrize(
    "given",
    [
        {"sampling": [1]},
        {"voice": 3},
        {"chunks": {"first": 1}},
        {"priority": "high"},
        {"priority": True},
        {"priority": 2**70},
        {"voice": "\udcff"},
        {"voice": "x" * 5000},
        {"trace_headers": {"a": "\ud800"}},
        {"trace_headers": "x"},
        {"trace_headers": {"a": 1}},
    ],
    ids=str,
)
def test_an_option_of_another_type_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        StageInput(prompt="x", **given)
    assert raised.value.parameter == next(iter(given))


@pytest.mark.parametrize("sampling", [{"stop": ["x"]}, {"stop": "x"}, {"n": 2}, {"n": 0}])
def test_what_harms_a_downstream_consumer_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check_consumable(sampling)


def test_stop_token_ids_pass() -> None:
    check_consumable({"stop_token_ids": [3], "n": 1, "stop": []})


@pytest.mark.parametrize(
    "bad",
    [
        {"first": 0},
        {"first": 40},
        {"growth": 0.5},
        {"growth": float("nan")},
        {"growth": float("inf")},
        {"growth": 1e200},
        {"first": 1.5},
        {"first": True},
        {"steady": 2**70},
    ],
)
def test_chunk_sizes_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        ChunkPolicy(**bad)  # type: ignore[arg-type]


def test_chunk_sizes_never_overflow() -> None:
    assert ChunkPolicy(first=1, growth=1_000_000, steady=7).size(10**6) == 7


def test_chunk_sizes_grow_to_the_steady_one_and_stay() -> None:
    policy = ChunkPolicy(first=3, growth=2, steady=20)
    assert [policy.size(k) for k in (0, 1, 2, 3, 4, 10_000)] == [3, 6, 12, 20, 20, 20]

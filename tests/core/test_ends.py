"""Which requests could not end, by what their model's checkpoint declares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from omnistage.core.ends import Ends
from omnistage.errors import InvalidRequest

SIZE = 3072
OTHER_HEADS = 151_645


@pytest.mark.parametrize(
    ("declared", "tokenizer", "reachable"),
    [
        (2, None, True),
        ([OTHER_HEADS, 7], None, True),
        (OTHER_HEADS, SimpleNamespace(eos_token_id=7), True),
        (OTHER_HEADS, SimpleNamespace(eos_token_id=None), False),
        (None, SimpleNamespace(eos_token_id=SIZE), False),
        ([-1], None, False),
        (None, None, False),
    ],
)
def test_a_model_ends_by_itself_if_one_of_its_end_ids_is_in_its_head(
    declared: Any, tokenizer: Any, reachable: bool
) -> None:
    ends = Ends(declared, tokenizer, SIZE)
    assert ends.reachable is reachable
    unlimited = SamplingParams(max_tokens=None)
    if reachable:
        ends.check(unlimited)
    else:
        with pytest.raises(InvalidRequest, match="set stop_token_ids or max_tokens"):
            ends.check(unlimited)
        ends.check(SamplingParams(max_tokens=9))
        ends.check(SamplingParams(max_tokens=None, stop_token_ids=[5]))
        ends.check(SamplingParams(max_tokens=None, ignore_eos=True))


@pytest.mark.parametrize(
    ("declared", "refused"), [(2, False), (OTHER_HEADS, True), ([2, OTHER_HEADS], True)]
)
def test_min_tokens_is_refused_where_one_end_id_is_outside_the_head(
    declared: Any, refused: bool
) -> None:
    ends = Ends(declared, None, SIZE)
    params = SamplingParams(min_tokens=2, max_tokens=9)
    if refused:
        with pytest.raises(InvalidRequest, match=str(OTHER_HEADS)):
            ends.check(params)
    else:
        ends.check(params)

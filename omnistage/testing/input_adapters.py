"""The contract of an input adapter: it converts, keeps nothing, and refuses with a typed error."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from omnistage.adapters.input import RESERVED, EngineInput, InputAdapter
from omnistage.errors import InvalidRequest
from omnistage.request import Payload, StageInput
from omnistage.testing.checks import contract

Make = Callable[[], InputAdapter]

_ASKED: Final = StageInput(prompt="Hello world.")


def makes_an_engine_input(make: Make) -> None:
    """A prompt of text or of ids, and sampling fields that the AR stage does not set itself."""
    assert isinstance(make(), InputAdapter), "a method of the protocol is missing"
    made = _adapt(make, _ASKED)
    assert isinstance(made, EngineInput), f"adapt() returned {type(made).__name__}"
    assert made.prompt, "the prompt is empty"
    if not isinstance(made.prompt, str | Payload):
        assert isinstance(made.prompt, list), "a prompt of ids must be a list"
        assert all(type(token) is int and token >= 0 for token in made.prompt), (
            "a prompt of ids must be a list of non-negative int"
        )
    taken = set(made.sampling) & set(RESERVED)
    assert not taken, f"the AR stage sets {sorted(taken)} itself"


def lets_the_request_choose(make: Make) -> None:
    """A request's own sampling fields and seed go before the adapter's."""
    sampling = {"temperature": 0.123, "max_tokens": 7}
    made = _adapt(make, replace(_ASKED, sampling=sampling, seed=11))
    for name, value in {**sampling, "seed": 11}.items():
        assert made.sampling.get(name) == value, f"the request's own {name} is lost"


def leaves_the_callers_objects_alone(make: Make) -> None:
    """What the caller gave is not changed, and what comes back is not the caller's."""
    sampling = {"stop_token_ids": [2], "temperature": 0.5}
    asked = replace(_ASKED, sampling=sampling)
    before = copy.deepcopy(sampling)
    made = _adapt(make, asked)
    made.sampling["temperature"] = 9.0
    if isinstance(made.prompt, list):
        made.prompt.append(0)
    assert sampling == before, "it changed, or handed on, the caller's own sampling"
    again = _adapt(make, asked)
    assert again.sampling["temperature"] == 0.5, "it keeps what it gave to an earlier request"


def converts_several_at_once(make: Make) -> None:
    """One instance serves all requests of a stage, whose conversions overlap."""

    async def both() -> tuple[list[EngineInput], list[EngineInput]]:
        adapter = make()
        await adapter.start()
        asked = [StageInput(prompt=text) for text in ("Hello.", "Good morning.") * 4]
        alone = [await adapter.adapt(one) for one in asked]
        return alone, list(await asyncio.gather(*map(adapter.adapt, asked)))

    alone, together = asyncio.run(both())
    assert alone == together, "it converts otherwise while other conversions run"


def refuses_an_empty_text(make: Make) -> None:
    """Nothing to say is InvalidRequest, before anything is sent."""
    for text in ("", " \n"):
        try:
            _adapt(make, StageInput(prompt=text))
        except InvalidRequest:
            continue
        raise AssertionError(f"the text {text!r} must be refused with InvalidRequest")


INPUT_ADAPTER_CONTRACT: Final = contract(
    makes_an_engine_input,
    lets_the_request_choose,
    leaves_the_callers_objects_alone,
    converts_several_at_once,
    refuses_an_empty_text,
)
"""Checks of an :class:`~omnistage.InputAdapter` that takes text.

Each takes what makes the adapter; ``start`` is called before the first conversion.
"""


def _adapt(make: Make, asked: StageInput) -> EngineInput:
    async def adapt() -> EngineInput:
        adapter = make()
        await adapter.start()
        return await adapter.adapt(asked)

    return asyncio.run(adapt())

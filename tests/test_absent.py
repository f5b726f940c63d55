"""What omnistage does not have yet is refused where it is asked for, never half done."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import omnistage
from omnistage.adapters.input import TextInput
from omnistage.adapters.processor import TokenUpdates
from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.errors import InvalidRequest
from omnistage.request import StageInput
from tests.stages.factories import Decoder

PACKAGE = Path(omnistage.__file__).parent


async def text_in_pieces() -> AsyncIterator[str]:
    yield "Hello "
    yield "world."


async def test_an_input_adapter_takes_no_text_that_comes() -> None:
    """That is cut into sentences before it gets there."""
    for prompt in (text_in_pieces(), iter([1, 2, 3])):
        with pytest.raises(InvalidRequest) as raised:
            await TextInput().adapt(StageInput(prompt=prompt))  # type: ignore[arg-type]
        assert raised.value.parameter == "prompt"


@pytest.mark.parametrize("field", ["replicas", "num_replicas", "endpoints"])
def test_a_stage_has_one_replica(field: str) -> None:
    more: Any = {field: 2}
    with pytest.raises(TypeError, match=field):
        ARStageConfig(model="m", processor=TokenUpdates(), **more)
    with pytest.raises(TypeError, match=field):
        DecoderStageConfig(build=Decoder, **more)


def test_a_payload_is_put_on_an_output_in_one_place_and_taken_off_in_one() -> None:
    users = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search("PAYLOAD_ATTRIBUTE|omnistage_payload", path.read_text())
    ]
    assert users == [
        "core/collector.py",
        "worker/contract.py",
        "worker/mixin.py",
        "worker/payload.py",
    ]

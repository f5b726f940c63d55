"""What a model may declare, and what is refused with its class's name."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.errors import ConfigError
from omnistage.worker.contract import ModelContract, Occurrence, contract_of


def model(**attributes: Any) -> type:
    return type("Talker", (), attributes)


def test_a_model_that_declares_nothing_gives_hidden_states_and_runs_on_vllms_own_worker() -> None:
    contract = contract_of(model())
    assert contract == ModelContract(model="Talker")
    assert contract.has_payload
    assert not contract.extends_vllm
    assert not contract.only_prefill
    kept = contract_of(model(omni_pooler_payload_include_hidden=False))
    assert not kept.has_payload
    assert not kept.extends_vllm


def test_outputs_and_hooks_are_read_off_the_class() -> None:
    contract = contract_of(
        model(
            omni_pooler_payload_include_hidden=False,
            omni_outputs={"a": "token", "b": "request", "c": "prefill"},
            omni_preprocess=lambda self, spans: None,
        )
    )
    assert contract.outputs == {
        "a": Occurrence.TOKEN,
        "b": Occurrence.REQUEST,
        "c": Occurrence.PREFILL,
    }
    assert (contract.preprocesses, contract.postprocesses) == (True, False)
    assert contract.extends_vllm
    assert contract.has_payload
    assert not contract.only_prefill


def test_behind_a_prompt_nothing_is_due_where_all_outputs_are_the_prompts() -> None:
    outputs = {"a": "prefill"}
    assert contract_of(model(omni_outputs=outputs), include_hidden=False).only_prefill
    assert not contract_of(model(omni_outputs=outputs)).only_prefill


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ({"omni_pooler_payload_include_hidden": 1}, "include_hidden must be True or False, got 1"),
        ({"omni_outputs": ["codes"]}, r"omni_outputs must map keys .* got \['codes'\]"),
        ({"omni_outputs": {"codes": "step"}}, r"\['codes'\] must be .* got 'step'"),
        ({"omni_outputs": {"codes": None}}, r"\['codes'\] must be .* got None"),
        ({"omni_outputs": {"hidden": "token"}}, "other than 'hidden', got 'hidden'"),
        ({"omni_outputs": {"a b": "token"}}, "got 'a b'"),
        ({"omni_outputs": {1: "token"}}, "got 1"),
        ({"omni_outputs": {"a" * 65: "token"}}, "at most 64 characters"),
        ({"omni_preprocess": True}, "omni_preprocess must be a method"),
        ({"omni_postprocess": None}, "omni_postprocess must be a method"),
    ],
)
def test_what_cannot_be_declared_is_refused_with_the_models_name(
    attributes: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        contract_of(model(**attributes))
    assert "Talker." in str(refused.value)

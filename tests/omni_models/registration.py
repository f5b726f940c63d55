"""What vLLM's ``general_plugins`` entry point calls in every process of an engine under test."""

from __future__ import annotations

from typing import Final

NAMES: Final = (
    "OmniPlain",
    "OmniRows",
    "OmniTokensOnly",
    "OmniPrefill",
    "OmniPostprocess",
    "OmniConditioned",
    "OmniViews",
    "OmniRaises",
    "OmniBroken",
)


def register() -> None:
    """Register the models by name; they are imported where one of them runs."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in NAMES:
        ModelRegistry.register_model(name, f"tests.omni_models.models:{name}")

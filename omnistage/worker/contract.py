"""What a model declares beside vLLM's own interfaces, read off its class before an engine starts.

A model needs none of it, and imports nothing of omnistage for it: `docs/models.md` is the contract.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from omnistage.errors import ConfigError

HIDDEN: Final = "hidden"
"""The key of the rows of hidden states, [rows, hidden size] in the model's dtype."""

PAYLOAD_OPTIONS: Final = "omnistage_payload"
"""Of vLLM's ``additional_config``: what a stage's configuration says of payloads."""

_INCLUDE_HIDDEN: Final = "omni_pooler_payload_include_hidden"
_OUTPUTS: Final = "omni_outputs"
_PREPROCESS: Final = "omni_preprocess"
_POSTPROCESS: Final = "omni_postprocess"


class Occurrence(enum.StrEnum):
    """How often an output of a forward pass leaves the worker, and what its rows are."""

    TOKEN = "token"  # noqa: S105 of a model, not of a login
    """A row each position, as hidden states have."""

    REQUEST = "request"
    """A row each request of the batch: one leaves with every step that samples."""

    PREFILL = "prefill"
    """A row each position: those of the prompt leave once, together, when it is computed."""


class ModelContract(msgspec.Struct, frozen=True, kw_only=True):
    """What a model of an engine gives and takes.

    Args:
        model: Name of its class.
        include_hidden: Whether rows of hidden states are part of a payload.
        outputs: What its forward pass returns beside hidden states, by key.
        preprocesses: Whether it sees its batch before a forward pass (``omni_preprocess``): the
            requests' conditioning with it.
        postprocesses: Whether it sees it again afterwards (``omni_postprocess``).
    """

    model: str
    include_hidden: bool = True
    outputs: dict[str, Occurrence] = {}
    preprocesses: bool = False
    postprocesses: bool = False

    @property
    def extends_vllm(self) -> bool:
        """Whether vLLM's own worker could not run the model, or not as it declares."""
        return bool(self.outputs) or self.preprocesses or self.postprocesses

    @property
    def has_payload(self) -> bool:
        """Whether a request that wants a payload gets any."""
        return self.include_hidden or bool(self.outputs)

    @property
    def only_prefill(self) -> bool:
        """Whether nothing of a payload is due behind a request's prompt."""
        return not self.include_hidden and set(self.outputs.values()) == {Occurrence.PREFILL}


def contract_of(model: type, include_hidden: bool | None = None) -> ModelContract:
    """The contract of a model class.

    Args:
        model: The class, as vLLM's registry resolves it.
        include_hidden: What the stage's configuration says; None leaves it to the model.

    Raises:
        ConfigError: It declares what cannot be.
    """
    name = model.__name__
    hidden = getattr(model, _INCLUDE_HIDDEN, True)
    if not isinstance(hidden, bool):
        raise ConfigError(f"{name}.{_INCLUDE_HIDDEN} must be True or False, got {hidden!r}")
    declared = getattr(model, _OUTPUTS, {})
    if not isinstance(declared, Mapping):
        raise ConfigError(
            f"{name}.{_OUTPUTS} must map keys to 'token', 'request' or 'prefill', got {declared!r}"
        )
    for hook in (_PREPROCESS, _POSTPROCESS):
        if not callable(getattr(model, hook, contract_of)):
            raise ConfigError(f"{name}.{hook} must be a method")
    return ModelContract(
        model=name,
        include_hidden=hidden if include_hidden is None else include_hidden,
        outputs={_key(name, key): _occurrence(name, key, n) for key, n in declared.items()},
        preprocesses=hasattr(model, _PREPROCESS),
        postprocesses=hasattr(model, _POSTPROCESS),
    )


def _key(model: str, key: Any) -> str:
    if not isinstance(key, str) or not key.isidentifier() or len(key) > 64 or key == HIDDEN:
        raise ConfigError(
            f"{model}.{_OUTPUTS}: a key is an identifier of at most 64 characters other than "
            f"{HIDDEN!r}, got {key!r}"
        )
    return key


def _occurrence(model: str, key: str, value: Any) -> Occurrence:
    try:
        return Occurrence(value)
    except ValueError:
        raise ConfigError(
            f"{model}.{_OUTPUTS}[{key!r}] must be 'token', 'request' or 'prefill', got {value!r}"
        ) from None

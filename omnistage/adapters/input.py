"""Input adapters: from what a caller gives to what vLLM takes.

They produce a prompt and sampling fields as plain values; the AR stage makes vLLM's own objects of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omnistage.errors import InvalidRequest
from omnistage.payload import Payload, conditioning_of, embeddings_of, is_array

if TYPE_CHECKING:
    from omnistage.payload import Array
    from omnistage.request import StageInput

RESERVED = ("extra_args", "output_kind")
"""Sampling fields that the AR stage sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInput:
    """A prompt and how to sample from it.

    Args:
        prompt: Text for the engine's tokenizer, prompt token ids, or embeddings, [positions, hidden
            size].
        sampling: Fields of vLLM's ``SamplingParams``.
        conditioning: Tensors for the model, by name; None for those of the stage input.

    Raises:
        InvalidRequest: A tensor that cannot cross.
    """

    prompt: str | list[int] | Array
    sampling: dict[str, Any]
    conditioning: Mapping[str, Array] | None = None

    def __post_init__(self) -> None:
        if is_array(self.prompt):
            object.__setattr__(self, "prompt", embeddings_of(self.prompt))
        if self.conditioning is not None:
            object.__setattr__(self, "conditioning", conditioning_of(self.conditioning) or {})


@runtime_checkable
class InputAdapter(Protocol):
    """Turns a stage input into an engine input; one instance serves all requests of a stage."""

    async def start(self) -> None:
        """Load what :meth:`adapt` needs; called once, before the first request."""
        ...

    async def adapt(self, stage_input: StageInput) -> EngineInput:
        """Convert one input, without changing or keeping anything of the caller's.

        Raises:
            InvalidRequest: The input cannot be served; the message says why.
        """
        ...


@runtime_checkable
class SplittingAdapter(InputAdapter, Protocol):
    """An input adapter whose model takes no more than a sentence or so at a time."""

    def split(self, stage_input: StageInput) -> Sequence[StageInput]:
        """Cut an input into those that are run one after the other; called on the event loop.

        With ``by_sentence`` the text is one sentence of several, and may be left out: no input.

        Raises:
            InvalidRequest: The input cannot be served.
        """
        ...


@dataclass(frozen=True, slots=True)
class TextInput:
    """Passes text, ids, or embeddings on as they are.

    Args:
        sampling: Sampling fields that a request does not set itself.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        """Nothing to load."""

    async def adapt(self, stage_input: StageInput) -> EngineInput:
        """Copy the prompt and lay the request's sampling over the defaults."""
        return EngineInput(
            prompt=copy_prompt(stage_input.prompt), sampling=merge(self.sampling, stage_input)
        )


def conditioning(stage_input: StageInput, made: EngineInput) -> Mapping[str, Payload]:
    """The tensors that a request brings for its model: its adapter's, or its own.

    Args:
        stage_input: What was asked.
        made: What the input adapter made of it.
    """
    own = stage_input.conditioning if made.conditioning is None else made.conditioning
    return conditioning_of(own) or {}


def split(adapter: InputAdapter, stage_input: StageInput) -> Sequence[StageInput]:
    """The inputs that an adapter makes of one; each has its conditioning.

    Raises:
        InvalidRequest: It cannot be served.
    """
    if not isinstance(adapter, SplittingAdapter):
        return [stage_input]
    parts = adapter.split(stage_input)
    given = stage_input.conditioning
    return [p if p.conditioning else replace(p, conditioning=given) for p in parts]


def copy_prompt(prompt: object) -> str | list[int] | Payload:
    """The prompt as vLLM takes it, owned by us: vLLM extends a streaming request's list in place.

    Raises:
        InvalidRequest: It is empty, or neither text, ids nor embeddings.
    """
    if isinstance(prompt, Payload):
        return prompt  # frozen
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InvalidRequest("the text is empty; give at least one word", parameter="prompt")
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequest(
            f"a prompt is text or a sequence of token ids, got {type(prompt).__name__}",
            parameter="prompt",
        )
    ids: list[Any] = list(prompt)
    if not ids:
        raise InvalidRequest("the prompt has no ids; give at least one", parameter="prompt")
    for token in ids:
        if type(token) is not int or token < 0:
            raise InvalidRequest(
                f"prompt token ids must be non-negative integers, got {token!r}", parameter="prompt"
            )
    return ids


def merge(defaults: Mapping[str, Any], stage_input: StageInput) -> dict[str, Any]:
    """The request's sampling fields over the stage's, its seed over both.

    Raises:
        InvalidRequest: A field that the AR stage sets itself, or a bad seed.
    """
    given = stage_input.sampling or {}
    for name in RESERVED:
        if name in given:
            raise InvalidRequest(
                f"sampling.{name} is set by the AR stage; leave it out", parameter=name
            )
    fields = {**defaults, **given}
    if stage_input.seed is not None:
        if type(stage_input.seed) is not int or not 0 <= stage_input.seed < 2**63:
            raise InvalidRequest(
                f"a seed is an integer from 0 to 2**63 - 1, got {stage_input.seed!r}",
                parameter="seed",
            )
        fields["seed"] = stage_input.seed
    return fields


def check_consumable(sampling: Mapping[str, Any]) -> None:
    """Refuse sampling fields that a downstream consumer would be harmed by.

    Raises:
        InvalidRequest: ``stop`` strings (vLLM's front-end matches them after later ids were
            published) or ``n > 1`` (the children would share one record).
    """
    if sampling.get("stop"):
        raise InvalidRequest(
            "stop strings are matched after the ids behind them were published; "
            "use stop_token_ids for a request that is decoded to audio",
            parameter="stop",
        )
    if sampling.get("n", 1) != 1:
        raise InvalidRequest(
            "n > 1 cannot be decoded to audio; submit the request n times with different seeds",
            parameter="n",
        )

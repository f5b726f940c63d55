"""Chunk processors: what becomes of a request's sampled ids and tensors before they are published.

They run in the engine core's publisher thread, not in the scheduler's, but share its interpreter:
an update should take microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from omnistage.errors import ConfigError
from omnistage.payload import rows_from

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from omnistage.request import FinishReason, Payload, Start


class Step(NamedTuple):
    """What one request got in one step.

    Args:
        ids: The ids sampled in this step, committed by the scheduler; empty for a step that only
            brought tensors.
        position: Index of ``ids[0]`` among the ids sampled for this segment.
        tensors: The worker's payload of this step, by key.
    """

    ids: tuple[int, ...]
    position: int
    tensors: Mapping[str, Payload]


class Emission(NamedTuple):
    """What a processor wants published.

    Args:
        ids: Ids or codebook indices, in order.
        tensors: Tensors, by key.
        dropped: Sampled ids that this call removed for good.
    """

    ids: Sequence[int] = ()
    tensors: Mapping[str, Payload] = {}
    dropped: int = 0


@runtime_checkable
class ChunkProcessor(Protocol):
    """Turns a request's steps into what its consumers receive.

    An instance is configuration, shared by all requests of a channel and sent to the engine
    process, so it must be picklable; what belongs to a request lives in the state that ``open``
    returns. A call that raises fails its own request and no other.

    Attributes:
        requires_token_updates: Whether steps that sampled ids but brought no tensor are of
            interest. A processor that leaves it False is called for tensors and at the end only.
    """

    requires_token_updates: bool

    def open(self, request_id: str, start: Start) -> Any:
        """A new request's state."""
        ...

    def update(self, state: Any, step: Step) -> Emission | None:
        """Take a step; None or an empty emission publishes nothing."""
        ...

    def finish(self, state: Any, reason: FinishReason) -> Emission | None:
        """Take the end of a request or of a streaming segment and give what was held back.

        The end itself is published by the output adapter, whatever this returns.
        """
        ...


@runtime_checkable
class PayloadProcessor(ChunkProcessor, Protocol):
    """A chunk processor that says whether it wants tensors of the model's.

    Two more attributes it may have: ``payload_keys``, the keys of tensors that it needs, and
    ``row_keys``, the keys of those that it emits, which are the model's unless it says otherwise.
    An engine whose model does not give the first, or a decoder that takes others than the second,
    is refused at start.

    Attributes:
        wants_payload: Whether its requests' rows are to leave vLLM's workers. Without it nothing is
            taken there.
    """

    wants_payload: bool


def wants_payload(processor: ChunkProcessor) -> bool:
    """Whether a processor wants its requests' rows; one that does not say does not."""
    return bool(getattr(processor, "wants_payload", False))


def check_keys(processor: ChunkProcessor, given: Collection[str], model: str) -> None:
    """Check that a model gives what a processor needs.

    Args:
        processor: The processor.
        given: The keys of the model's payload.
        model: Names it.

    Raises:
        ConfigError: It does not.
    """
    for key in getattr(processor, "payload_keys", ()):
        if key not in given:
            raise ConfigError(
                f"{type(processor).__name__} takes rows of {key!r}, {model} gives "
                f"{', '.join(map(repr, sorted(given))) or 'none'}"
            )


def row_keys(processor: ChunkProcessor, given: Collection[str]) -> frozenset[str]:
    """The keys of the tensors that a processor emits.

    Args:
        processor: The processor.
        given: The keys of the payload that it gets.
    """
    if not wants_payload(processor):
        given = ()
    return frozenset(getattr(processor, "row_keys", given))


class TokenUpdates:
    """Publishes every sampled id as it comes, the stop id included."""

    requires_token_updates = True

    def open(self, request_id: str, start: Start) -> None:
        """No state: nothing is ever held back."""

    def update(self, state: None, step: Step) -> Emission:
        """Every id of the step."""
        return Emission(step.ids, step.tensors)

    def finish(self, state: None, reason: FinishReason) -> None:
        """Nothing was held back."""


class HiddenStates(msgspec.Struct, frozen=True, kw_only=True):
    """Publishes every sampled id and every row of the model's as they come.

    Row p of ``hidden`` is the model's last hidden state at position p, the prompt's positions
    included, [rows, hidden size] in the model's dtype. A request of P prompt ids and N sampled ids
    has P + N - 1 rows: the last id is not computed any more.

    Args:
        prompt: Whether rows before P - 1, the one that the first id was sampled from, are passed
            on. A decoder of rows makes audio of every row that it gets.
    """

    prompt: bool = True

    requires_token_updates = True
    wants_payload = True

    def open(self, request_id: str, start: Start) -> list[int]:
        """The state: the position of the first row that is passed on, once it is known."""
        return [0] if self.prompt else []

    def update(self, state: list[int], step: Step) -> Emission | None:
        """Every id and row of the step that is to be passed on."""
        if state or not step.tensors:
            return Emission(step.ids, step.tensors)
        if not step.ids:
            return None
        # The rows of a step end with the one that its last id was sampled from.
        end = max(rows.first_row + rows.shape[0] for rows in step.tensors.values())
        state.append(end - step.position - len(step.ids))
        tensors = {key: rows_from(rows, state[0]) for key, rows in step.tensors.items()}
        return Emission(step.ids, tensors)

    def finish(self, state: list[int], reason: FinishReason) -> None:
        """Nothing was held back."""


class CodecFrames(msgspec.Struct, frozen=True, kw_only=True):
    """Turns sampled ids into whole frames of codebook indices, frame after frame.

    An id of codebook k is ``first_id + k * stride + index`` with an index in ``[0,
    codebook_size)``; the codebooks of a frame follow one another. With ``stride=0`` all codebooks
    share one range of ids: an id outside it is removed and counted. Otherwise the id also says
    which codebook it is for: one that is not the expected one's breaks the frame, so that the
    partial frame and the id are removed and counted, and the next id of codebook 0 starts anew. A
    partial frame at the end is removed and counted.

    Args:
        first_id: The vocabulary id of codebook 0's index 0.
        codebook_size: Indices a codebook.
        codebooks: Ids a frame.
        stride: Vocabulary distance from one codebook's ids to the next one's.

    Raises:
        ConfigError: A range that is empty or overlaps another.
    """

    first_id: int
    codebook_size: int
    codebooks: int = 1
    stride: int = 0

    requires_token_updates = True

    def __post_init__(self) -> None:
        if self.first_id < 0 or self.codebook_size < 1 or self.codebooks < 1:
            raise ConfigError(
                "codec frames need first_id >= 0, codebook_size >= 1 and codebooks >= 1, got "
                f"{self.first_id}, {self.codebook_size} and {self.codebooks}"
            )
        if self.stride and self.stride < self.codebook_size:
            raise ConfigError(
                f"codebooks of {self.codebook_size} ids overlap at a stride of {self.stride}"
            )

    def open(self, request_id: str, start: Start) -> list[int]:
        """The state: the frame that is not complete yet."""
        return []

    def update(self, state: list[int], step: Step) -> Emission:
        """The frames that this step completes, flat."""
        frames: list[int] = []
        dropped = 0
        for token in step.ids:
            index = token - self.first_id - self.stride * len(state)
            if not 0 <= index < self.codebook_size:
                dropped += 1
                if not self.stride:
                    continue
                dropped += len(state)
                state.clear()
                index = token - self.first_id
                if not 0 <= index < self.codebook_size:
                    continue
                dropped -= 1  # no stray id after all: it opens the next frame
            state.append(index)
            if len(state) == self.codebooks:
                frames += state
                state.clear()
        return Emission(frames, {}, dropped)

    def finish(self, state: list[int], reason: FinishReason) -> Emission | None:
        """A partial frame cannot be decoded: it is counted as dropped."""
        return Emission(dropped=len(state)) if state else None

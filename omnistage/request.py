"""The values that move through a pipeline: what is asked, what the AR stage emits, what is played.

Plain structs without behaviour beyond their own invariants; nothing here knows vLLM, torch or
ZeroMQ.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from omnistage.errors import ConfigError, InvalidRequest
from omnistage.payload import Payload as Payload
from omnistage.payload import conditioning_of, embeddings_of, is_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.payload import Array
    from omnistage.stages.base import TextSink

Pcm = npt.NDArray[np.float32]
"""Mono samples, float32 in [-1, 1], shape [samples]."""

Codes = npt.NDArray[np.int64]
"""Codebook indices, shape [frames, codebooks]."""

_MAX_CHUNK: Final = 1_000_000  # frames, hours of audio

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: Any, what: str) -> str:
    """Return ``name`` if it can name a channel, subscriber or stage.

    Raises:
        ConfigError: It is empty, longer than 64 characters, or holds a character that a topic may
            not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or "
            f"digit, got {name!r}"
        )
    checked: str = name
    return checked


def is_positive(seconds: object) -> bool:
    """Whether a caller's number of seconds is one, and more than 0."""
    return isinstance(seconds, int | float) and seconds > 0


def check_text(text: object, parameter: str, limit: int = 4096) -> None:
    """Refuse what is neither None nor text that can cross a process border.

    Raises:
        InvalidRequest: It is no string, longer than ``limit``, or no valid Unicode.
    """
    if text is None:
        return
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{parameter} must be str, got {type(text).__name__}", parameter=parameter
        )
    if len(text) > limit:
        raise InvalidRequest(
            f"{parameter} has {len(text)} characters, at most {limit} may cross",
            parameter=parameter,
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{parameter} is no valid Unicode: {error.reason}", parameter=parameter
        ) from error


class FinishReason(enum.StrEnum):
    """Why a request ended, as vLLM and the OpenAI interface spell it."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"


class ChunkPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many new frames a decode takes, fixed for a request when it starts.

    The first chunk decides the time to first audio, the growth avoids a gap after it, the steady
    size decides how often the decoder repeats its context. Chunk k has ``first * growth**k``
    frames, rounded down, and never more than ``steady``.

    Args:
        first: Frames in the first chunk, at least 1.
        growth: Factor from one chunk to the next, at least 1.
        steady: Frames in the largest chunk, at least ``first``.

    Raises:
        InvalidRequest: A value out of range.
    """

    first: int = 4
    growth: float = 2.0
    steady: int = 32

    def __post_init__(self) -> None:
        whole = type(self.first) is int and type(self.steady) is int
        number = type(self.growth) in (int, float)
        if not (
            whole
            and number
            and 1 <= self.first <= self.steady <= _MAX_CHUNK
            and 1 <= self.growth <= _MAX_CHUNK
        ):
            raise InvalidRequest(
                f"chunk sizes must satisfy 1 <= first <= steady <= {_MAX_CHUNK} and "
                f"1 <= growth <= {_MAX_CHUNK}, "
                f"got first={self.first}, growth={self.growth}, steady={self.steady}",
                parameter="chunks",
            )

    def size(self, index: int) -> int:
        """The number of new frames in chunk ``index``, counted from 0."""
        try:
            return min(int(self.first * self.growth**index), self.steady)
        except OverflowError:
            return self.steady


class Start(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a subscriber must know before a request's first data; carried by its first update.

    Args:
        chunks: Chunk sizes, or None for the decoder's own.
        seed: Seed of the decoder's randomness.
        voice: The voice asked for, if any.
        options: Decoder options, plain values.
        trace_headers: W3C trace context of the caller.
        reply: Who gets the audio, where the decoder is a service: its subscriber id there.
    """

    chunks: ChunkPolicy | None = None
    seed: int = 0
    voice: str | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    trace_headers: dict[str, str] = msgspec.field(default_factory=dict)
    reply: str = ""


class Terminal(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The end of a request on its channel: there is exactly one, and nothing follows it.

    Args:
        reason: Why the AR stage stopped, or ``error``.
        tokens: Sampled ids that the scheduler committed, whatever the processor made of them.
        dropped: Sampled ids that the processor removed as no codec ids.
        error: For ``error``: what went wrong, a sentence.
        kind: For ``error``: the class name of the error to raise, from :mod:`omnistage.errors`.
    """

    reason: FinishReason
    tokens: int = 0
    dropped: int = 0
    error: str | None = None
    kind: str | None = None


MODALITIES: Final = ("text", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """What a caller gives a pipeline: a prompt, and how to treat it.

    Tensors are kept as :class:`Payload`, bytes of its own.

    Args:
        prompt: Text, prompt token ids, or embeddings, [positions, hidden size].
        sampling: Fields of vLLM's ``SamplingParams``, passed through; None for the preset's own.
        seed: Seeds sampling and decoder noise; None leaves sampling unseeded.
        voice: A voice of the preset.
        chunks: Chunk sizes of this request.
        priority: vLLM's request priority; lower runs earlier under the priority policy.
        trace_headers: W3C trace context.
        conditioning: Tensors for the model, by name.
        by_sentence: The text is one sentence of several, which are run one after the other.
        modalities: What is wanted of it: text and audio, or of a thinker its text alone.

    Raises:
        InvalidRequest: A value of another type than said, or a tensor that cannot cross.
    """

    prompt: str | Sequence[int] | Array
    sampling: Mapping[str, Any] | None = None
    seed: int | None = None
    voice: str | None = None
    chunks: ChunkPolicy | None = None
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    conditioning: Mapping[str, Array] | None = None
    by_sentence: bool = False
    modalities: Collection[str] = MODALITIES

    @property
    def wants_audio(self) -> bool:
        """Whether it is to be spoken."""
        return "audio" in self.modalities

    def __post_init__(self) -> None:
        for name, kind in _INPUT_TYPES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(
                    f"{name} must be {kind.__name__}, got {type(value).__name__}", parameter=name
                )
        if type(self.priority) is not int or not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(
                f"priority must be an integer of 32 bits, got {self.priority!r}",
                parameter="priority",
            )
        if self.by_sentence and not isinstance(self.prompt, str):
            raise InvalidRequest("by_sentence goes with a text", parameter="by_sentence")
        if {str(one) for one in self.modalities} not in ({"text"}, set(MODALITIES)):
            raise InvalidRequest(
                f"modalities are ('text',) or ('text', 'audio'), got {self.modalities!r}",
                parameter="modalities",
            )
        check_text(self.voice, "voice")
        for text in (x for pair in (self.trace_headers or {}).items() for x in pair):
            check_text(text, "trace_headers")
        object.__setattr__(self, "conditioning", conditioning_of(self.conditioning))
        if is_array(self.prompt):
            object.__setattr__(self, "prompt", embeddings_of(self.prompt))


_INPUT_TYPES: Final[dict[str, type]] = {
    "modalities": Collection,
    "sampling": Mapping,
    "chunks": ChunkPolicy,
    "trace_headers": Mapping,
    "by_sentence": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """One admitted submission on its way through the stages.

    Args:
        request_id: Unique a submission; the only id that crosses process borders.
        external_id: What the caller calls it; two submissions may share it.
        input: What was asked.
        final_stage: Whether the AR stage is the last one, so that nothing is published.
        consumers: (channel, subscriber id) pairs that receive the AR stage's updates.
        reply: See :class:`Start`.
        after: Internal id of the request that this one continues, of the same submission.
        more: Whether another one of the submission will follow, or may: of a text that comes it is
            not known. Where none does, the request is dropped after its end.
        text: Receives its text as it is sampled, where somebody reads that.
    """

    request_id: str
    external_id: str
    input: StageInput
    final_stage: bool = False
    consumers: tuple[tuple[str, str], ...] = ()
    reply: str = ""
    after: str | None = None
    more: bool = False
    text: TextSink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUpdate:
    """What one request emitted in one step, as a subscriber without a decoder reads it.

    Args:
        request_id: The submission's internal id.
        position: Index of ``ids[0]`` among all ids emitted for this segment.
        ids: What the chunk processor made of the sampled ids.
        tensors: What it made of the payload, by name.
        start: On a request's first update: its seed, voice and chunk sizes.
        terminal: On its last update: why it ended and how many ids were sampled.
        segment: Counts the segments of a streaming request, from 0.
        segment_end: Whether a streaming segment ended here; more may follow.
        stamp: The engine process's monotonic clock in ns when the step was over; comparable with
            :func:`time.monotonic_ns` on the same host.
    """

    request_id: str
    position: int
    ids: tuple[int, ...]
    tensors: Mapping[str, Payload]
    start: Start | None
    terminal: Terminal | None
    segment: int
    segment_end: bool
    stamp: int


def new_request_id(external_id: str | None = None) -> str:
    """A submission's internal id: the external one, if any, and 12 random hex digits."""
    suffix = secrets.token_hex(6)
    return f"{external_id}-{suffix}" if external_id else f"req-{suffix}"


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of a request's audio; the pieces arrive in order and none is missing.

    Args:
        request_id: The submission's internal id.
        index: Position in the stream, from 0.
        pcm: Mono samples, float32 in [-1, 1], [samples].
        sample_rate: Samples a second.
        decoder: Name of the decoder stage it comes from; each has its own order and index.
    """

    request_id: str
    index: int
    pcm: Pcm
    sample_rate: int
    decoder: str = "decoder"

    @property
    def seconds(self) -> float:
        """Playing time of this piece."""
        return len(self.pcm) / self.sample_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a finished request took.

    Args:
        prompt_tokens: Tokens of the AR stage's prompt; of rows, their number.
        output_tokens: Sampled tokens, the stop token included.
        finish_reason: Why the AR stage stopped.
        dropped_tokens: Sampled ids that stood for no audio frame.
        text: The thinker's text, or the AR stage's, where the request asked for it.
        thinker: What the thinker took of a request that was spoken; the rest is the talker's.
    """

    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    dropped_tokens: int = 0
    text: str | None = None
    thinker: Usage | None = None


def total(usages: Sequence[Usage]) -> Usage:
    """What requests that followed one another took together; the first that was cut says why."""
    reasons = [usage.finish_reason for usage in usages]
    thinkers = [usage.thinker for usage in usages if usage.thinker is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        finish_reason=next((r for r in reasons if r is not FinishReason.STOP), reasons[0]),
        dropped_tokens=sum(usage.dropped_tokens for usage in usages),
        text=" ".join(usage.text for usage in usages if usage.text is not None) or None,
        thinker=total(thinkers) if thinkers else None,
    )

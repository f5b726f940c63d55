"""What stages that are services and their clients say to each other, beside the data sockets.

One frame a message, a MessagePack array as :mod:`omnistage.wire` has them. Ids and audio never pass
here: an AR service publishes to its decoders, a decoder service publishes to its clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from omnistage.errors import OmniStageError, ProtocolError, error_of_kind
from omnistage.request import ChunkPolicy, FinishReason, Payload, StageInput, Usage
from omnistage.wire import PROTOCOL_VERSION, decode_with

if TYPE_CHECKING:
    from omnistage.wire import Buffer

SPEECH: Final = "speech"
"""The channel on which a decoder service publishes audio, to a subscriber id of each client's."""
AUDIO_TENSOR: Final = "audio"
"""Name of the tensor that a chunk of audio is: float32, [samples], first row its first sample."""
MAX_MESSAGE_BYTES: Final = 16 << 20
INPUTS: Final = ("conditioning", "embeddings")
"""What this release's AR services read of an :class:`Input` beside protocol 1's first fields."""
MAX_PUBLISHERS: Final = 64
"""Of a decoder service, which has one: each client opens two sockets for each."""


class DecoderInfo(msgspec.Struct, frozen=True, array_like=True):
    """A decoder service, as it is known to an AR service and by it to the clients.

    Args:
        name: Its stage's name; decoders of one name stand in for each other.
        subscriber: Its subscriber id at the AR service, its own among all.
        service: Its service endpoint.
        publishers: Where it publishes audio.
        sample_rate: Samples a second of that.
        codec: See :class:`ARInfo`.
        codebooks: Ids a frame that it takes; 0 for rows, or if nobody has said it.
        max_unread: Seconds of audio that it lets a client leave unread.

    Raises:
        ValueError: A field out of range.
    """

    name: str
    subscriber: str
    service: str
    publishers: tuple[str, ...]
    sample_rate: int
    codec: str = ""
    codebooks: int = 0
    max_unread: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.publishers) <= MAX_PUBLISHERS:
            raise ValueError(f"a decoder has 1 to {MAX_PUBLISHERS} publishers")
        if self.sample_rate < 1 or self.codebooks < 0 or not self.max_unread > 0:
            raise ValueError("a decoder's sample_rate and max_unread are positive numbers")


class ARInfo(msgspec.Struct, frozen=True, array_like=True):
    """An AR service.

    Args:
        name: Its stage's name.
        model: Its model's name.
        publishers: Where its engine cores publish, by rank.
        channel: On which channel.
        codec: Names what its ids are; empty if nobody has said it.
        codebooks: Ids a frame; 0 if nobody has said it.
        inputs: Which of :data:`INPUTS` it reads; an earlier release would run without them.
        rows: Keys of the tensors that its updates carry; None if nobody has said it.
    """

    name: str
    model: str
    publishers: tuple[str, ...]
    channel: str
    codec: str = ""
    codebooks: int = 0
    inputs: tuple[str, ...] = ()
    rows: tuple[str, ...] | None = None


class Greet(msgspec.Struct, frozen=True, array_like=True, tag="greet"):
    """A client or a decoder service introduces itself, and again whenever it is not known.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        name: What to call it in logs.
        decoder: What it is, if it is a decoder service.
    """

    version: int
    name: str
    decoder: DecoderInfo | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """A service's answer to a greeting that it takes.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: A random number that the service chose when it started.
        ar: What it is, if it is an AR service.
        decoder: What it is, if it is a decoder service.
    """

    version: int
    epoch: int
    ar: ARInfo | None = None
    decoder: DecoderInfo | None = None


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """Its answer to one that it does not take: what does not fit, a sentence."""

    version: int
    error: str


class Stranger(msgspec.Struct, frozen=True, array_like=True, tag="stranger"):
    """Its answer to anything else from somebody who has not greeted, or whom it has forgotten."""

    version: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """A sign of life, in both directions."""

    version: int


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """Whoever greeted is going: what the service has for it can be freed."""

    version: int


class Decoders(msgspec.Struct, frozen=True, array_like=True, tag="decoders"):
    """From an AR service to its clients, at the welcome and at each change.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        decoders: Those that have subscribed.
        draining: Whether the service takes no new requests.
    """

    version: int
    decoders: tuple[DecoderInfo, ...]
    draining: bool = False


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a caller gives: its dtype as torch spells it, its shape, its bytes, C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, given: Any) -> Tensor:
        """What to send of a :class:`~omnistage.request.Payload`."""
        return cls(given.dtype, given.shape, given.data)

    def payload(self) -> Payload:
        """The tensor that was sent, unchecked."""
        return Payload(self.dtype, self.shape, 0, self.data)


class Input(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A :class:`~omnistage.StageInput`, field by field; a prompt of embeddings has its own."""

    prompt: str | tuple[int, ...]
    sampling: dict[str, Any] | None = None
    seed: int | None = None
    voice: str | None = None
    chunks: ChunkPolicy | None = None
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    conditioning: dict[str, Tensor] | None = None
    embeddings: Tensor | None = None
    by_sentence: bool = False

    @classmethod
    def of(cls, asked: StageInput) -> Input:
        """What to send of an input."""
        given: Any = asked.prompt
        embeddings = Tensor.of(given) if isinstance(given, Payload) else None
        prompt = given if isinstance(given, str) else () if embeddings else tuple(given)
        tensors = {name: Tensor.of(value) for name, value in (asked.conditioning or {}).items()}
        return cls(
            prompt,
            None if asked.sampling is None else dict(asked.sampling),
            asked.seed,
            asked.voice,
            asked.chunks,
            asked.priority,
            None if asked.trace_headers is None else dict(asked.trace_headers),
            tensors or None,
            embeddings,
            asked.by_sentence,
        )

    def stage_input(self) -> StageInput:
        """The input that was sent.

        Raises:
            InvalidRequest: A field out of range, or a tensor whose parts disagree.
        """
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return StageInput(
            prompt=prompt if self.embeddings is None else self.embeddings.payload(),
            sampling=self.sampling,
            seed=self.seed,
            voice=self.voice,
            chunks=self.chunks,
            priority=self.priority,
            trace_headers=self.trace_headers,
            conditioning={name: t.payload() for name, t in (self.conditioning or {}).items()},
            by_sentence=self.by_sentence,
        )


class Fault(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An error on its way to another process.

    Args:
        kind: Class name, from :mod:`omnistage.errors`.
        message: What went wrong.
        stage: Where.
        parameter: The offending argument, for an ``InvalidRequest``.
    """

    kind: str
    message: str
    stage: str | None = None
    parameter: str | None = None

    @classmethod
    def of(cls, error: OmniStageError) -> Fault:
        """What to send of an error."""
        parameter = getattr(error, "parameter", None)
        return cls(type(error).__name__, error.message, error.stage, parameter)

    def error(self, request_id: str | None = None) -> OmniStageError:
        """The error, as its own class."""
        error = error_of_kind(self.kind, self.message)
        error.stage, error.request_id = self.stage, request_id
        if self.parameter is not None:
            error.parameter = self.parameter  # type: ignore[attr-defined]
        return error


class Split(msgspec.Struct, frozen=True, array_like=True, tag="split"):
    """A client asks into which requests the AR stage cuts an input.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        call: Names the answer.
        input: What was asked.
    """

    version: int
    call: int
    input: Input


class Pieces(msgspec.Struct, frozen=True, array_like=True, tag="pieces"):
    """The answer to :class:`Split`: the inputs, or why there are none."""

    version: int
    call: int
    inputs: tuple[Input, ...] = ()
    fault: Fault | None = None


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A client has a request run.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        request_id: Internal id.
        external_id: What the caller calls it.
        input: What to run.
        consumers: (channel, subscriber id) pairs that get the updates.
        reply: The client's subscriber id, under which decoders publish the audio.
        after: Id of the request that this one continues, of one submission; a service that drains
            takes it still.
        more: Whether another one may follow, which a service that drains waits for; an
            :class:`Abort` after the end says that none will.
    """

    version: int
    request_id: str
    external_id: str
    input: Input
    consumers: tuple[tuple[str, str], ...]
    reply: str
    after: str | None = None
    more: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """An AR service is done with a request: what it took, or what went wrong."""

    version: int
    request_id: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    reason: FinishReason = FinishReason.STOP
    text: str | None = None
    fault: Fault | None = None

    @classmethod
    def of(cls, request_id: str, outcome: Usage | OmniStageError) -> Done:
        """What to send of a request's outcome."""
        if isinstance(outcome, OmniStageError):
            return cls(PROTOCOL_VERSION, request_id, fault=Fault.of(outcome))
        return cls(
            PROTOCOL_VERSION,
            request_id,
            outcome.prompt_tokens,
            outcome.output_tokens,
            outcome.finish_reason,
            outcome.text,
        )

    def outcome(self) -> Usage | OmniStageError:
        """The outcome that was sent."""
        if self.fault is not None:
            return self.fault.error(self.request_id)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            finish_reason=self.reason,
            text=self.text,
        )


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A client wants no more of a request; :class:`Aborted` comes when all have let go of it.

    Sent to the AR service and to the decoder service that has the request.
    """

    version: int
    request_id: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="aborted"):
    """A service has let go of a request, or could not."""

    version: int
    request_id: str
    fault: Fault | None = None


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """A client's reader has read so many samples of a request's audio, counted from its start."""

    version: int
    request_id: str
    samples: int


ServiceMessage = (
    Greet
    | Welcome
    | Refuse
    | Stranger
    | Beat
    | Farewell
    | Decoders
    | Split
    | Pieces
    | Submit
    | Done
    | Abort
    | Aborted
    | Read
)

_decoder = msgspec.msgpack.Decoder(ServiceMessage)


def decode_service(header: Buffer) -> ServiceMessage:
    """Decode and validate a service message.

    Raises:
        ProtocolError: Another version, malformed bytes, or too many of them.
    """
    if len(header) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"service message of {len(header)} bytes, at most {MAX_MESSAGE_BYTES}")
    return decode_with(_decoder, header)

"""Messages and their frames: the only place that knows what omnistage's bytes look like.

A message on the data socket is ``topic | msgpack header | raw buffers``, and so is one that is sent
again on the delivery socket; all others are the header alone. Every decode validates before it
allocates and raises :class:`ProtocolError`, nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from omnistage.errors import ConfigError, OmniStageError, ProtocolError
from omnistage.request import Start, Terminal, check_name
from omnistage.tensors import ITEM_BYTES as ITEM_BYTES
from omnistage.tensors import MAX_BUFFER_BYTES as MAX_BUFFER_BYTES
from omnistage.tensors import MAX_BUFFERS as MAX_BUFFERS
from omnistage.tensors import Buffer as Buffer
from omnistage.tensors import TensorInfo as TensorInfo
from omnistage.tensors import buffer_bytes as buffer_bytes
from omnistage.tensors import check_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

PROTOCOL_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 16 << 20
"""A heartbeat of 65,536 topics has 10 MiB. Decoded, a header can take 60 times its size."""
MAX_SUBSCRIPTION_BYTES: Final = 4096  # a topic has 130; but ZeroMQ counts its handshake too
MAX_ERROR: Final = 4096  # characters: what a user's code raises can be as long as its input
MAX_CONSUMERS: Final = 64
MAX_ID: Final = 512  # characters of a request's id, which every update of it repeats

_END: Final = b"\x00"


def topic(channel: str, subscriber: str) -> bytes:
    """The topic of one subscriber of one channel.

    It ends in a byte that no name can hold: ZeroMQ matches topics by prefix, and ``d-1`` must not
    receive what is meant for ``d-10``.

    Raises:
        ConfigError: A name that may not stand in a topic.
    """
    check_name(channel, "a channel name")
    check_name(subscriber, "a subscriber id")
    return f"{channel}/{subscriber}".encode() + _END


def parse_topic(raw: bytes) -> tuple[str, str]:
    """The (channel, subscriber) of a topic.

    Raises:
        ProtocolError: Bytes that :func:`topic` cannot have made.
    """
    try:
        channel, subscriber = raw.removesuffix(_END).decode("ascii").split("/")
        if topic(channel, subscriber) != raw:
            raise ValueError(raw)
    except (ValueError, ConfigError) as error:
        raise ProtocolError(f"not a topic: {raw[:80]!r}") from error
    return channel, subscriber


class Update(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one request emitted in one step.

    Args:
        request_id: Internal id.
        generation: Counts submissions of the sender; tells an id's lives apart.
        segment: Counts the segments of a streaming request, from 0.
        position: Index of ``ids[0]`` among all ids emitted for this segment.
        ids: What the processor made of the sampled ids.
        tensors: What it made of the payload.
        start: On a request's first update, and only there.
        terminal: On its last update, and only there.
        segment_end: Whether a streaming segment ended here; more may follow.
        paused: Whether the request waits, preempted, for vLLM to resume it: no update is due.
    """

    request_id: str
    generation: int = 0
    segment: int = 0
    position: int = 0
    ids: tuple[int, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    start: Start | None = None
    terminal: Terminal | None = None
    segment_end: bool = False
    paused: bool = False


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """One step's updates for one topic.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: A random number a publisher chooses when it starts.
        dp_index: The data-parallel rank of the engine that sent it.
        sequence: Counts this topic's data messages in this epoch, from 0.
        stamp: The sender's monotonic clock in ns when it built this; comparable on one host only.
        updates: At most one a request.
    """

    version: int
    epoch: int
    dp_index: int
    sequence: int
    stamp: int
    updates: tuple[Update, ...]


class Subscribed(msgspec.Struct, frozen=True, array_like=True, tag="subscribed"):
    """The publisher's answer to a subscription; before it nothing may be sent to that subscriber.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: As in :class:`Data`.
        dp_index: As in :class:`Data`.
        next_sequence: The sequence that the topic's next data message will have.
        delivery: The endpoint of this publisher's delivery socket.
    """

    version: int
    epoch: int
    dp_index: int
    next_sequence: int
    delivery: str = ""


Count = Annotated[int, msgspec.Meta(ge=0)]


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """A subscriber's process has everything below these sequences; also its sign of life.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: The epoch of the publisher that is meant.
        positions: (topic, the sequence it expects next).
    """

    version: int
    epoch: int
    positions: tuple[tuple[bytes, Count], ...]


class Replay(msgspec.Struct, frozen=True, array_like=True, tag="replay"):
    """A subscriber lacks messages: the publisher sends again what it still has of them.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: As in :class:`Ack`.
        topic: Whose messages.
        first: The first sequence it lacks.
        end: The one behind the last.
    """

    version: int
    epoch: int
    topic: bytes
    first: Count
    end: Count


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """A subscriber has closed: what is retained for it can go.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: As in :class:`Ack`.
        topic: What it does not want any more.
    """

    version: int
    epoch: int
    topic: bytes


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """A publisher lives, and this is how far the topics are that a peer acknowledges.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: As in :class:`Data`.
        dp_index: As in :class:`Data`.
        topics: (topic, the oldest sequence that can be sent again, the next one's sequence).
    """

    version: int
    epoch: int
    dp_index: int
    topics: tuple[tuple[bytes, Count, Count], ...]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """An engine core's publisher introduces itself to the AR stage.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        epoch: As in :class:`Data`.
        dp_index: As in :class:`Data`.
        pid: Process id of the engine core.
        data_endpoint: Where it publishes.
    """

    version: int
    epoch: int
    dp_index: int
    pid: int
    data_endpoint: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A request that the engine side has given up: the AR stage aborts it in vLLM.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        request_id: Internal id, or what could be read of it.
        kind: Class name of the error, from :mod:`omnistage.errors`.
        error: What went wrong, a sentence.
    """

    version: int
    request_id: str
    kind: str
    error: str


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """The AR stage asks its engine cores to let go of a request that it has aborted.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        request_id: Internal id.
    """

    version: int
    request_id: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """An engine core's answer: what it had of the request is published or dropped.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        request_id: As in :class:`Release`.
        dp_index: As in :class:`Data`.
    """

    version: int
    request_id: str
    dp_index: int


class Admission(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the AR stage tells its scheduler about a request: ``extra_args["omnistage"]``.

    Args:
        version: :data:`PROTOCOL_VERSION` of the sender.
        request_id: Internal id, the one on the wire.
        generation: See :class:`Update`.
        final_stage: Whether this AR stage is the request's last: nothing is ever published.
        consumers: (channel, subscriber id) pairs.
        start: Sent with the first update.
    """

    version: int
    request_id: str
    generation: int = 0
    final_stage: bool = False
    consumers: tuple[tuple[str, str], ...] = ()
    start: Start = msgspec.field(default_factory=Start)


DataMessage = Data | Subscribed
ControlMessage = Hello | Failed | Release | Released
DeliveryMessage = Ack | Replay | Leave | Heartbeat
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_data_decoder = msgspec.msgpack.Decoder(DataMessage)
_control_decoder = msgspec.msgpack.Decoder(ControlMessage)
_delivery_decoder = msgspec.msgpack.Decoder(DeliveryMessage)
_admission_decoder = msgspec.msgpack.Decoder(Admission)


def encode(message: msgspec.Struct) -> bytes:
    """The msgpack header of a message."""
    return _encoder.encode(message)


def decode_data(header: Buffer, buffers: Sequence[Buffer] = ()) -> DataMessage:
    """Decode and validate a header and the buffers it describes.

    Raises:
        ProtocolError: Another version, malformed bytes, or a tensor whose dtype, shape and buffer
            disagree.
    """
    message = decode_with(_data_decoder, header)
    if isinstance(message, Data):
        check_tensors([i for update in message.updates for i in update.tensors], buffers)
    elif buffers:
        raise ProtocolError(f"a {type(message).__name__} message carries no buffers")
    return message


def decode_control(header: Buffer) -> ControlMessage:
    """Decode and validate a control message.

    Raises:
        ProtocolError: Another version or malformed bytes.
    """
    return decode_with(_control_decoder, header)


def decode_delivery(header: Buffer) -> DeliveryMessage:
    """Decode and validate a message of the delivery socket that is no data.

    Raises:
        ProtocolError: Another version or malformed bytes.
    """
    return decode_with(_delivery_decoder, header)


def decode_admission(raw: object) -> Admission:
    """Decode what stands in ``extra_args["omnistage"]``.

    Raises:
        ProtocolError: No bytes, another version, malformed bytes, names that cannot be topics, or
            more of them than one request may have.
    """
    if not isinstance(raw, bytes | bytearray | memoryview):
        raise ProtocolError(f"admission record must be bytes, got {type(raw).__name__}")
    record = decode_with(_admission_decoder, raw)
    if len(record.request_id) > MAX_ID:
        raise ProtocolError(f"request id of {len(record.request_id)} characters, at most {MAX_ID}")
    # The scheduler's thread reads this, and every step of the request makes an update for each.
    if len(record.consumers) > MAX_CONSUMERS:
        raise ProtocolError(f"{len(record.consumers)} consumers, at most {MAX_CONSUMERS}")
    if len(set(record.consumers)) < len(record.consumers):
        raise ProtocolError("a consumer is named twice")
    try:
        for channel, subscriber in record.consumers:
            topic(channel, subscriber)
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    return record


def decode_with(decoder: msgspec.msgpack.Decoder[_T], header: Buffer) -> _T:
    """Decode and validate a header whose kinds ``decoder`` knows.

    Raises:
        ProtocolError: Another version or malformed bytes.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"header of {len(header)} bytes exceeds the limit of {MAX_HEADER_BYTES}"
        )
    try:
        message = decoder.decode(header)
    # RecursionError: nested deeper than the decoder follows. OmniStageError: a struct's own check.
    except (msgspec.MsgspecError, ValueError, RecursionError, OmniStageError) as error:
        raise ProtocolError(_explain(header, error)) from error
    version = getattr(message, "version", None)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(_mismatch(version))
    return message


class _Head(msgspec.Struct, array_like=True):
    """A message's first two fields; what follows is passed over, not allocated."""

    first: msgspec.Raw
    second: msgspec.Raw = msgspec.Raw()


_head_decoder = msgspec.msgpack.Decoder(_Head)
_int_decoder = msgspec.msgpack.Decoder(int)


def _explain(header: Buffer, error: Exception) -> str:
    """Name another version as such: its fields may differ, and decoding fails before the check."""
    try:
        head = _head_decoder.decode(header)
        # The first is a tag, where there is one; a tag begins with a text's bits.
        tagged = bytes(head.first)[:1] > b"\x9f"
        version = _int_decoder.decode(head.second if tagged else head.first)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return f"malformed header: {error}"
    return f"malformed header: {error}" if version == PROTOCOL_VERSION else _mismatch(version)


def _mismatch(version: object) -> str:
    return (
        f"peer speaks protocol {version}, this side {PROTOCOL_VERSION}; "
        "install the same omnistage release on both"
    )

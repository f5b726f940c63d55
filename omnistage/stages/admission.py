"""Who gets a request's updates, and the record with which it is admitted in the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.config import AUDIO
from omnistage.errors import ConfigError, InvalidRequest, ProtocolError
from omnistage.request import Start, check_name
from omnistage.wire import PROTOCOL_VERSION, Admission, decode_admission, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omnistage.request import StageRequest


def consumers_of(subscribers: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The (channel, subscriber id) pairs of a request's own subscribers.

    Raises:
        InvalidRequest: A name that cannot be one.
    """
    names = [subscribers] if isinstance(subscribers, str) else list(subscribers)
    try:
        return tuple((AUDIO, check_name(name, "a subscriber id")) for name in dict.fromkeys(names))
    except (ConfigError, TypeError) as error:
        raise InvalidRequest(str(error), parameter="subscribers") from error


def admission_record(request: StageRequest, generation: int) -> bytes:
    """What the scheduler must know about a request, as it will read it.

    Raises:
        InvalidRequest: A value that does not come back from the wire.
    """
    asked = request.input
    start = Start(
        chunks=asked.chunks,
        seed=asked.seed or 0,
        voice=asked.voice,
        trace_headers=dict(asked.trace_headers or {}),
        reply=request.reply,
    )
    record = Admission(
        PROTOCOL_VERSION,
        request.request_id,
        generation,
        request.final_stage,
        request.consumers,
        start,
    )
    try:
        raw = encode(record)
        decode_admission(raw)
    except (ProtocolError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"an option of the request cannot be sent: {error}") from error
    return raw

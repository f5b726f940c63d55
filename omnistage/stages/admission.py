"""The record with which a request is admitted in the scheduler, validated before it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.errors import InvalidRequest, ProtocolError
from omnistage.request import Start
from omnistage.wire import PROTOCOL_VERSION, Admission, decode_admission, encode

if TYPE_CHECKING:
    from omnistage.request import StageRequest


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

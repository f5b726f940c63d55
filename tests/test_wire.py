"""The wire: what is sent comes back, and nothing hostile does more than raise a typed error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.errors import ConfigError, ProtocolError
from omnistage.request import ChunkPolicy, FinishReason, Start, Terminal
from omnistage.wire import (
    MAX_BUFFER_BYTES,
    MAX_BUFFERS,
    MAX_CONSUMERS,
    MAX_HEADER_BYTES,
    MAX_ID,
    PROTOCOL_VERSION,
    Admission,
    Data,
    Failed,
    Hello,
    Subscribed,
    TensorInfo,
    Update,
    decode_admission,
    decode_control,
    decode_data,
    encode,
    parse_topic,
    topic,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


def data(*updates: Update, **changes: Any) -> Data:
    fields = {
        "version": PROTOCOL_VERSION,
        "epoch": 5,
        "dp_index": 0,
        "sequence": 9,
        "stamp": 1,
        "updates": updates,
    }
    return Data(**{**fields, **changes})


@given(
    ids=st.lists(st.integers(0, 2**31)),
    request_id=st.text(max_size=40),
    seed=st.integers(0, 2**63 - 1),
    terminal=st.sampled_from([None, *FinishReason]),
    segment_end=st.booleans(),
    chunks=st.none() | st.builds(ChunkPolicy, first=st.integers(1, 8), steady=st.integers(8, 64)),
)
def test_a_data_message_comes_back_as_it_was(
    ids: list[int],
    request_id: str,
    seed: int,
    terminal: FinishReason | None,
    segment_end: bool,
    chunks: ChunkPolicy | None,
) -> None:
    message = data(
        Update(
            request_id,
            3,
            1,
            7,
            tuple(ids),
            start=Start(chunks, seed, "v", {"a": 1}, {"traceparent": "00"}),
            terminal=Terminal(terminal, 4, 1) if terminal else None,
            segment_end=segment_end,
        )
    )
    assert decode_data(encode(message)) == message


@given(NAMES, NAMES)
def test_a_topic_names_one_subscriber_and_is_no_prefix_of_another(a: str, b: str) -> None:
    assert parse_topic(topic(a, b)) == (a, b)
    assert not topic(a, b + "0").startswith(topic(a, b)) if len(b) < 64 else True


def test_d_1_does_not_match_d_10() -> None:
    assert not topic("audio", "d-10").startswith(topic("audio", "d-1"))


@pytest.mark.parametrize("name", ["", "a/b", "a\0", "é", "-a", "x" * 65, "a b", "a\n"])
def test_names_that_cannot_stand_in_a_topic_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        topic(name, "s")
    with pytest.raises(ConfigError):
        topic("c", name)


@pytest.mark.parametrize("raw", [b"", b"\0", b"a/b", b"a\0", b"a/b/c\0", b"a/b\0\0", b"\xff/b\0"])
def test_bytes_that_are_no_topic_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_topic(raw)


@pytest.mark.parametrize("change", [{"version": 2}, {"version": 0}])
def test_another_version_is_named_as_such(change: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match=r"peer speaks protocol [02], this side 1"):
        decode_data(encode(data(**change)))


def test_another_version_with_other_fields_is_named_as_such() -> None:
    with pytest.raises(ProtocolError, match="peer speaks protocol 3"):
        decode_data(msgspec.msgpack.encode(["data", 3, {"all": "new"}]))
    with pytest.raises(ProtocolError, match="peer speaks protocol 3"):
        decode_admission(msgspec.msgpack.encode([3, {"all": "new"}]))


def test_fields_that_a_later_release_appends_are_ignored() -> None:
    fields = msgspec.msgpack.decode(encode(data(Update("r", ids=(1,)))))
    assert decode_data(msgspec.msgpack.encode([*fields, "new"])) == data(Update("r", ids=(1,)))


@given(st.binary(max_size=200))
def test_random_bytes_raise_a_protocol_error_and_nothing_else(raw: bytes) -> None:
    for decode in (decode_data, decode_control, decode_admission):
        try:
            decode(raw)
        except ProtocolError:
            continue


@given(st.integers(0, 400), st.binary(min_size=1, max_size=4), st.booleans())
def test_damaged_headers_raise_a_protocol_error_or_decode(at: int, junk: bytes, cut: bool) -> None:
    good = encode(data(Update("r", start=Start(ChunkPolicy(), 1), ids=tuple(range(50)))))
    at %= len(good)
    damaged = good[:at] if cut else good[:at] + junk + good[at + len(junk) :]
    try:
        decode_data(damaged)
    except ProtocolError:
        return


def test_chunk_sizes_out_of_range_in_a_start_record_are_a_protocol_error() -> None:
    raw = encode(data(Update("r", start=Start(ChunkPolicy(first=3)))))
    with pytest.raises(ProtocolError):
        decode_data(raw.replace(b"\xa5first\x03", b"\xa5first\x00"))


def test_a_header_nested_without_end_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode_data(b"\x91" * 100_000)


def test_an_oversized_header_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        decode_data(bytes(MAX_HEADER_BYTES + 1))


def tensor(**changes: Any) -> Update:
    fields = {"name": "x", "dtype": "float32", "shape": (2, 3), "first_row": 0, "frame": 0}
    return Update("r", tensors=(TensorInfo(**{**fields, **changes}),))


def test_a_tensor_whose_buffer_fits_passes() -> None:
    message = data(tensor())
    assert decode_data(encode(message), [bytes(24)]) == message


@pytest.mark.parametrize(
    ("update", "buffers"),
    [
        (tensor(dtype="object"), [bytes(24)]),
        (tensor(dtype="complex64"), [bytes(24)]),
        (tensor(shape=(2, 4)), [bytes(24)]),
        (tensor(shape=(-2, -3)), [bytes(24)]),
        (tensor(shape=(2**40, 2**40)), [bytes(24)]),
        (tensor(shape=(MAX_BUFFER_BYTES,)), [bytes(24)]),
        (tensor(shape=(1,) * 9), [bytes(4)]),
        (tensor(first_row=-1), [bytes(24)]),
        (tensor(frame=1), [bytes(24)]),
        (tensor(frame=-1), [bytes(24)]),
        (tensor(), []),
        (tensor(), [bytes(24), bytes(24)]),
        (Update("r"), [bytes(1)]),
        (Update("r"), [b""] * (MAX_BUFFERS + 1)),
    ],
    ids=range(14),
)
def test_a_tensor_that_lies_is_refused(update: Update, buffers: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode_data(encode(data(update)), buffers)


def test_two_tensors_cannot_claim_one_buffer() -> None:
    info = TensorInfo("x", "uint8", (1,), 0, 0)
    with pytest.raises(ProtocolError):
        decode_data(encode(data(Update("r", tensors=(info, info)))), [b"1", b"2"])


def test_control_messages_come_back_and_data_is_none() -> None:
    for message in (
        Hello(PROTOCOL_VERSION, 1, 0, 42, "ipc://x"),
        Failed(PROTOCOL_VERSION, "r", "ProcessorError", "why"),
    ):
        assert decode_control(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_control(encode(Subscribed(PROTOCOL_VERSION, 1, 0, 0)))


def test_admission_records_come_back_and_bad_names_are_refused() -> None:
    record = Admission(PROTOCOL_VERSION, "r", 2, False, (("audio", "d-1"),), Start(seed=3))
    assert decode_admission(encode(record)) == record
    bad = Admission(PROTOCOL_VERSION, "r", consumers=(("audio", "a/b"),))
    with pytest.raises(ProtocolError, match="subscriber id"):
        decode_admission(encode(bad))


@pytest.mark.parametrize(
    ("request_id", "consumers", "why"),
    [
        ("r", tuple(("audio", f"s{i}") for i in range(MAX_CONSUMERS + 1)), "65 consumers"),
        ("r", (("audio", "s"), ("audio", "s")), "named twice"),
        ("r" * (MAX_ID + 1), (), "513 characters"),
    ],
    ids=["many", "twice", "long id"],
)
def test_an_admission_record_that_would_burden_every_step_is_refused(
    request_id: str, consumers: tuple[tuple[str, str], ...], why: str
) -> None:
    record = Admission(PROTOCOL_VERSION, request_id, consumers=consumers)
    with pytest.raises(ProtocolError, match=why):
        decode_admission(encode(record))
    at_most = Admission(PROTOCOL_VERSION, "r" * MAX_ID, consumers=consumers[:1])
    assert decode_admission(encode(at_most)) == at_most

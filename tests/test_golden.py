"""Protocol 1 is frozen: these bytes, for ever, and room behind them for what is added later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from omnistage import wire, wire_services
from tests.golden.messages import BUFFER, FOLDER, MESSAGES, Message, listing

NAMES = list(MESSAGES)


def decoder(name: str) -> Callable[[bytes], Message]:
    message = MESSAGES[name]
    if isinstance(message, wire.Data):
        return lambda raw: wire.decode_data(raw, [(FOLDER / "data.0.buffer").read_bytes()])
    if isinstance(message, wire.Subscribed):
        return wire.decode_data
    if isinstance(message, wire.Admission):
        return wire.decode_admission
    if isinstance(message, wire_services.ServiceMessage):
        return wire_services.decode_service
    return wire.decode_control if isinstance(message, wire.ControlMessage) else wire.decode_delivery


def raw(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


GROWN = {"welcome-ar", "split", "pieces", "submit", "submit-tensors"}
"""Kinds with an ``ARInfo`` or an ``Input`` in them, to which later releases append fields."""


def goes_on(frozen: Any, today: Any) -> bool:
    """Whether today's fields are the frozen ones, with nothing but defaults behind them."""
    if not isinstance(frozen, list):
        return bool(frozen == today)
    old, new = today[: len(frozen)], today[len(frozen) :]
    return len(old) == len(frozen) and all(map(goes_on, frozen, old)) and not any(new)


@pytest.mark.parametrize("name", NAMES)
def test_todays_encoder_writes_the_frozen_bytes(name: str) -> None:
    today = wire.encode(MESSAGES[name])
    if name in GROWN:
        assert goes_on(msgspec.msgpack.decode(raw(name)), msgspec.msgpack.decode(today))
    else:
        assert today == raw(name)


@pytest.mark.parametrize("name", NAMES)
def test_todays_decoder_reads_the_frozen_bytes(name: str) -> None:
    assert decoder(name)(raw(name)) == MESSAGES[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [None, 5, "text", [1, [2]], {"key": "value"}])
def test_a_field_that_a_later_release_appends_is_ignored(name: str, extra: object) -> None:
    fields = msgspec.msgpack.decode(raw(name))
    assert decoder(name)(msgspec.msgpack.encode([*fields, extra])) == MESSAGES[name]


def inside(fields: list[Any]) -> dict[str, list[Any]]:
    """The structs inside a data message's fields, by name."""
    first, second = fields[6][:2]
    return {"update": second, "start": first[6], "tensor": first[5][0], "terminal": second[7]}


@pytest.mark.parametrize("where", ["update", "start", "tensor", "terminal"])
def test_so_it_is_in_the_structs_inside(where: str) -> None:
    fields = msgspec.msgpack.decode(raw("data"))
    inside(fields)[where].append("new")
    assert decoder("data")(msgspec.msgpack.encode(fields)) == MESSAGES["data"]


def test_the_shortest_form_is_read_too() -> None:
    fields = msgspec.msgpack.decode(raw("data"))
    fields[6] = [["r"]]
    message = wire.decode_data(msgspec.msgpack.encode(fields))
    assert isinstance(message, wire.Data)
    assert message.updates == (wire.Update("r"),)


def test_every_kind_has_a_file_and_every_file_a_kind() -> None:
    kinds = {type(message) for message in MESSAGES.values()}
    unions = (
        wire.DataMessage,
        wire.ControlMessage,
        wire.DeliveryMessage,
        wire_services.ServiceMessage,
    )
    assert {kind for union in unions for kind in union.__args__} | {wire.Admission} <= kinds
    assert {path.name for path in FOLDER.iterdir()} == {*NAMES, "data.0.buffer", "README.md"}
    assert (FOLDER / "data.0.buffer").read_bytes() == BUFFER
    assert (FOLDER / "README.md").read_text() == listing()

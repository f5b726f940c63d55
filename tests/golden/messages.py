"""One message of each kind of protocol 1, with every field set, and the frames they must become.

``python -m tests.golden.messages`` writes the files of kinds that have none yet; it never changes
one that is there, since a frozen protocol's bytes do not change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec

from omnistage import wire
from omnistage import wire_services as services
from omnistage.request import ChunkPolicy, FinishReason, Start, Terminal

FOLDER: Final = Path(__file__).parent / f"protocol-{wire.PROTOCOL_VERSION}"
EPOCH: Final = 2305843009213693951
TOPIC: Final = wire.topic("audio", "d-1")
START: Final = Start(
    ChunkPolicy(first=8, growth=1.5, steady=32),
    7,
    "anna",
    {"cfg": 2.5},
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    "app-1",
)
TENSOR: Final = wire.TensorInfo("hidden", "bfloat16", (2, 3), 4, 0)
BUFFER: Final = bytes.fromhex("803f004040408040a040c040")  # 1 2 3 / 4 5 6

DECODER: Final = services.DecoderInfo(
    "decoder",
    "decoder-1f2e3d4c",
    "tcp://127.0.0.1:7201",
    ("tcp://127.0.0.1:7202",),
    24_000,
    "snac",
    7,
    30.0,
)
AR: Final = services.ARInfo("ar", "talker", ("tcp://127.0.0.1:7102",), "audio", "snac", 7)
INPUT: Final = services.Input(
    "Hello.", {"top_k": 5}, 7, "anna", START.chunks, -1, {"traceparent": "00-0af7-b7ad-01"}
)
FAULT: Final = services.Fault("InvalidRequest", "why", "ar", "prompt")

Message = (
    wire.DataMessage
    | wire.ControlMessage
    | wire.DeliveryMessage
    | wire.Admission
    | services.ServiceMessage
)

MESSAGES: Final[dict[str, Message]] = {
    "data": wire.Data(
        1,
        EPOCH,
        0,
        17,
        81234567890,
        (
            wire.Update("req-5f0c6d1e2a3b", 3, 1, 4, (725, 5, 901, 70000), (TENSOR,), START),
            wire.Update(
                "req-77aa01c2d3e4",
                2,
                0,
                118,
                (901,),
                terminal=Terminal(FinishReason.ERROR, 61, 2, "why", "ProcessorError"),
                segment_end=True,
                paused=True,
            ),
            wire.Update("req-0"),
        ),
    ),
    "subscribed": wire.Subscribed(1, EPOCH, 0, 17, "ipc:///tmp/omni-x/0011223344"),
    "ack": wire.Ack(1, EPOCH, ((TOPIC, 17), (wire.topic("audio", "d-2"), 0))),
    "replay": wire.Replay(1, EPOCH, TOPIC, 17, 20),
    "leave": wire.Leave(1, EPOCH, TOPIC),
    "heartbeat": wire.Heartbeat(1, EPOCH, 0, ((TOPIC, 12, 17),)),
    "hello": wire.Hello(1, EPOCH, 0, 4242, "ipc:///tmp/omni-x/5566778899"),
    "failed": wire.Failed(1, "req-77aa01c2d3e4", "ProcessorError", "why"),
    "release": wire.Release(1, "req-77aa01c2d3e4"),
    "released": wire.Released(1, "req-77aa01c2d3e4", 0),
    "admission": wire.Admission(1, "req-5f0c6d1e2a3b", 3, True, (("audio", "d-1"),), START),
    "greet": services.Greet(1, "decoder-1f2e3d4c", DECODER),
    "welcome-ar": services.Welcome(1, EPOCH, AR),
    "welcome-decoder": services.Welcome(1, EPOCH, None, DECODER),
    "refuse": services.Refuse(1, "why"),
    "stranger": services.Stranger(1),
    "beat": services.Beat(1),
    "farewell": services.Farewell(1),
    "decoders": services.Decoders(1, (DECODER,), True),
    "split": services.Split(1, 3, INPUT),
    "pieces": services.Pieces(1, 3, (INPUT, services.Input((1, 2))), FAULT),
    "submit": services.Submit(
        1, "req-1.1", "mine", INPUT, (("audio", "decoder-1f2e3d4c"),), "client-1", "req-1", True
    ),
    "done": services.Done(1, "req-1", 7, 61, FinishReason.LENGTH, "text", FAULT),
    "abort": services.Abort(1, "req-1"),
    "aborted": services.Aborted(1, "req-1", FAULT),
    # Kinds with fields that came after protocol 1 was frozen: last, and with defaults.
    "welcome-ar-inputs": services.Welcome(
        1,
        EPOCH,
        services.ARInfo(
            "ar", "talker", ("ipc:///a",), "audio", inputs=services.INPUTS, rows=("hidden",)
        ),
    ),
    "submit-tensors": services.Submit(
        1,
        "req-2",
        "",
        services.Input(
            (),
            conditioning={"voice": services.Tensor("bfloat16", (2, 3), BUFFER)},
            embeddings=services.Tensor("float32", (1, 1), bytes.fromhex("0000803f")),
        ),
        (),
        "client-1",
    ),
    "read": services.Read(1, "req-1", 4800),
}


def listing() -> str:
    """The files in a form to read: for each, its bytes and what MessagePack makes of them."""
    parts = [
        f"# Golden frames of protocol {wire.PROTOCOL_VERSION}\n\n"
        "Each file is the header of one message. `data.0.buffer` is what `data` carries with it:\n"
        "a bfloat16 tensor of 2 by 3, little endian, 1 to 6. Bytes are shown as text in `0x`.\n"
    ]
    for name in MESSAGES:
        raw = (FOLDER / name).read_bytes()
        fields = json.dumps(_readable(msgspec.msgpack.decode(raw)))
        parts.append(f"\n## {name}\n\n{len(raw)} bytes\n\n```text\n{_wrapped(raw.hex(' '))}\n```\n")
        parts.append(f"\n```json\n{_wrapped(fields)}\n```\n")
    return "".join(parts)


def _readable(value: object) -> object:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    return value


def _wrapped(text: str) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > 95:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def write() -> None:
    """Write the files that are missing, and the listing."""
    for name, message in MESSAGES.items():
        path = FOLDER / name
        if not path.exists():
            path.write_bytes(wire.encode(message))
    buffer = FOLDER / "data.0.buffer"
    if not buffer.exists():
        buffer.write_bytes(BUFFER)
    (FOLDER / "README.md").write_text(listing())


if __name__ == "__main__":
    write()

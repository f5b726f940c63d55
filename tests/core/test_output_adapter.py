"""The output adapter: processors that fail, several channels, and the promise of one terminal."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from omnistage.adapters.processor import CodecFrames, Emission, TokenUpdates
from omnistage.core.events import Ending, Event, Record, StepEvents
from omnistage.core.output_adapter import OutputAdapter
from omnistage.core.wiring import WiredConfig, Wiring, wiring_of
from omnistage.errors import UpdatesLost
from omnistage.request import FinishReason, Payload, Start
from omnistage.transport.handover import HandOver
from omnistage.transport.publisher import Outgoing, PublisherConfig
from omnistage.wire import PROTOCOL_VERSION, Admission, Data, Update, decode_data, encode


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Scripted:
    """A processor whose update does what the request's id says."""

    requires_token_updates = True

    def open(self, request_id: str, start: Start) -> str:
        if request_id == "raises-in-open":
            raise RuntimeError("no state for you")
        return request_id

    def update(self, state: str, step: Any) -> Any:
        match state:
            case "raises":
                raise RuntimeError("cannot")
            case "returns-garbage":
                return 42
            case "returns-floats":
                return Emission([1.5])  # type: ignore[list-item]
            case "lies-about-a-shape":
                return Emission(tensors={"x": Payload("float32", (2, 2), 0, b"123")})
            case "unprintable":
                raise RuntimeError(Unprintable())
            case "no-text":
                raise FileNotFoundError("/data/\udcff.bin")
            case "exits":
                raise SystemExit(1)
            case "long":
                raise RuntimeError("x" * 5_000_000)
            case "huge-id":
                return Emission((10**30,))
            case "many-ids":
                return Emission(range(100_000))
            case "many-tensors":
                return Emission(tensors={str(i): Payload("int8", (1,), 0, b"1") for i in range(99)})
            case "number-for-a-name":
                return Emission(tensors={5: Payload("int8", (1,), 0, b"1")})  # type: ignore[dict-item]
            case "fractional-shape":
                return Emission(tensors={"x": Payload("int8", (1.0,), 0, b"1")})  # type: ignore[arg-type]
            case "strided":
                return Emission(tensors={"x": Payload("int8", (2,), 0, memoryview(b"1234")[::2])})
            case "unknown-dtype":
                return Emission(tensors={"x": Payload("complex64", (1,), 0, bytes(8))})
        return Emission(step.ids)

    def finish(self, state: str, reason: FinishReason) -> None:
        if state == "raises-in-finish":
            raise RuntimeError("cannot finish")


def record(request_id: str, *consumers: tuple[str, str]) -> Record:
    admission = Admission(
        PROTOCOL_VERSION, request_id, 0, False, consumers or (("audio", "s"),), Start(seed=3)
    )
    return Record(admission, takes_tokens=True)


class Run:
    def __init__(self, **channels: Any) -> None:
        self.steps: HandOver[Any] = HandOver(1000)
        self.adapter = OutputAdapter(channels or {"audio": Scripted()}, self.steps)

    def step(self, *events: Event) -> list[Outgoing]:
        self.steps.put(StepEvents(1, list(events)))
        return list(self.adapter.messages())

    def updates(self, *events: Event) -> dict[str, Update]:
        return {u.request_id: u for m in self.step(*events) for u in m.updates}


END = Ending(FinishReason.STOP, 5)


@pytest.mark.parametrize(
    "request_id",
    [
        "raises",
        "raises-in-open",
        "returns-garbage",
        "returns-floats",
        "lies-about-a-shape",
        "unknown-dtype",
        "unprintable",
        "no-text",
        "exits",
        "long",
        "huge-id",
        "many-ids",
        "many-tensors",
        "number-for-a-name",
        "fractional-shape",
        "strided",
    ],
)
def test_a_processor_that_fails_fails_its_own_request_only(request_id: str) -> None:
    run = Run()
    bad, good = record(request_id), record("good")
    updates = run.updates(Event(bad, (1, 2)), Event(good, (3,)))
    terminal = updates[request_id].terminal
    assert terminal is not None
    assert (terminal.reason, terminal.kind) == (FinishReason.ERROR, "ProcessorError")
    assert "Scripted" in (terminal.error or "")
    assert updates[request_id].start is not None
    assert updates["good"].ids == (3,)
    raw = encode(Data(PROTOCOL_VERSION, 1, 0, 0, 0, tuple(updates.values())))
    assert isinstance(decode_data(raw), Data)  # it can be sent
    assert [failure.request_id for failure in run.adapter.failures()] == [request_id]
    # What vLLM still delivers for it until it is aborted there is ignored.
    assert list(run.updates(Event(bad, (4,)), Event(good, (5,)))) == ["good"]
    assert list(run.updates(Event(bad, ending=END), Event(good, ending=END))) == ["good"]
    assert not len(run.adapter)
    assert not run.adapter.failures()


def test_a_processor_that_raises_in_finish_ends_in_an_error() -> None:
    run = Run()
    bad = record("raises-in-finish")
    run.step(Event(bad, (1,)))
    updates = run.updates(Event(bad, (2,), 1, ending=END))
    terminal = updates["raises-in-finish"].terminal
    assert terminal is not None
    assert terminal.reason is FinishReason.ERROR
    assert not len(run.adapter)


def test_a_failing_processor_leaves_no_half_step_on_another_channel() -> None:
    run = Run(audio=Scripted(), text=TokenUpdates())
    both = record("raises", ("text", "t"), ("audio", "a"))
    messages = run.step(Event(both, (1, 2)))
    assert {m.topic: [u.ids for u in m.updates] for m in messages} == {
        b"text/t\0": [()],
        b"audio/a\0": [()],
    }
    assert all(u.terminal is not None for m in messages for u in m.updates)


def test_each_channel_counts_its_own_positions() -> None:
    run = Run(frames=CodecFrames(first_id=10, codebook_size=5, codebooks=2), ids=TokenUpdates())
    one = record("r", ("frames", "f"), ("ids", "i"))
    seen: dict[bytes, list[tuple[int, tuple[int, ...]]]] = {}
    for ids in [(10,), (99, 11), (12, 13, 14)]:
        for message in run.step(Event(one, ids)):
            seen.setdefault(message.topic, []).extend((u.position, u.ids) for u in message.updates)
    assert seen[b"ids/i\0"] == [(0, (10,)), (1, (99, 11)), (3, (12, 13, 14))]
    assert seen[b"frames/f\0"] == [(0, (0, 1)), (2, (2, 3))]
    (end,) = (m for m in run.step(Event(one, ending=END)) if m.topic == b"frames/f\0")
    terminal = end.updates[0].terminal
    assert terminal is not None
    assert (terminal.tokens, terminal.dropped) == (5, 2)


def test_an_undelivered_message_fails_the_topics_requests_on_all_their_topics() -> None:
    run = Run(audio=TokenUpdates())
    shared, own, other = (
        record("shared", ("audio", "gone"), ("audio", "here")),
        record("own", ("audio", "gone")),
        record("other", ("audio", "here")),
    )
    sent: list[Outgoing] = []
    run.steps.put(StepEvents(1, [Event(r, (1,)) for r in (shared, own, other)]))
    for message in run.adapter.messages():
        if message.topic == b"audio/gone\0":
            run.adapter.undelivered(message.topic, UpdatesLost("gone"))
        else:
            sent.append(message)
    assert sorted(f.request_id for f in run.adapter.failures()) == ["own", "shared"]
    terminals = {u.request_id: u.terminal for m in sent for u in m.updates if u.terminal}
    assert list(terminals) == ["shared"]
    assert terminals["shared"].kind == "UpdatesLost"
    assert list(run.updates(*(Event(r, (2,)) for r in (shared, own, other)))) == ["other"]


def test_a_terminal_that_cannot_be_sent_is_reported() -> None:
    run = Run(audio=TokenUpdates())
    only = record("r")
    run.step(Event(only, (1,)))
    run.steps.put(StepEvents(1, [Event(only, (2,), 1, ending=END)]))
    for message in run.adapter.messages():
        run.adapter.undelivered(message.topic, UpdatesLost("gone"))
    assert [f.request_id for f in run.adapter.failures()] == ["r"]
    assert not len(run.adapter)


def test_tensors_of_several_requests_share_a_message_and_point_at_their_own_buffers() -> None:
    run = Run(audio=TokenUpdates())
    payloads = [Payload("int16", (2,), 4, bytes([i, 0, i, 0])) for i in range(3)]
    (message,) = run.step(
        *(Event(record(f"r{i}"), (i,), tensors={"rows": p}) for i, p in enumerate(payloads))
    )
    for i, update in enumerate(message.updates):
        (info,) = update.tensors
        assert message.buffers[info.frame] == payloads[i].data
        assert (info.name, info.dtype, info.shape, info.first_row) == ("rows", "int16", (2,), 4)


def test_the_wiring_crosses_a_process_border_and_stays_out_of_the_compile_cache_key() -> None:
    publisher = PublisherConfig(bind="ipc", directory="d", control="c", owner_pid=1)
    processor = CodecFrames(first_id=1, codebook_size=4)
    wired = WiredConfig(
        {"x": 1}, Wiring(stage="ar", channels={"audio": processor}, publisher=publisher)
    )
    copy = pickle.loads(pickle.dumps(wired))  # noqa: S301 as multiprocessing does it for vLLM
    assert copy == {"x": 1}
    assert copy.omnistage == wired.omnistage

    class Config:
        additional_config = copy

    assert wiring_of(Config()) == wired.omnistage
    assert wiring_of(object()) is None


def test_a_step_whose_processors_take_long_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Busy(TokenUpdates):
        def update(self, state: None, step: Any) -> Emission:
            until = time.thread_time_ns() + 2_000_000
            while time.thread_time_ns() < until:
                pass
            return super().update(state, step)

    run = Run(audio=Busy())
    slow = record("slow")
    for i in range(3):
        run.step(Event(slow, (i,), i))
    assert run.adapter.slow_steps == 3
    assert len([r for r in caplog.records if "slow every request" in r.message]) == 1

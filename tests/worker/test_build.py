"""From a forward pass to a payload: spans, dtypes, memory, on the state of vLLM's own runners."""

from __future__ import annotations

import contextlib
import pickle
import re
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import ExecuteModelState as StateV2
from vllm.v1.worker.gpu_model_runner import ExecuteModelState as StateV1

from omnistage.core.rows import RowCount
from omnistage.tensors import ITEM_BYTES
from omnistage.worker import build as build_module
from omnistage.worker.build import DTYPES, Taken, TakenRows, build, take
from omnistage.worker.contract import HIDDEN, ModelContract, Occurrence
from omnistage.worker.mixin import PayloadOutput, with_payload
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE, Rows, StepPayload
from omnistage.worker.reader import Executed, read_executed

COUNTS = {"a": 3, "b": 1, "c": 4}
COMPUTED = {"a": 0, "b": 17, "c": 5}
PROMPTS = {"a": 9, "b": 12, "c": 7}  # so that two of c's rows are its prompt's, and none of b's
STARTS = {"c": 0, "a": 4, "b": 7}
STOCK = ModelContract(model="Stock")


def hidden_states(dtype: torch.dtype = torch.float32, padding: int = 3) -> torch.Tensor:
    """Rows that say where they are, [8 and padding, 2]."""
    count = sum(COUNTS.values()) + padding
    return torch.arange(count * 2).reshape(count, 2).to(dtype)


def runner_v1(hidden: Any) -> Any:
    """What V1 keeps: the state, and the batch beside it."""
    fields: dict[str, Any] = dict.fromkeys(StateV1._fields)
    fields["scheduler_output"] = SimpleNamespace(num_scheduled_tokens=dict(sorted(COUNTS.items())))
    fields["hidden_states"] = hidden
    batch = SimpleNamespace(  # in another order than the scheduler's, as it is after condensing
        req_ids=["c", "a", "b"],
        num_reqs=3,
        num_computed_tokens_cpu=np.array([5, 0, 17, 99, 99], np.int32),
    )
    return SimpleNamespace(
        execute_model_state=StateV1(**fields), input_batch=batch, use_async_spec_decode=False
    )


def runner_v2(hidden: Any) -> Any:
    """What V2 keeps: the batch in the state."""
    buffers = InputBuffers(max_num_reqs=8, max_num_tokens=32, device=torch.device("cpu"))
    batch = InputBatch.make_dummy(3, 8, buffers)
    batch.req_ids = ["c", "a", "b"]
    batch.num_scheduled_tokens = np.array([4, 3, 1], np.int32)
    batch.num_computed_tokens_np = np.array([5, 0, 17], np.int32)
    fields: dict[str, Any] = dict.fromkeys(StateV2._fields)
    fields |= {"input_batch": batch, "hidden_states": hidden}
    return SimpleNamespace(execute_model_state=StateV2(**fields))


def executed(hidden: torch.Tensor) -> Executed:
    found = read_executed(runner_v1(hidden))
    assert found is not None
    return found


@pytest.mark.parametrize("runner", [runner_v1, runner_v2])
def test_both_runners_states_read_the_same(runner: Any) -> None:
    hidden = hidden_states()
    found = read_executed(runner(hidden))
    assert found is not None
    assert list(found.request_ids) == ["c", "a", "b"]
    assert list(found.counts) == [4, 3, 1]
    assert list(found.first_rows) == [5, 0, 17]
    assert {type(n) for n in (*found.counts, *found.first_rows)} == {int}
    assert found.hidden is hidden


def test_where_the_host_guesses_positions_the_devices_are_read() -> None:
    runner = runner_v1(hidden_states())
    runner.use_async_spec_decode = True
    runner.num_computed_tokens = torch.tensor([4, 0, 15, 7], dtype=torch.int32)
    found = read_executed(runner)
    assert found is not None
    assert list(found.first_rows) == [4, 0, 15]


@pytest.mark.parametrize("runner", [runner_v1, runner_v2])
def test_a_rank_without_hidden_states_has_nothing(runner: Any) -> None:
    assert read_executed(runner(None)) is None
    assert read_executed(SimpleNamespace(execute_model_state=None)) is None


def taken(
    wanted: str,
    hidden: torch.Tensor | None = None,
    contract: ModelContract = STOCK,
    **outputs: Any,
) -> StepPayload | None:
    """The payload of one step."""
    found = executed(hidden_states() if hidden is None else hidden)
    one = take(found, outputs, contract, {name: PROMPTS.get(name, 1) for name in wanted})
    return None if one is None else build(one, ["c", "a", "b"])


def rows_of(rows: Rows, index: int) -> bytes:
    """One request's share of a key."""
    size = len(rows.data) // rows.ends[-1]
    return bytes(rows.data[(rows.ends[index - 1] if index else 0) * size : rows.ends[index] * size])


@pytest.mark.parametrize("wanted", ["", "a", "b", "ab", "abc", "bx", "x"])
def test_the_wanted_requests_have_their_own_rows_and_no_others(wanted: str) -> None:
    hidden = hidden_states()
    payload = taken(wanted, hidden)
    if not set(wanted) & set(COUNTS):
        assert payload is None
        return
    assert payload is not None
    names = [payload.request_ids[place] for place in payload.places]
    assert sorted(names) == sorted(set(wanted) & set(COUNTS))
    rows = payload.keys[HIDDEN]
    assert (rows.occurrence, rows.dtype, rows.shape) == (Occurrence.TOKEN, "float32", (2,))
    for i, name in enumerate(names):
        assert (payload.first_rows[i], payload.counts[i]) == (COMPUTED[name], COUNTS[name])
        own = hidden[STARTS[name] : STARTS[name] + COUNTS[name]]
        assert rows_of(rows, i) == own.numpy().tobytes()


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_dtype_crosses_exactly(dtype: str) -> None:
    hidden = hidden_states(getattr(torch, dtype))
    payload = taken("a", hidden)
    assert payload is not None
    arrived = pickle.loads(pickle.dumps(payload, 5)).keys[HIDDEN]  # noqa: S301 as vLLM sends it
    assert arrived.dtype == dtype
    assert len(arrived.data) == 3 * 2 * ITEM_BYTES[dtype]
    back = torch.frombuffer(bytearray(arrived.data), dtype=getattr(torch, dtype)).reshape(3, 2)
    assert torch.equal(back.view(torch.uint8), hidden[4:7].view(torch.uint8))


def test_every_dtype_of_the_wire_is_known_to_the_worker() -> None:
    assert set(DTYPES.values()) == set(ITEM_BYTES)


KEYS = ModelContract(
    model="Extended",
    include_hidden=False,
    outputs={
        "codes": Occurrence.TOKEN,
        "voice": Occurrence.REQUEST,
        "prompt": Occurrence.PREFILL,
    },
)


def outputs() -> dict[str, torch.Tensor]:
    """What :data:`KEYS` declares: rows of 11 tokens with their padding, and of 3 requests."""
    return {
        "codes": torch.arange(11),
        "voice": torch.tensor([[100], [101], [102]], dtype=torch.int16),
        "prompt": torch.arange(11) + 50,
    }


def values(rows: Rows, dtype: Any) -> list[list[int]]:
    """Each request's share of a key, as numbers."""
    return [np.frombuffer(rows_of(rows, i), dtype).tolist() for i in range(len(rows.ends))]


def test_each_key_is_cut_as_it_is_declared_and_hidden_states_stay() -> None:
    payload = taken("cab", contract=KEYS, **outputs())
    assert payload is not None
    assert payload.places == [0, 1, 2]
    assert sorted(payload.keys) == ["codes", "prompt", "voice"]
    assert values(payload.keys["codes"], np.int64) == [[0, 1, 2, 3], [4, 5, 6], [7]]
    assert values(payload.keys["voice"], np.int16) == [[100], [101], [102]]
    assert values(payload.keys["prompt"], np.int64) == [[50, 51], [54, 55, 56], []]
    payload = taken("b", contract=KEYS, **outputs())
    assert payload is not None
    assert sorted(payload.keys) == ["codes", "voice"]  # no row of a prompt in the step
    assert values(payload.keys["voice"], np.int16) == [[102]]


def test_where_only_prompts_cross_a_step_behind_them_has_nothing() -> None:
    contract = ModelContract(
        model="Prompts", include_hidden=False, outputs={"prompt": Occurrence.PREFILL}
    )
    assert taken("b", contract=contract) is None
    payload = taken("ab", contract=contract, prompt=torch.arange(11))
    assert payload is not None
    assert [payload.request_ids[place] for place in payload.places] == ["a"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"surprise": torch.zeros(11)}, "returned 'surprise', which its omni_outputs does not"),
        ({"codes": None}, "declares 'codes' and returned NoneType"),
        ({"codes": [1, 2]}, "declares 'codes' and returned list"),
        ({"codes": torch.zeros(7)}, r"'codes' of shape \[7\]; one row a token makes 8"),
        ({"codes": torch.tensor(1)}, r"'codes' of shape \[\]"),
        ({"voice": torch.zeros(2, 1)}, r"'voice' of shape \[2, 1\]; one row a request makes 3"),
        ({"prompt": None}, "no 'prompt' for a step whose rows of it are due"),
        ({"codes": torch.zeros(11, dtype=torch.complex64)}, "'codes' in torch.complex64"),
    ],
)
def test_outputs_that_are_not_what_is_declared_are_an_error_that_names_the_key(
    given: dict[str, Any], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    payload = taken("ab", contract=KEYS, **{**outputs(), **given})
    assert payload is not None
    assert payload.keys == {}
    assert payload.errors[0] == payload.errors[1]
    assert re.search(complaint, payload.errors[0])
    assert "OutputError: Extended" in payload.errors[0]
    assert [record.exc_info is not None for record in caplog.records] == [True]
    # Those of a step in which nobody wants any are not looked at.
    assert taken("", contract=KEYS, **given) is None


def test_an_error_while_bringing_them_to_the_host_is_the_original_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(rows: TakenRows) -> Rows:
        raise ZeroDivisionError("of the thread")

    monkeypatch.setattr(build_module, "_to_host", breaks)
    payload = taken("ab")
    assert payload is not None
    assert payload.places == [1, 2]
    assert set(payload.errors) == {0, 1}
    assert payload.errors[0].startswith("ZeroDivisionError: of the thread (")
    assert "test_build.py:" in payload.errors[0]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


@pytest.mark.parametrize("later", [False, True], ids=["inline", "background"])
@pytest.mark.parametrize("wanted", ["a", "abc"])
def test_what_the_runner_does_with_its_memory_afterwards_changes_nothing(
    wanted: str, later: bool
) -> None:
    runner = runner_v1(hidden := hidden_states())
    given, wants = outputs(), {name: PROMPTS[name] for name in wanted}
    contract = ModelContract(model="All", outputs=KEYS.outputs)

    def made(reuse: bool) -> StepPayload:
        found = read_executed(runner)
        assert found is not None
        one = take(found, given, contract, wants, later=later)
        assert one is not None
        if reuse:  # as the next execution does, before a background thread has come to it
            hidden.fill_(-1)
            for tensor in given.values():
                tensor.fill_(-1)
            given.clear()
            wants.clear()
            runner.input_batch.req_ids.clear()
            runner.input_batch.num_computed_tokens_cpu[:] = 0
            runner.execute_model_state.scheduler_output.num_scheduled_tokens.clear()
        return build(one, ["c", "a", "b"])

    before, after = made(reuse=False), made(reuse=True)
    assert (after.places, after.first_rows, after.counts) == (
        before.places,
        before.first_rows,
        before.counts,
    )
    assert sorted(after.keys) == ["codes", "hidden", "prompt", "voice"]
    for key, rows in before.keys.items():
        assert after.keys[key].ends == rows.ends
        assert bytes(after.keys[key].data) == bytes(rows.data)
        assert rows.data.base is not None  # of a tensor of its own, not of the runner's
        assert not np.shares_memory(rows.data, hidden.view(torch.uint8).numpy())


def test_rows_that_are_strided_or_need_a_gradient_are_taken_as_they_are() -> None:
    wide = torch.arange(44.0).reshape(11, 4).requires_grad_()
    payload = taken("a", wide[:, ::2])
    assert payload is not None
    expected = wide.detach()[4:7, ::2].contiguous().numpy().tobytes()
    assert bytes(payload.keys[HIDDEN].data) == expected


def test_large_rows_are_carried_beside_what_vllm_pickles() -> None:
    payload = taken("abc", torch.zeros(8, 1 << 16))
    assert payload is not None
    beside: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(payload, 5, buffer_callback=beside.append)) < 2000
    assert [len(buffer.raw()) for buffer in beside] == [8 * 4 << 16]


@pytest.mark.parametrize("counts", [[1, 7, 1], [7, 1, 1], [2, 0, 3], [0, 1, 0], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_each_request_has_the_rows_that_were_scheduled_for_it(
    counts: list[int], padding: int
) -> None:
    """Whatever else of the batch is a prefill, a decode step, or has nothing scheduled."""
    names, firsts = ["a", "b", "c"], [40, 0, 9]
    total = sum(counts)
    found = Executed(names, counts, firsts, torch.arange(total + padding).reshape(-1, 1))
    one = take(found, {}, STOCK, dict.fromkeys(names, 60))
    assert one is not None
    payload = build(one, names)
    assert (payload.first_rows, payload.counts) == (firsts, counts)
    stops = list(accumulate(counts))
    expected = [list(range(n - count, n)) for n, count in zip(stops, counts, strict=True)]
    assert values(payload.keys[HIDDEN], np.int64) == expected
    for i, count in enumerate(counts):
        passed = RowCount(60)
        passed.next = firsts[i]
        tensors = passed.take(payload, i, committed=0, sampled=0)
        assert (tensors is None) == (count == 0)


class OnDevice(torch.Tensor):
    """Rows that say they are on a device, and note when they are copied from it."""

    is_cuda = True
    device = "cuda:1"  # type: ignore[assignment]
    noted: list[Any] = []  # noqa: RUF012 the test's

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        self.noted.append(("copied", *args))
        return self.as_subclass(torch.Tensor)

    def cpu(self, *_: Any) -> torch.Tensor:
        self.noted.append(("copied", "cpu"))
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done with streams and events of a device, in order."""
    noted: list[Any] = []
    monkeypatch.setattr(OnDevice, "noted", noted)

    class Event:
        def record(self) -> None:
            noted.append("recorded")

    class Stream:
        def __init__(self, where: Any) -> None:
            noted.append(("stream", where))

        def wait_event(self, event: Event) -> None:
            noted.append("waits")

        def synchronize(self) -> None:
            noted.append("synchronized")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    return noted


def test_rows_on_a_device_are_handed_over_when_their_copy_is_complete(device: list[Any]) -> None:
    """The clone is the step's own; the copy waits for it, on its device, in a stream of its own."""
    hidden = hidden_states()
    wanted = {"a": PROMPTS["a"]}
    found = executed(hidden.as_subclass(OnDevice))
    one = take(found, {}, STOCK, wanted, later=True)
    assert one is not None
    assert device == ["recorded"]
    expected = hidden[4:7].numpy().tobytes()
    hidden.fill_(-1)  # the next forward pass
    payload = build(one, ["c", "a", "b"])
    assert device[1:] == [("stream", "cuda:1"), "waits", ("copied", "cpu"), "synchronized"]
    assert bytes(payload.keys[HIDDEN].data) == expected


def test_inline_the_copy_from_a_device_is_complete_before_sampling(device: list[Any]) -> None:
    found = executed(hidden_states().as_subclass(OnDevice))
    one = take(found, {}, STOCK, {"a": PROMPTS["a"]})
    assert one is not None
    assert device == [("copied", "cpu")]
    build(one, ["c", "a", "b"])
    assert device == [("copied", "cpu")]


TAKEN = Taken([0], [0], [1], [1], {HIDDEN: TakenRows(Occurrence.TOKEN, [1], torch.ones(1, 1))})


def output_of(name: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0})


def test_a_payload_names_its_requests_by_the_very_list_that_vllm_returns() -> None:
    output = output_of("a")
    assert with_payload(output, TAKEN) is output
    assert getattr(output, PAYLOAD_ATTRIBUTE).request_ids is output.req_ids
    # And still does where it arrives.
    arrived = pickle.loads(pickle.dumps(output, 5))  # noqa: S301
    assert getattr(arrived, PAYLOAD_ATTRIBUTE).request_ids is arrived.req_ids


def test_an_output_that_comes_later_carries_its_payload_then() -> None:
    inner = output_of("a")

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return inner

        def get_kv_connector_output(self) -> str:  # as vLLM 0.33 asks for
            return "connector"

    output = with_payload(Later(), TAKEN)
    assert isinstance(output, PayloadOutput)
    assert not hasattr(inner, PAYLOAD_ATTRIBUTE)
    assert output.get_kv_connector_output() == "connector"
    assert output.get_output() is inner
    assert getattr(inner, PAYLOAD_ATTRIBUTE).request_ids is inner.req_ids


def test_the_output_that_all_steps_share_carries_none() -> None:
    assert with_payload(EMPTY_MODEL_RUNNER_OUTPUT, TAKEN) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, PAYLOAD_ATTRIBUTE)

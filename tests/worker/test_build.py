"""From a forward pass to a payload: spans, dtypes, memory, on the state of vLLM's own runners."""

from __future__ import annotations

import pickle
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

from omnistage.tensors import ITEM_BYTES
from omnistage.worker.build import build_payload
from omnistage.worker.mixin import PayloadOutput, with_payload
from omnistage.worker.payload import HIDDEN, PAYLOAD_ATTRIBUTE, Rows, StepPayload
from omnistage.worker.reader import Executed, read_executed

COUNTS = {"a": 3, "b": 1, "c": 4}
COMPUTED = {"a": 0, "b": 17, "c": 5}


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
    return SimpleNamespace(execute_model_state=StateV1(**fields), input_batch=batch)


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


@pytest.mark.parametrize("runner", [runner_v1, runner_v2])
def test_a_rank_without_hidden_states_has_nothing(runner: Any) -> None:
    assert read_executed(runner(None)) is None
    assert read_executed(SimpleNamespace(execute_model_state=None)) is None


@pytest.mark.parametrize("wanted", ["", "a", "b", "ab", "abc", "bx", "x"])
def test_the_wanted_requests_have_their_own_rows_and_no_others(wanted: str) -> None:
    hidden = hidden_states()
    payload = build_payload(executed(hidden), set(wanted))
    if not set(wanted) & set(COUNTS):
        assert payload is None
        return
    assert payload is not None
    assert sorted(payload.request_ids) == sorted(set(wanted) & set(COUNTS))
    starts = {"c": 0, "a": 4, "b": 7}
    rows = payload.keys[HIDDEN]
    assert (rows.dtype, rows.shape) == ("float32", (2,))
    for i, name in enumerate(payload.request_ids):
        assert (payload.first_rows[i], payload.counts[i]) == (COMPUTED[name], COUNTS[name])
        own = hidden[starts[name] : starts[name] + COUNTS[name]]
        assert rows.data[i] == own.numpy().tobytes()


@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if name != "bool"])
def test_a_dtype_crosses_exactly(dtype: str) -> None:
    hidden = hidden_states(getattr(torch, dtype))
    payload = build_payload(executed(hidden), {"a"})
    assert payload is not None
    arrived = pickle.loads(pickle.dumps(payload, 5)).keys[HIDDEN]  # noqa: S301 as vLLM sends it
    assert arrived.dtype == dtype
    (data,) = arrived.data
    assert len(data) == 3 * 2 * ITEM_BYTES[dtype]
    back = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(3, 2)
    assert torch.equal(back.view(torch.uint8), hidden[4:7].view(torch.uint8))


@pytest.mark.parametrize("wanted", ["a", "abc"])
def test_what_the_runner_does_with_its_memory_afterwards_changes_nothing(wanted: str) -> None:
    runner = runner_v1(hidden := hidden_states())
    found = read_executed(runner)
    assert found is not None
    payload = build_payload(found, set(wanted))
    assert payload is not None
    before = (list(payload.request_ids), list(payload.first_rows), list(payload.counts))
    data = list(payload.keys[HIDDEN].data)
    kept = [bytes(bytearray(one)) for one in data]
    hidden.fill_(-1)
    runner.input_batch.req_ids.clear()
    runner.input_batch.num_computed_tokens_cpu[:] = 0
    runner.execute_model_state.scheduler_output.num_scheduled_tokens.clear()
    assert (payload.request_ids, payload.first_rows, payload.counts) == before
    assert payload.keys[HIDDEN].data == kept


def test_rows_that_are_strided_or_need_a_gradient_are_taken_as_they_are() -> None:
    wide = torch.arange(44.0).reshape(11, 4).requires_grad_()
    payload = build_payload(executed(wide[:, ::2]), {"a"})
    assert payload is not None
    assert payload.keys[HIDDEN].data == [wide.detach()[4:7, ::2].contiguous().numpy().tobytes()]


PAYLOAD = StepPayload(["a"], [0], [1], {HIDDEN: Rows("int8", (1,), [b"1"])})


def test_an_output_that_comes_later_carries_its_payload_then() -> None:
    inner = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return inner

        def get_kv_connector_output(self) -> str:  # as vLLM 0.33 asks for
            return "connector"

    output = with_payload(Later(), PAYLOAD)
    assert isinstance(output, PayloadOutput)
    assert not hasattr(inner, PAYLOAD_ATTRIBUTE)
    assert output.get_kv_connector_output() == "connector"
    assert output.get_output() is inner
    assert getattr(inner, PAYLOAD_ATTRIBUTE) is PAYLOAD


def test_the_output_that_all_steps_share_carries_none() -> None:
    assert with_payload(EMPTY_MODEL_RUNNER_OUTPUT, PAYLOAD) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, PAYLOAD_ATTRIBUTE)

"""What the mixin does in a step, over a worker whose forward pass and sampling are written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from omnistage.worker import mixin as mixin_module
from omnistage.worker.build import build, take
from omnistage.worker.mixin import PayloadOutput, PayloadWorkerMixin
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE, WANTS_PAYLOAD, StepPayload
from omnistage.worker.reader import Batch


class Ready(AsyncModelRunnerOutput):
    """An output that comes when it is asked for."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output


class Stock(WorkerBase):
    """A worker of vLLM's, as far as the mixin calls it: two requests of two and one tokens."""

    def __init__(self, model: nn.Module, *, asynchronous: bool, executor: str) -> None:
        self.vllm_config: Any = SimpleNamespace(
            additional_config={},
            parallel_config=SimpleNamespace(distributed_executor_backend=executor),
            scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        )
        self.model_runner: Any = SimpleNamespace(
            execute_model_state=None,
            use_async_spec_decode=False,
            input_batch=SimpleNamespace(
                req_ids=["a", "b"], num_reqs=2, num_computed_tokens_cpu=np.array([4, 9])
            ),
        )
        self.model = model

    def get_model(self) -> nn.Module:
        return self.model

    def load_model(self, *, load_dummy_weights: bool = False) -> None: ...

    def execute_model(self, scheduler_output: Any) -> Any:
        hidden = self.model(torch.arange(3))
        self.model_runner.execute_model_state = SimpleNamespace(
            hidden_states=hidden, scheduler_output=scheduler_output
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.model_runner.execute_model_state = None
        output = ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1})
        return Ready(output) if self.vllm_config.scheduler_config.async_scheduling else output


class Worker(PayloadWorkerMixin, Stock):
    """The mixin over it."""


class Plain(nn.Module):
    def forward(self, tokens: torch.Tensor) -> Any:
        return torch.stack([tokens, tokens], dim=1).float()


class WithHooks(Plain):
    """Says what it was given."""

    omni_pooler_payload_include_hidden = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def omni_preprocess(self, spans: Any) -> None:
        self.seen.append(("before", [(s.request_id, s.start, s.stop, s.position) for s in spans]))

    def omni_postprocess(self, spans: Any, hidden: torch.Tensor, outputs: Any) -> None:
        self.seen.append(("after", [s.request_id for s in spans], tuple(hidden.shape), outputs))


def step(*wants: str, new: bool = True) -> Any:
    extra = {n: {WANTS_PAYLOAD: True} if n in wants else None for n in "ab"}
    added = [
        SimpleNamespace(
            req_id=n,
            prompt_token_ids=[1] * 5,
            prompt_embeds=None,
            sampling_params=SimpleNamespace(extra_args=extra[n]),
        )
        for n in "ab"
    ]
    return SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=added if new else [],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        num_scheduled_tokens={"a": 2, "b": 1},
    )


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(is_last_rank=True, is_first_rank=True)
    monkeypatch.setattr(mixin_module, "get_pp_group", lambda: group)
    monkeypatch.setattr(mixin_module, "get_tp_group", lambda: group)


WAYS = pytest.mark.parametrize(
    ("asynchronous", "executor"),
    [(False, "uni"), (False, "mp"), (True, "uni"), (True, "mp")],
    ids=["sync-uni", "sync-mp", "async-uni", "async-mp"],
)


def worker(model: nn.Module, asynchronous: bool, executor: str) -> Any:
    kind: Any = Worker
    made = kind(model, asynchronous=asynchronous, executor=executor)
    made.load_model()
    return made


def run(one: Any, scheduled: Any) -> StepPayload | None:
    one.execute_model(scheduled)
    output = one.sample_tokens(None)
    if isinstance(output, AsyncModelRunnerOutput):
        output = output.get_output()
    payload: StepPayload | None = vars(output).get(PAYLOAD_ATTRIBUTE)
    return payload


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@WAYS
def test_where_nobody_wants_anything_nothing_is_read_computed_or_made(
    asynchronous: bool, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(Plain(), asynchronous, executor)
    never: list[str] = []
    for name in ("take", "build", "read_executed", "with_payload"):
        monkeypatch.setattr(mixin_module, name, lambda *_, name=name, **__: never.append(name))
    with Operations() as stock:
        Stock.execute_model(one, step())
        Stock.sample_tokens(one, None)
    with Operations() as ours:
        assert run(one, step()) is None
    assert ours.names == stock.names
    assert never == []


@WAYS
def test_a_models_own_work_runs_and_nothing_is_made_where_nobody_wants_anything(
    asynchronous: bool, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = WithHooks()
    one = worker(model, asynchronous, executor)
    never: list[str] = []
    for name in ("take", "build", "with_payload"):
        monkeypatch.setattr(mixin_module, name, lambda *_, name=name, **__: never.append(name))
    assert run(one, step()) is None
    assert model.seen == [
        ("before", [("a", 0, 2, 4), ("b", 2, 3, 9)]),
        ("after", ["a", "b"], (3, 2), {}),
    ]
    assert never == []


@WAYS
def test_what_is_wanted_is_there_with_the_output_whatever_became_of_the_source(
    asynchronous: bool, executor: str
) -> None:
    one = worker(Plain(), asynchronous, executor)
    payload = run(one, step("b"))
    assert payload is not None
    assert payload.places == [1]
    assert (payload.first_rows, payload.counts) == ([9], [1])
    assert payload.keys["hidden"].data.view(np.float32).tolist() == [2, 2]
    # Until it is over, without its name coming again.
    assert run(one, step(new=False)) is not None
    over = step(new=False)
    over.finished_req_ids = {"b"}
    assert run(one, over) is None


def test_a_late_output_is_built_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[bool] = []
    built: list[str] = []

    def note_take(*args: Any, **options: Any) -> Any:
        later.append(options["later"])
        return take(*args, **options)

    def note_build(*args: Any) -> Any:
        built.append("here")
        return build(*args)

    monkeypatch.setattr(mixin_module, "take", note_take)
    monkeypatch.setattr(mixin_module, "build", note_build)
    for asynchronous, executor in [(False, "mp"), (True, "uni"), (True, "mp")]:
        one = worker(Plain(), asynchronous, executor)
        one.execute_model(step("a", "b"))
        output = one.sample_tokens(None)
        assert isinstance(output, PayloadOutput) == asynchronous
        assert len(built) == (not asynchronous)
        if asynchronous:
            output.get_output()
            assert len(built) == 1
        built.clear()
    assert later == [False, False, True]


@pytest.mark.parametrize("rank", ["pp", "tp"])
def test_a_rank_whose_output_nobody_takes_gives_none_and_runs_the_models_work(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(is_last_rank=False, is_first_rank=False)
    monkeypatch.setattr(mixin_module, f"get_{rank}_group", lambda: other)
    model = WithHooks()
    assert run(worker(model, asynchronous=False, executor="mp"), step("a")) is None
    assert [name for name, *_ in model.seen] == ["before", "after"]


def test_a_warm_up_has_no_requests() -> None:
    model = WithHooks()
    one = worker(model, asynchronous=False, executor="uni")
    model(torch.arange(3))
    assert model.seen == []
    assert one._omni_requests.spans(Batch([], [], [])) == []


def test_a_model_that_returns_something_else_beside_hidden_states_is_an_error_with_its_name() -> (
    None
):
    class Odd(Plain):
        omni_outputs = {"codes": "token"}  # noqa: RUF012

        def forward(self, tokens: torch.Tensor) -> Any:
            return super().forward(tokens), [tokens]

    one = worker(Odd(), asynchronous=False, executor="uni")
    with pytest.raises(TypeError, match=r"Odd returned \(Tensor, list\); expected \(hidden"):
        one.execute_model(step())


def test_a_model_that_torch_cannot_hook_is_refused_when_it_is_loaded() -> None:
    class Wrapped(WithHooks):
        def __call__(self, *args: Any) -> Any:
            return self.forward(*args)

    with pytest.raises(RuntimeError, match=r"Wrapped replaces nn\.Module.__call__"):
        worker(Wrapped(), asynchronous=False, executor="uni")

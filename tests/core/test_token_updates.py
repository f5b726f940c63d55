"""Which steps call a processor and which bring a message, on vLLM's real schedulers."""

from __future__ import annotations

import inspect
import logging
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from omnistage.adapters.processor import CodecFrames, Emission, TokenUpdates
from omnistage.core.scheduler import OmniARAsyncScheduler, OmniARScheduler, OmniARSchedulerMixin
from omnistage.request import FinishReason, Start
from tests.core.factories import (
    BLOCK,
    CHANNEL,
    EOS,
    Harness,
    make_request,
    make_scheduler,
    token,
)


class Counting:
    """Notes each call; publishes every id."""

    def __init__(self, *, requires_token_updates: bool = True) -> None:
        self.requires_token_updates = requires_token_updates
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        self.ends: list[tuple[str, FinishReason]] = []

    def open(self, request_id: str, start: Start) -> str:
        return request_id

    def update(self, state: str, step: Any) -> Emission:
        self.steps.append((state, step.ids))
        return Emission(step.ids)

    def finish(self, state: str, reason: FinishReason) -> None:
        self.ends.append((state, reason))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def harness(asynchronous: bool, *, channels: Any = None, **options: Any) -> Harness:
    kept = {k: options.pop(k) for k in ("samples", "log_stats") if k in options}
    return Harness(
        make_scheduler(asynchronous=asynchronous, **options),
        channels or {CHANNEL: TokenUpdates()},
        run_ahead=2 if asynchronous else 1,
        **kept,
    )


def test_one_channels_declaration_brings_another_channels_processor_no_call(
    asynchronous: bool,
) -> None:
    opted, other = Counting(), Counting(requires_token_updates=False)
    run = harness(asynchronous, channels={"ids": opted, "rows": other})
    run.add(make_request("both", max_tokens=8, consumers=(("ids", "i"), ("rows", "r"))))
    run.add(make_request("rows only", max_tokens=8, consumers=(("rows", "r"),)))
    run.run()
    assert [ids for _, ids in opted.steps] == [(token("both", k),) for k in range(8)]
    assert other.steps == []
    assert sorted(other.ends) == [("both", "length"), ("rows only", "length")]
    assert [u.request_id for u in run.topics[b"rows/r\0"].updates] == ["both", "rows only"]


@pytest.mark.parametrize(
    "options",
    [{"budget": 16}, {"blocks": 11, "budget": 48}],
    ids=["prefilled in chunks", "preempted"],
)
def test_a_step_without_ids_calls_no_processor(asynchronous: bool, options: dict[str, Any]) -> None:
    opted = Counting()
    run = harness(asynchronous, channels={CHANNEL: opted}, **options)
    run.add(*(make_request(f"r{i}", prompt=2 * BLOCK + 5, max_tokens=40) for i in range(4)))
    run.run()
    assert ("blocks" in options) == any(update.paused for update in run.published.updates)
    assert len(opted.steps) == 160
    assert all(len(ids) == 1 for _, ids in opted.steps)


def test_a_step_whose_ids_are_all_outside_the_codec_brings_no_message_and_is_not_read_again(
    asynchronous: bool,
) -> None:
    script = [5, 900, 901, 902, 6, 903, 7]
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Noting:
        requires_token_updates = True
        codec = CodecFrames(first_id=5, codebook_size=10)

        def open(self, request_id: str, start: Start) -> list[int]:
            return self.codec.open(request_id, start)

        def update(self, state: list[int], step: Any) -> Emission:
            seen.append((step.position, step.ids))
            return self.codec.update(state, step)

        def finish(self, state: list[int], reason: FinishReason) -> Emission | None:
            return self.codec.finish(state, reason)

    run = harness(
        asynchronous, channels={CHANNEL: Noting()}, samples=lambda _, index: script[index]
    )
    run.add(make_request("r", max_tokens=len(script)))
    run.run()
    assert seen == [(at, (i,)) for at, i in enumerate(script)]
    assert [(u.position, u.ids) for u in run.published.updates] == [(0, (0,)), (1, (1,)), (2, (2,))]
    (terminal,) = run.published.terminals["r"]
    assert (terminal.tokens, terminal.dropped) == (7, 4)


def test_what_was_sampled_behind_the_stop_id_reaches_nobody(asynchronous: bool) -> None:
    script = [50, 51, EOS, 60, 61]
    for run_ahead in (1, 2, 3):
        run = harness(asynchronous, samples=lambda _, index: script[min(index, 4)])
        run._run_ahead = run_ahead if asynchronous else 1
        run.add(make_request("r", max_tokens=20), make_request("other", max_tokens=9))
        run.run()
        assert run.published.ids["r"] == [50, 51, EOS]
        assert run.published.terminals["r"][0].tokens == 3


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    budget=st.sampled_from([16, 24, 512]),
    blocks=st.sampled_from([12, 200]),
    run_ahead=st.integers(1, 3),
    drafts=st.sampled_from([0, 3]),
)
def test_every_update_has_committed_ids_or_a_reason_and_no_counter_falls_below_zero(
    prompts: list[int], budget: int, blocks: int, run_ahead: int, drafts: int
) -> None:
    asynchronous = run_ahead > 1 and not drafts
    run = Harness(
        make_scheduler(asynchronous=asynchronous, budget=budget, blocks=blocks, drafts=drafts),
        {CHANNEL: TokenUpdates()},
        run_ahead=run_ahead if asynchronous else 1,
    )
    run.add(make_request("first", prompt=4, max_tokens=30))
    for i, prompt in enumerate(prompts):
        run.step()
        run.add(make_request(f"r{i}", prompt=prompt, max_tokens=12))
    while run.step() or run.scheduler.has_unfinished_requests():
        for request in run.scheduler.requests.values():
            assert request.num_output_placeholders >= 0
            assert request.num_computed_tokens >= 0
    for update in run.published.updates:
        assert update.ids or update.terminal or update.paused
        assert all(i >= 0 for i in update.ids)
    assert run.published.ids == run.returned


def test_a_step_is_handed_over_without_waiting_for_any_processor(asynchronous: bool) -> None:
    slow = Counting()
    run = harness(asynchronous, channels={CHANNEL: slow})
    publish, run.publish = run.publish, lambda: None  # type: ignore[method-assign]
    run.add(*(make_request(f"r{i}", max_tokens=25) for i in range(4)))
    run.run()
    assert not run.scheduler.requests
    assert slow.steps == []  # the publisher thread has not had a turn in 25 steps
    publish()
    assert len(slow.steps) == 100
    assert run.published.ids == run.returned


def test_a_good_stream_leaves_no_warning(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="omnistage")
    run = harness(
        asynchronous,
        channels={CHANNEL: CodecFrames(first_id=50, codebook_size=10)},
        samples=lambda name, index: EOS if index == 4 else 50 if name == "r" else 900,
    )
    run.add(make_request("r", max_tokens=20), make_request("nothing valid", max_tokens=20))
    run.run()
    # The last message of either is nothing but an end: the stop id is no frame.
    assert run.published.ids == {"r": [0] * 4, "nothing valid": []}
    assert run.published.updates[-1].ids == ()
    assert len(run.published.terminals) == 2
    assert [r for r in caplog.records if r.name.startswith("omnistage")] == []
    assert not run.failed


def test_withholding_leaves_each_request_its_own_rows_of_logprobs() -> None:
    outputs: dict[str, list[Any]] = {}

    class WithLogprobs(Harness):
        def _execute(self, scheduled: Any) -> Any:
            output = super()._execute(scheduled)
            ids = output.sampled_token_ids
            flat = np.array([[i] for row in ids for i in row], np.int64).reshape(-1, 1)
            starts = [0, *np.cumsum([len(row) for row in ids]).tolist()]
            output.logprobs = LogprobsLists(flat, flat * 1.0, flat[:, 0], starts)
            return output

        def updated(self, returned: Any) -> None:
            for engine_outputs in returned.values():
                for output in engine_outputs.outputs:
                    outputs.setdefault(output.request_id, []).append(output)
            super().updated(returned)

    run = WithLogprobs(make_scheduler(drafts=3), {CHANNEL: TokenUpdates()}, log_stats=False)
    options: dict[str, Any] = {"max_tokens": 24, "final_only": True}
    run.add(make_request("plain", **options), make_request("other plain", **options))
    run.add(*(make_request(f"r{i}", logprobs=0, **options) for i in range(3)))
    run.run()
    accepted = {len(output.new_token_ids) for i in range(3) for output in outputs[f"r{i}"]}
    assert len(accepted) > 1  # otherwise one row a request would do
    for name, own in outputs.items():
        assert list(chain(*(output.new_token_ids for output in own))) == run.published.ids[name]
        for output in own if name.startswith("r") else ():
            assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids


@pytest.mark.parametrize("ours", [OmniARScheduler, OmniARAsyncScheduler])
def test_each_override_has_the_signature_of_what_it_extends_and_calls_it(ours: Any) -> None:
    base = AsyncScheduler if issubclass(ours, AsyncScheduler) else Scheduler
    own = {name: value for name, value in vars(OmniARSchedulerMixin).items() if callable(value)}
    assert own
    for name, method in own.items():
        assert getattr(ours, name) is method  # nothing of vLLM's stands before it
        assert f"super().{name}(" in inspect.getsource(method)
        if name != "__init__":  # takes and passes on anything
            parameters = inspect.signature(method).parameters
            assert list(parameters) == list(inspect.signature(getattr(base, name)).parameters)

"""The scheduler's side of the contract, on vLLM's real schedulers without a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from omnistage.adapters.processor import CodecFrames, Emission, TokenUpdates
from omnistage.core.scheduler import OmniARAsyncScheduler, OmniARScheduler
from omnistage.request import FinishReason, Start
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE
from tests.core.factories import BLOCK, CHANNEL, EOS, Harness, make_request, make_scheduler, token


class Silent:
    """A processor without the declaration that counts what it is called for."""

    requires_token_updates = False

    def __init__(self, *, wants_payload: bool = True) -> None:
        self.wants_payload = wants_payload
        self.updates: list[Any] = []
        self.finished: list[str] = []

    def open(self, request_id: str, start: Start) -> str:
        return request_id

    def update(self, state: str, step: Any) -> Emission:
        self.updates.append((state, step))
        return Emission(tensors=step.tensors)

    def finish(self, state: str, reason: FinishReason) -> None:
        self.finished.append(state)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def harness(asynchronous: bool, processor: Any = None, **options: Any) -> Harness:
    run_ahead = 2 if asynchronous else 1
    extra = {k: options.pop(k) for k in ("limit", "samples", "log_stats") if k in options}
    scheduler = make_scheduler(asynchronous=asynchronous, **options)
    return Harness(scheduler, {CHANNEL: processor or TokenUpdates()}, run_ahead=run_ahead, **extra)


def check_complete(run: Harness) -> None:
    """Every request got what vLLM returned for it, one terminal, and nothing is left."""
    published = run.published
    for request_id, ids in run.returned.items():
        assert published.ids[request_id] == ids
    assert all(len(terminals) == 1 for terminals in published.terminals.values())
    assert len(run.collector) == 0
    assert len(run.adapter) == 0
    assert not run.scheduler.requests


def test_every_id_is_published_once_and_one_terminal_ends_it(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(*(make_request(f"r{i}", prompt=5 + i, max_tokens=1 + i) for i in range(8)))
    run.run()
    check_complete(run)
    for i in range(8):
        assert run.published.ids[f"r{i}"] == [token(f"r{i}", k) for k in range(1 + i)]
        (terminal,) = run.published.terminals[f"r{i}"]
        assert terminal.reason is FinishReason.LENGTH
        assert terminal.tokens == 1 + i


def test_a_step_makes_one_message_a_topic(asynchronous: bool) -> None:
    run = harness(asynchronous)
    other = ((CHANNEL, "other"),)
    run.add(*(make_request(f"a{i}", max_tokens=4) for i in range(5)))
    run.add(*(make_request(f"b{i}", max_tokens=4, consumers=other) for i in range(5)))
    run.run()
    assert all(len(set(topics)) == len(topics) for topics in run.messages_by_step)
    assert max(len(topics) for topics in run.messages_by_step) == 2


def test_a_request_with_two_consumers_reaches_both(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r", consumers=((CHANNEL, "one"), (CHANNEL, "two"))))
    run.run()
    one, two = run.topics[b"audio/one\0"], run.topics[b"audio/two\0"]
    assert one.updates == two.updates
    assert one.ids["r"] == run.returned["r"]


def test_the_stop_id_is_published_as_generate_returns_it(asynchronous: bool) -> None:
    run = harness(asynchronous, samples=lambda _, index: EOS if index == 3 else 50 + index)
    run.add(make_request("r", max_tokens=20))
    run.run()
    check_complete(run)
    assert run.published.ids["r"] == [50, 51, 52, EOS]
    assert run.published.terminals["r"][0].reason is FinishReason.STOP


def test_a_stop_at_the_first_id_still_ends_the_stream(asynchronous: bool) -> None:
    run = harness(asynchronous, samples=lambda *_: EOS)
    run.add(make_request("r", max_tokens=20))
    run.run()
    check_complete(run)
    assert run.published.ids["r"] == [EOS]


def test_zero_valid_codec_ids_still_end_the_stream(asynchronous: bool) -> None:
    run = harness(asynchronous, CodecFrames(first_id=4090, codebook_size=6), samples=lambda *_: 50)
    run.add(make_request("r", max_tokens=7))
    run.run()
    (update,) = run.published.updates
    assert update.ids == ()
    assert update.start is not None
    assert update.terminal is not None
    assert (update.terminal.tokens, update.terminal.dropped) == (7, 7)


def test_a_long_prompt_prefilled_in_chunks_publishes_only_what_was_sampled(
    asynchronous: bool,
) -> None:
    run = harness(asynchronous, budget=16)
    run.add(*(make_request(f"r{i}", prompt=70, max_tokens=6) for i in range(4)))
    run.run()
    check_complete(run)
    assert all(len(ids) == 6 for ids in run.published.ids.values())


def test_preempted_and_resumed_requests_publish_each_id_once(asynchronous: bool) -> None:
    run = harness(asynchronous, blocks=11, budget=48)
    run.add(*(make_request(f"r{i}", prompt=2 * BLOCK, max_tokens=40) for i in range(4)))
    preempted = 0
    while run.step() or run.scheduler.has_unfinished_requests():
        waiting = run.scheduler.requests.values()
        preempted += sum(r.status == RequestStatus.PREEMPTED for r in waiting)
    assert preempted
    check_complete(run)
    for i in range(4):
        assert run.published.ids[f"r{i}"] == [token(f"r{i}", k) for k in range(40)]


def test_a_preempted_request_says_so_until_it_is_resumed(asynchronous: bool) -> None:
    run = harness(asynchronous, blocks=11, budget=48)
    run.add(*(make_request(f"r{i}", prompt=2 * BLOCK, max_tokens=40) for i in range(4)))
    run.run()
    paused = [u.request_id for u in run.published.updates if u.paused]
    assert paused
    for request_id in set(paused):
        updates = [u for u in run.published.updates if u.request_id == request_id]
        assert not updates[-1].paused
        assert not any(u.start for u in updates if u.paused)
    assert not run.collector._paused
    check_complete(run)


def test_abort_before_the_first_token(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r"))
    run.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    run.publish()
    check_complete(run)
    (update,) = run.published.updates
    assert update.start is not None
    assert update.terminal is not None
    assert update.terminal.reason is FinishReason.ABORT


def test_abort_in_flight_drops_the_step_and_publishes_one_terminal(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r", max_tokens=50), make_request("other", max_tokens=50))
    for _ in range(5):
        run.step()
    scheduled = run.scheduler.schedule()
    run._in_flight.append((scheduled, run._execute(scheduled)))
    run.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    run.publish()
    before = list(run.published.ids["r"])
    run.run()
    assert run.published.ids["r"] == before == run.returned["r"]
    assert [t.reason for t in run.published.terminals["r"]] == [FinishReason.ABORT]
    assert run.published.ids["other"] == [token("other", k) for k in range(50)]
    check_complete(run)


@pytest.mark.parametrize("final_only", [False, True])
def test_an_id_in_flight_when_its_request_is_reset_is_sampled_anew_and_published_once(
    final_only: bool,
) -> None:
    run = harness(True, log_stats=False)
    run.add(make_request("r", max_tokens=8, final_only=final_only))
    for _ in range(4):
        run.step()
    assert run._in_flight
    # vLLM preempts what runs, and drops what is in flight of it instead of delivering it.
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.run()
    assert run.published.ids["r"] == [token("r", k) for k in range(8)]
    check_complete(run)


def test_abort_in_the_stopping_step_and_afterwards_changes_nothing(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r", max_tokens=3))
    run.run()
    run.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    run.scheduler.finish_requests(["r", "never-known"], RequestStatus.FINISHED_ABORTED)
    run.publish()
    assert [t.reason for t in run.published.terminals["r"]] == [FinishReason.LENGTH]
    check_complete(run)


def test_finishing_all_gives_each_its_terminal(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(*(make_request(f"r{i}", max_tokens=50) for i in range(5)))
    run.step()
    run.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    run.publish()
    assert sorted(run.published.terminals) == [f"r{i}" for i in range(5)]
    run.run()
    check_complete(run)


def test_an_error_inside_the_update_is_published_after_the_ids_of_its_step(
    asynchronous: bool,
) -> None:
    run = harness(asynchronous)
    run.add(make_request("r", max_tokens=50), make_request("other", max_tokens=3))
    for _ in range(4):
        run.step()
    # vLLM collects such ids and finishes them inside super().update_from_output().
    run.scheduler.grammar_compile_error_reqs.add("r")
    run.run()
    assert [t.reason for t in run.published.terminals["r"]] == [FinishReason.ERROR]
    check_complete(run)


def test_a_final_stage_request_is_excluded_from_admission_on(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("final", final_stage=True), make_request("aborted", final_stage=True))
    run.step()
    run.rows_of = lambda _: True
    run.step()
    run.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    run.run()
    assert run.returned["final"]
    assert not run.topics
    assert not run.adapter


@pytest.mark.parametrize("wants", [True, False])
def test_a_processor_without_the_declaration_is_called_for_tensors_and_the_end_only(
    asynchronous: bool, wants: bool
) -> None:
    processor = Silent(wants_payload=wants)
    run = harness(asynchronous, processor)
    run.rows_of = lambda _: True
    run.add(make_request("r", prompt=10, max_tokens=8))
    run.run()
    steps = [step for _, step in processor.updates]
    assert [len(step.ids) for step in steps] == [1] * (8 if wants else 0)
    assert [t.first_row for s in steps for t in s.tensors.values()] == (
        [0, *range(10, 17)] if wants else []
    )
    assert processor.finished == ["r"]
    assert len(run.published.terminals["r"]) == 1
    assert not run.failed


def test_a_tensor_on_a_prefill_chunk_is_published_without_ids(asynchronous: bool) -> None:
    run = harness(asynchronous, Silent(), budget=16)
    run.add(make_request("r", prompt=40, max_tokens=2), make_request("other", record=None))
    run.rows_of = lambda _: True
    run.run()
    first = run.published.updates[0]
    assert (first.ids, len(first.tensors), first.terminal) == ((), 1, None)
    assert list(run.published.ids) == ["r"]


def test_the_payload_is_gone_before_upstream_sees_the_output() -> None:
    run = harness(False)
    run.add(make_request("r", max_tokens=2))
    scheduled = run.scheduler.schedule()
    run.rows_of = lambda _: True
    output = run._execute(scheduled)
    assert PAYLOAD_ATTRIBUTE in vars(output)
    run.scheduler.update_from_output(scheduled, output)
    assert PAYLOAD_ATTRIBUTE not in vars(output)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x93\x07\xa1a\x00",
        b"\xff" * 50,
        [1, 2],
        "text",
        7,
        {"a": 1},
        b"\x91" * 999,
    ],
    ids=range(10),
)
def test_a_hostile_admission_record_means_no_consumer_and_a_report(record: Any) -> None:
    run = harness(False)
    run.add(make_request("bad", record=record), make_request("good"))
    run.run()
    assert [failure.request_id for failure in run.failed] == ["bad"]
    assert run.failed[0].kind == "ProtocolError"
    assert list(run.published.ids) == ["good"]
    assert len(run.returned["bad"]) == 5


def test_an_unknown_channel_means_no_consumer_and_a_report() -> None:
    run = harness(False)
    run.add(make_request("bad", consumers=(("vidio", "s"),)))
    run.run()
    assert "unknown channel 'vidio'; known: ['audio']" in run.failed[0].error
    assert not run.topics


def test_without_a_record_nothing_is_noted() -> None:
    run = harness(False)
    run.add(make_request("r", record=None))
    run.run()
    assert not run.topics
    assert not run.failed


def test_a_full_queue_fails_the_requests_of_the_lost_step_and_no_others() -> None:
    run = harness(False, limit=3)
    run.add(make_request("early", max_tokens=2), make_request("r", max_tokens=20))
    run.publish_now = run.publish  # type: ignore[attr-defined]
    run.publish = lambda: None  # type: ignore[method-assign]
    for _ in range(8):
        run.step()
    run.add(make_request("late", max_tokens=3))
    run.publish_now()  # type: ignore[attr-defined]
    run.publish = run.publish_now  # type: ignore[attr-defined,method-assign]
    run.run()
    assert [t.reason for t in run.published.terminals["early"]] == [FinishReason.LENGTH]
    assert [t.kind for t in run.published.terminals["r"]] == ["SubscriberStalled"]
    assert run.published.ids["r"] == run.returned["r"][:3]
    assert [failure.request_id for failure in run.failed] == ["r"]
    assert run.published.ids["late"] == run.returned["late"]


def test_a_streaming_session_marks_segments_and_ends_once(asynchronous: bool) -> None:
    positions: list[int] = []

    class Positions(TokenUpdates):
        def update(self, state: None, step: Any) -> Emission:
            positions.append(step.position)
            return super().update(state, step)

    run = harness(asynchronous, Positions())
    run.add(make_request("r", max_tokens=3, resumable=True))
    while run.step():
        pass
    assert run.scheduler.requests["r"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert [update.segment_end for update in run.published.updates][-1]
    assert not run.published.terminals
    run.add(make_request("r", prompt=4, max_tokens=2, resumable=True))
    while run.step():
        pass
    assert run.published.updates[-1].segment == 1
    assert next(u.position for u in run.published.updates if u.segment == 1) == 0
    assert positions == [0, 1, 2, 0, 1]
    assert not run.published.terminals
    # The end of a waiting session comes as a request that is not resumable.
    run.add(make_request("r", prompt=1))
    run.publish()
    assert [t.reason for t in run.published.terminals["r"]] == [FinishReason.ABORT]
    assert run.published.ids["r"] == run.returned["r"]
    assert len(run.collector) == 0


@pytest.mark.parametrize("cls", [OmniARScheduler, OmniARAsyncScheduler])
def test_an_instance_whose_init_never_ran_behaves_as_the_base_class(cls: Any) -> None:
    scheduler = cls.__new__(cls)
    scheduler.requests = {}
    assert scheduler.finish_requests(["unknown"], RequestStatus.FINISHED_ABORTED) == []
    assert scheduler._omni_collector is None


def test_only_five_methods_are_overridden() -> None:
    ours = {
        name
        for cls in (OmniARScheduler, OmniARAsyncScheduler, *OmniARScheduler.__mro__[1:2])
        for name, value in vars(cls).items()
        if callable(value)
    }
    assert ours == {
        "__init__",
        "add_request",
        "update_from_output",
        "finish_requests",
        "shutdown",
    }


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(
    operations=OPERATIONS,
    asynchronous=st.booleans(),
    run_ahead=st.integers(1, 3),
    prefix_cache=st.booleans(),
    blocks=st.sampled_from([9, 14, 200]),
    budget=st.sampled_from([16, 48, 512]),
    withhold=st.booleans(),
)
def test_any_schedule_publishes_what_vllm_returns_and_one_terminal_each(
    operations: list[tuple[str, int, int]],
    asynchronous: bool,
    run_ahead: int,
    prefix_cache: bool,
    blocks: int,
    budget: int,
    withhold: bool,
) -> None:
    scheduler = make_scheduler(
        asynchronous=asynchronous, budget=budget, blocks=blocks, prefix_cache=prefix_cache
    )
    run = Harness(
        scheduler,
        {CHANNEL: TokenUpdates()},
        run_ahead=run_ahead if asynchronous else 1,
        log_stats=not withhold,
    )
    added: list[str] = []
    for kind, a, b in operations:
        if kind == "add":
            added.append(f"r{len(added)}")
            run.add(make_request(added[-1], prompt=a, max_tokens=b, final_only=withhold))
        elif kind == "abort" and added:
            scheduler.finish_requests(added[a % len(added)], RequestStatus.FINISHED_ABORTED)
            run.publish()
        elif kind == "step":
            for _ in range(a):
                run.step()
    run.run()
    assert sorted(run.published.terminals) == sorted(added)
    for request_id, (terminal,) in run.published.terminals.items():
        assert terminal.tokens == len(run.published.ids[request_id])
        if withhold and terminal.reason is FinishReason.ABORT:
            # vLLM gives an aborted request no last output: what was withheld is dropped with it.
            returned = run.returned.setdefault(request_id, [])
            assert run.published.ids[request_id][: len(returned)] == returned
            del run.returned[request_id]
    check_complete(run)


def test_withheld_ids_come_with_the_last_output_and_not_before(asynchronous: bool) -> None:
    run = harness(asynchronous, log_stats=False)
    run.add(*(make_request(f"r{i}", max_tokens=20, final_only=True) for i in range(4)))
    run.run()
    check_complete(run)
    assert all(len(ids) == 20 for ids in run.returned.values())
    # Per request the first output, with its prefill statistics, and the last.
    assert run.outputs_seen == 8


@pytest.mark.parametrize(
    "change",
    [
        {"final_only": False},
        {"logprobs": 1},
        {"final_stage": True},
        {"record": None},
        {"resumable": True},
    ],
    ids=str,
)
def test_outputs_that_somebody_reads_are_not_withheld(change: dict[str, Any]) -> None:
    run = harness(False, log_stats=False)
    run.add(make_request("r", **{"max_tokens": 20, "final_only": True, **change}))
    while run.step():
        pass
    assert run.outputs_seen == 20


def test_with_statistics_on_nothing_is_withheld() -> None:
    run = harness(False, log_stats=True)
    run.add(make_request("r", max_tokens=20, final_only=True))
    run.run()
    assert run.outputs_seen == 20


def test_an_error_output_carries_what_was_withheld(asynchronous: bool) -> None:
    run = harness(asynchronous, log_stats=False)
    run.add(make_request("r", max_tokens=50, final_only=True))
    for _ in range(6):
        run.step()
    run.scheduler.grammar_compile_error_reqs.add("r")
    run.run()
    assert [t.reason for t in run.published.terminals["r"]] == [FinishReason.ERROR]
    check_complete(run)

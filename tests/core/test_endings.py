"""One terminal for every way that vLLM's schedulers end a request, and nothing left afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from omnistage.adapters.processor import TokenUpdates
from omnistage.request import FinishReason, Start
from omnistage.wire import PROTOCOL_VERSION, Admission, encode
from tests.core.factories import (
    BLOCK,
    CHANNEL,
    EOS,
    SUBSCRIBER,
    Harness,
    make_request,
    make_scheduler,
)

ABORTED = RequestStatus.FINISHED_ABORTED


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def harness(
    asynchronous: bool, *, samples: Any = None, limit: int = 1000, **options: Any
) -> Harness:
    return Harness(
        make_scheduler(asynchronous=asynchronous, **options),
        {CHANNEL: TokenUpdates()},
        run_ahead=2 if asynchronous else 1,
        limit=limit,
        samples=samples or (lambda request_id, index: 50 + index),
    )


def check_ended(run: Harness, request_id: str, reason: FinishReason) -> None:
    """It got one terminal, which names vLLM's reason and counts what was published."""
    run.run()
    (terminal,) = run.published.terminals[request_id]
    assert terminal.reason is reason
    assert terminal.tokens == len(run.published.ids[request_id])
    assert run.published.ids[request_id] == run.returned.get(request_id, [])
    check_nothing_left(run)


def check_nothing_left(run: Harness) -> None:
    assert not run.scheduler.requests
    assert not len(run.collector)
    assert not run.collector._names
    assert not run.collector._paused
    assert not len(run.adapter)
    assert run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == (
        run.scheduler.kv_cache_config.num_blocks - 1  # vLLM keeps one as its null block
    )


def fly(run: Harness) -> None:
    """Have a step executed whose output the scheduler has not seen yet."""
    scheduled = run.scheduler.schedule()
    run._in_flight.append((scheduled, run._execute(scheduled)))


def test_repetition_ends_with_its_own_reason(asynchronous: bool) -> None:
    run = harness(asynchronous, samples=lambda *_: 77)
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=4)
    run.add(make_request("r", max_tokens=50, repetition_detection=detection))
    check_ended(run, "r", FinishReason.REPETITION)
    assert run.published.ids["r"] == [77] * 4


def test_abort_while_queued_behind_a_full_batch(asynchronous: bool) -> None:
    run = harness(asynchronous, max_seqs=1)
    run.add(make_request("runs", max_tokens=9), make_request("r"))
    for _ in range(3):
        run.step()
    assert run.scheduler.requests["r"].status is RequestStatus.WAITING
    run.scheduler.finish_requests("r", ABORTED)
    run.publish()
    check_ended(run, "r", FinishReason.ABORT)
    assert len(run.published.ids["runs"]) == 9


def test_abort_between_two_chunks_of_a_prefill(asynchronous: bool) -> None:
    run = harness(asynchronous, budget=16)
    run.add(make_request("r", prompt=100))
    for _ in range(3):
        run.step()
    assert 0 < run.scheduler.requests["r"].num_computed_tokens < 100
    run.scheduler.finish_requests("r", ABORTED)
    run.publish()
    check_ended(run, "r", FinishReason.ABORT)
    assert run.published.ids["r"] == []


def test_abort_while_preempted(asynchronous: bool) -> None:
    run = harness(asynchronous, blocks=11, budget=48)
    run.add(*(make_request(f"r{i}", prompt=2 * BLOCK, max_tokens=40) for i in range(4)))
    requests = run.scheduler.requests
    while not (waits := [n for n, r in requests.items() if r.status is RequestStatus.PREEMPTED]):
        run.step()
    run.scheduler.finish_requests(waits[0], ABORTED)
    run.publish()
    check_ended(run, waits[0], FinishReason.ABORT)


def test_abort_while_the_stopping_step_is_in_flight(asynchronous: bool) -> None:
    run = harness(asynchronous, samples=lambda _, index: EOS if index == 2 else 50 + index)
    run.add(make_request("r", max_tokens=20))
    for _ in range(3):
        if run._in_flight and not asynchronous:
            run.update()
        fly(run)
    # The step that samples the stop id was executed; its output comes after the abort.
    run.scheduler.finish_requests("r", ABORTED)
    run.publish()
    check_ended(run, "r", FinishReason.ABORT)
    assert EOS not in run.published.ids["r"]


def test_abort_of_a_request_whose_terminal_is_not_published_yet(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r", max_tokens=2))
    publish, run.publish = run.publish, lambda: None  # type: ignore[method-assign]
    run.run()
    run.scheduler.finish_requests("r", ABORTED)
    run.publish = publish  # type: ignore[method-assign]
    run.publish()
    check_ended(run, "r", FinishReason.LENGTH)


def test_a_kv_load_error_ends_in_an_error(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.scheduler.recompute_kv_load_failures = False
    run.add(make_request("r", max_tokens=50), make_request("other", max_tokens=5))
    for _ in range(4):
        run.step()
    fly(run)
    _, output = run._in_flight[-1]
    (blocks,) = run.scheduler.kv_cache_manager.get_block_ids("r")
    output.kv_connector_output = KVConnectorOutput(invalid_block_ids={blocks[0]})
    check_ended(run, "r", FinishReason.ERROR)
    assert [t.reason for t in run.published.terminals["other"]] == [FinishReason.LENGTH]


def test_a_grammar_that_does_not_compile_ends_a_request_that_never_ran(asynchronous: bool) -> None:
    run = harness(asynchronous)
    request = make_request(
        "r", structured_outputs=StructuredOutputsParams(regex="a+"), max_tokens=50
    )
    assert request.structured_output_request is not None
    request.structured_output_request._grammar = ValueError("no such grammar")
    run.add(request, make_request("other", max_tokens=5))
    check_ended(run, "r", FinishReason.ERROR)
    assert len(run.published.ids["other"]) == 5


def test_a_grammar_that_rejects_ids_ends_in_an_error_behind_them(asynchronous: bool) -> None:
    run = harness(asynchronous)
    seen: list[int] = []

    def accept(request: Any, ids: list[int]) -> bool:
        seen.extend(ids if request.request_id == "r" else [])
        return len(seen) < 4

    run.scheduler.structured_output_manager = SimpleNamespace(  # type: ignore[assignment]
        accept_tokens=accept, should_advance=lambda _: False
    )
    run.add(make_request("r", max_tokens=50))
    check_ended(run, "r", FinishReason.ERROR)
    assert run.published.ids["r"] == [50, 51, 52, 53]


def session(run: Harness, request_id: str, **options: Any) -> None:
    run.add(make_request(request_id, resumable=True, **options))


def idle(run: Harness) -> None:
    while run.step():
        pass


def test_a_session_that_is_closed_while_it_runs_ends_with_its_last_segment(
    asynchronous: bool,
) -> None:
    run = harness(asynchronous)
    session(run, "r", max_tokens=4)
    run.step()
    # Closing is a request of the same id that takes no more input; vLLM queues it.
    run.add(make_request("r", prompt=1))
    assert not run.published.terminals
    check_ended(run, "r", FinishReason.LENGTH)
    assert run.published.segments == {}


def test_a_session_whose_next_input_came_early_goes_on_without_an_end(asynchronous: bool) -> None:
    run = harness(asynchronous)
    session(run, "r", max_tokens=4)
    run.step()
    session(run, "r", prompt=3, max_tokens=2)
    run.add(make_request("r", prompt=1))
    check_ended(run, "r", FinishReason.LENGTH)
    assert [update.segment for update in run.published.updates if update.segment_end] == [0]
    assert len(run.published.ids["r"]) == 6


def test_a_stop_in_a_segment_is_no_end_of_the_stream(asynchronous: bool) -> None:
    run = harness(asynchronous, samples=lambda _, index: EOS if index == 2 else 50 + index)
    session(run, "r", max_tokens=9)
    idle(run)
    assert run.published.ids["r"][-1] == EOS
    assert run.published.updates[-1].segment_end
    assert not run.published.terminals
    assert len(run.collector) == 1
    run.add(make_request("r", prompt=1))  # closed while it waits
    run.publish()
    check_ended(run, "r", FinishReason.ABORT)


@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_a_session_aborted_in_any_state_ends_once(asynchronous: bool, waiting: bool) -> None:
    run = harness(asynchronous)
    session(run, "r", max_tokens=4)
    idle(run) if waiting else run.step()
    for _ in range(2):
        run.scheduler.finish_requests("r", ABORTED)
        run.publish()
    check_ended(run, "r", FinishReason.ABORT)


def test_an_id_that_is_used_again_in_flight_gets_nothing_of_its_former_life(
    asynchronous: bool,
) -> None:
    """The id on the wire; vLLM's own are unique, which its schedulers rely on."""
    run = harness(asynchronous, samples=lambda name, index: 100 * int(name[-1]) + 50 + index)
    for life in range(5):
        run.add(make_request(f"r-{life}", max_tokens=40, record=record("r", life)))
        for _ in range(6):
            run.step()
        fly(run)
        run.scheduler.finish_requests(f"r-{life}", ABORTED)
        run.publish()
        before = run.topics.pop(b"audio/s\0")
        assert [t.reason for t in before.terminals["r"]] == [FinishReason.ABORT]
        assert {i // 100 for i in before.ids["r"]} == {life}
        assert {update.generation for update in before.updates} == {life}
        assert not len(run.collector)
        assert not len(run.adapter)
    run.run()
    assert not run.topics  # the late steps brought nothing up again
    check_nothing_left(run)


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(asynchronous: bool) -> None:
    run = harness(asynchronous)
    run.add(make_request("r-0", max_tokens=9, record=record("r", 0)))
    run.step()
    run.add(make_request("r-1", max_tokens=9, record=record("r", 1)))
    run.run()
    assert [(failed.request_id, failed.kind) for failed in run.failed] == [("r-1", "ProtocolError")]
    assert "in use" in run.failed[0].error
    assert run.published.ids["r"] == run.returned["r-0"]
    assert len(run.published.terminals["r"]) == 1
    assert len(run.returned["r-1"]) == 9
    run.add(make_request("r-2", max_tokens=9, record=record("r", 2)))
    run.topics.clear()
    run.run()
    assert run.published.ids["r"] == run.returned["r-2"]
    check_nothing_left(run)


def test_a_full_queue_frees_the_id_of_what_it_lost() -> None:
    run = harness(False, limit=1)
    publish, run.publish = run.publish, lambda: None  # type: ignore[method-assign]
    run.add(make_request("r-0", max_tokens=9, record=record("r", 0)))
    run.step()
    run.step()
    run.publish = publish  # type: ignore[method-assign]
    run.publish()
    assert [t.kind for t in run.published.terminals["r"]] == ["SubscriberStalled"]
    run.topics.clear()
    run.add(make_request("r-1", max_tokens=9, record=record("r", 1)))
    run.run()
    assert run.published.ids["r"] == run.returned["r-1"]
    check_nothing_left(run)


def record(name: str, generation: int) -> bytes:
    return encode(
        Admission(PROTOCOL_VERSION, name, generation, False, ((CHANNEL, SUBSCRIBER),), Start())
    )

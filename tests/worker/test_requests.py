"""What a worker knows of its requests: from their first step to their last, and not longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.request import Payload
from omnistage.worker.conditioning import CONDITIONING, encode_conditioning
from omnistage.worker.payload import WANTS_PAYLOAD
from omnistage.worker.reader import Batch
from omnistage.worker.requests import WorkerRequests

LENGTHS = {"a": 174, "b": 1500}


def new(name: str, prompt: int = 4, extra: Any = None, *, wants: bool = False) -> Any:
    extra = {**(extra or {}), **({WANTS_PAYLOAD: True} if wants else {})}
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=list(range(prompt)),
        prompt_embeds=None,
        sampling_params=SimpleNamespace(extra_args=extra or None),
    )


def step(*added: Any, finished: tuple[str, ...] = (), resumed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=list(added),
        finished_req_ids=set(finished),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


def voice(value: float) -> bytes:
    data = torch.full((2,), float(value)).numpy().tobytes()
    return encode_conditioning({"voice": Payload("float32", (2,), 0, data)})


def test_without_hooks_only_those_are_known_whose_payload_is_wanted() -> None:
    requests = WorkerRequests(all_of_them=False)
    requests.note(step(new("a", 5, wants=True), new("b", 4, {WANTS_PAYLOAD: "yes"}), new("c")))
    assert requests.wanted == {"a": 5}
    assert len(requests) == 1
    requests.note(step(finished=("a", "b")))
    assert len(requests) == 0


def test_an_id_that_ends_and_begins_in_one_step_begins_anew() -> None:
    requests = WorkerRequests(all_of_them=True)
    requests.note(step(new("a", 5, {CONDITIONING: voice(1)}, wants=True)))
    (span,) = requests.spans(Batch(["a"], [5], [0]))
    span.state["x"] = 1
    requests.note(step(new("a", 7), finished=("a",)))
    assert requests.wanted == {}
    (span,) = requests.spans(Batch(["a"], [7], [0]))
    assert (span.prompt_tokens, span.conditioning, span.state) == (7, {}, {})


def test_spans_say_where_each_requests_rows_are_and_carry_its_own() -> None:
    requests = WorkerRequests(all_of_them=True)
    requests.note(step(new("a", 9, {CONDITIONING: voice(1)}), new("b", 3)))
    b, a = requests.spans(Batch(["b", "a"], [3, 5], [0, 0]))
    assert (a.request_id, a.start, a.stop, a.position, a.prompt_tokens) == ("a", 3, 8, 0, 9)
    assert (b.request_id, b.start, b.stop, b.position, b.prompt_tokens) == ("b", 0, 3, 0, 3)
    assert a.conditioning["voice"].tolist() == [1, 1]
    assert b.conditioning == {}
    a.state["seen"] = 5
    (later,) = requests.spans(Batch(["a"], [4], [5]))
    assert (later.start, later.stop, later.position) == (0, 4, 5)
    assert later.state == {"seen": 5}
    assert later.conditioning is a.conditioning  # decoded once


def test_a_resumed_request_keeps_what_it_brought_and_its_state_begins_anew() -> None:
    for again in (step(resumed=("a",)), step(new("a", 4, {CONDITIONING: voice(1)}))):  # V1, V2
        requests = WorkerRequests(all_of_them=True)
        requests.note(step(new("a", 4, {CONDITIONING: voice(1)})))
        (before,) = requests.spans(Batch(["a"], [4], [0]))
        before.state["x"] = 1
        requests.note(again)
        (after,) = requests.spans(Batch(["a"], [6], [0]))
        assert after.state == {}
        assert after.conditioning is before.conditioning
        requests.note(step(finished=("a",)))
        assert len(requests) == 0


def test_conditioning_that_is_none_costs_the_request_its_own_and_not_the_engine(
    caplog: Any,
) -> None:
    requests = WorkerRequests(all_of_them=True)
    for raw in (b"garbage", "text", [1], encode_conditioning({})[:-1]):
        requests.note(step(new("a", 4, {CONDITIONING: raw}), finished=("a",)))
        (span,) = requests.spans(Batch(["a"], [4], [0]))
        assert span.conditioning == {}
    assert len(caplog.records) == 4


def test_each_request_has_its_own_conditioning_and_no_other_one_has_any() -> None:
    requests = WorkerRequests(all_of_them=True)
    given = {name: np.full((length, 4), length, np.float32) for name, length in LENGTHS.items()}
    for name, array in given.items():
        raw = encode_conditioning({"feat": Payload("float32", array.shape, 0, array.tobytes())})
        requests.note(step(new(name, extra={CONDITIONING: raw})))
    requests.note(step(new("plain")))
    names = ["b", "plain", "a"]
    spans = requests.spans(Batch(names, [1, 1, 1], [0, 0, 0]))
    assert [span.request_id for span in spans] == names
    for span in spans:
        if span.request_id == "plain":
            assert span.conditioning == {}
        else:
            assert np.array_equal(span.conditioning["feat"].numpy(), given[span.request_id])
    assert len({id(span.state) for span in spans}) == 3


def test_a_request_that_no_step_began_is_an_error_and_has_nobodys_state() -> None:
    requests = WorkerRequests(all_of_them=True)
    requests.note(step(new("a")))
    for name in ("b", ""):
        with pytest.raises(KeyError):
            requests.spans(Batch([name], [1], [0]))
    assert len(requests) == 1

"""The pytest plugin that lets vLLM's own tests construct our schedulers, and records the outcomes.

`tools/contract.py` loads it into a pytest run inside vLLM's test tree; OMNISTAGE_STAND_IN says
which schedulers the tests get and OMNISTAGE_OUTCOMES where the outcomes go.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from vllm.sampling_params import SamplingParams

# diffusion_scheduler for its effect: imported after the swap its classes would derive from ours.
from vllm.v1.core.sched import (
    async_scheduler,
    diffusion_scheduler,  # noqa: F401
    scheduler,
)
from zmq.utils.monitor import recv_monitor_message

from omnistage.adapters.processor import TokenUpdates
from omnistage.core.collector import EXTRA_ARG
from omnistage.core.scheduler import (
    OmniARAsyncScheduler,
    OmniARScheduler,
    OmniARSchedulerMixin,
)
from omnistage.core.wiring import WiredConfig, Wiring
from omnistage.transport.publisher import PublisherConfig
from omnistage.wire import (
    PROTOCOL_VERSION,
    Ack,
    Admission,
    Data,
    Hello,
    Subscribed,
    Update,
    decode_control,
    decode_data,
    encode,
    topic,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

CHANNEL, SUBSCRIBER = "contract", "listener"
# A publisher answers and stops within milliseconds; past this a test should fail, not hang.
PATIENCE_SECONDS = 30
# The tests' steps have no model in them and would outrun any subscriber, which then counts as
# stalled.
LEAD = 500


class Listener:
    """A subscriber of one scheduler's publisher; its thread ends when the publisher closes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._control = context.socket(zmq.ROUTER)
        self._data = context.socket(zmq.SUB)
        self._data.setsockopt(zmq.RCVHWM, 0)
        self._acks = context.socket(zmq.DEALER)
        for socket in (self._control, self._data):
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE_SECONDS * 1000)
        self.control = f"ipc://{directory}/{id(self):x}"
        self._control.bind(self.control)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._monitor = self._data.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._progress = threading.Condition()
        self._ids = 0
        self.updates: dict[str, list[Update]] = {}

    def follow(self) -> None:
        """Subscribes, and returns once the publisher has confirmed it."""
        hello = decode_control(self._control.recv_multipart()[-1])
        assert isinstance(hello, Hello)
        self._data.subscribe(topic(CHANNEL, SUBSCRIBER))
        self._data.connect(hello.data_endpoint)
        confirmed = decode_data(self._data.recv_multipart()[1])
        assert isinstance(confirmed, Subscribed)
        self._acks.connect(confirmed.delivery)
        self._acknowledge(confirmed.epoch, confirmed.next_sequence)
        self._thread.start()

    def keep_up(self, sent: int) -> None:
        """Waits until all but a few of the `sent` ids have been heard."""
        with self._progress:
            self._progress.wait_for(lambda: sent - self._ids <= LEAD, PATIENCE_SECONDS)

    def close(self) -> list[str]:
        """Waits for the last message of a closed publisher; returns what it reported as failed."""
        self._thread.join()
        reports = []
        while self._control.poll(0):
            reports.append(str(decode_control(self._control.recv_multipart()[-1])))
        self._monitor.close()
        for socket in (self._data, self._control, self._acks):
            socket.close(linger=0)
        return reports

    def _listen(self) -> None:
        poller = zmq.Poller()
        poller.register(self._data, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            gone = self._monitor in ready
            while self._data.poll(0):
                _, header, *buffers = self._data.recv_multipart()
                message = decode_data(header, buffers)
                assert isinstance(message, Data)
                with self._progress:
                    for update in message.updates:
                        self.updates.setdefault(update.request_id, []).append(update)
                        self._ids += len(update.ids)
                    self._progress.notify_all()
                self._acknowledge(message.epoch, message.sequence + 1)
            if gone:
                recv_monitor_message(self._monitor)
                return

    def _acknowledge(self, epoch: int, position: int) -> None:
        positions = ((topic(CHANNEL, SUBSCRIBER), position),)
        self._acks.send(encode(Ack(PROTOCOL_VERSION, epoch, positions)))


def attach_metadata(request: Request, wire_id: str) -> None:
    """Puts on a request what the AR stage would: one consumer, and the id to publish under."""
    params = request.sampling_params
    assert params is not None
    admission = Admission(PROTOCOL_VERSION, wire_id, consumers=((CHANNEL, SUBSCRIBER),))
    # Upstream's factories share one SamplingParams among requests.
    request.sampling_params = copy.copy(params)
    request.sampling_params.extra_args = {
        **(params.extra_args or {}),
        EXTRA_ARG: encode(admission),
    }


class Bench:
    """The wired schedulers of the running test, with a listener each."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.folder = tempfile.TemporaryDirectory(prefix="contract-")
        self.live: list[Wired] = []
        self.heard = {"requests": 0, "ids": 0, "terminals": 0}

    def listen(self) -> Listener:
        """A listener for a scheduler that is being constructed."""
        return Listener(self.context, Path(self.folder.name))

    def end_test(self) -> list[str]:
        """Closes what the test left open; returns what its subscribers heard wrong."""
        live, self.live = self.live, []
        return [complaint for scheduler in live for complaint in scheduler.settle(self.heard)]


bench = Bench()


class Wired(OmniARSchedulerMixin):
    """Before one of our schedulers in the class order: adds what an AR stage adds from outside."""

    _listener: Listener | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        listener = bench.listen()
        vllm_config.additional_config = WiredConfig(
            {},
            Wiring(
                stage="ar",
                channels={CHANNEL: TokenUpdates()},
                publisher=PublisherConfig(
                    bind="ipc",
                    directory=bench.folder.name,
                    control=listener.control,
                    owner_pid=os.getpid(),
                ),
            ),
        )
        super().__init__(vllm_config, *args, **kwargs)
        listener.follow()
        self._served: dict[str, Request] = {}
        self._sent = 0
        self._listener = listener
        bench.live.append(self)

    def add_request(self, request: Request) -> None:
        """Admits the request as if an AR stage had submitted it."""
        known = request.request_id in self.requests
        if self._listener is not None and isinstance(request.sampling_params, SamplingParams):
            # Tests use an id again once its request is over; a submission's own id is unique.
            wire_id = f"{request.request_id}-{len(self._served)}"
            attach_metadata(request, wire_id)
            if not known:
                self._served[wire_id] = request
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Updates from a step, at the subscriber's pace."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._listener is not None:
            for group in outputs.values():
                self._sent += sum(len(output.new_token_ids) for output in group.outputs)
            self._listener.keep_up(self._sent)
        return outputs

    def settle(self, heard: dict[str, int]) -> list[str]:
        """Stops the publisher and compares what arrived with what the scheduler committed."""
        assert self._listener is not None
        publisher = self._omni_publisher
        if publisher is not None and not publisher.close(PATIENCE_SECONDS):
            return ["the publisher did not stop"]
        complaints = self._listener.close()
        for wire_id, request in self._served.items():
            updates = self._listener.updates.get(wire_id, [])
            over = self.requests.get(request.request_id) is not request or request.is_finished()
            complaints += judge(wire_id, updates, list(request.output_token_ids), over=over)
            heard["requests"] += 1
            heard["ids"] += sum(len(update.ids) for update in updates)
            heard["terminals"] += sum(update.terminal is not None for update in updates)
        return complaints


class WiredScheduler(Wired, OmniARScheduler):
    """Our scheduler with a channel, a processor and metadata on each request."""


class WiredAsyncScheduler(Wired, OmniARAsyncScheduler):
    """Our asynchronous scheduler, likewise."""


def judge(
    request_id: str, updates: list[Update], committed: list[int], *, over: bool
) -> Iterator[str]:
    """What is wrong with a request's updates: ids, gaps, or terminals other than one at its end."""
    terminals = [update.terminal for update in updates if update.terminal is not None]
    for terminal in terminals:
        if terminal.kind is not None:
            yield f"{request_id}: {terminal.kind}: {terminal.error}"
    if len(terminals) != over or (over and updates[-1].terminal is None):
        yield f"{request_id}: {len(terminals)} terminals in {len(updates)} updates, over: {over}"
    ids = [token for update in updates for token in update.ids]
    # At a segment's end vLLM moves what was sampled into the prompt.
    segmented = any(update.segment_end for update in updates)
    if (ids[len(ids) - len(committed) :] if segmented else ids) != committed:
        yield f"{request_id}: other ids than committed, {len(ids)} for {len(committed)}"
    position, segment = 0, 0
    for update in updates:
        if update.segment != segment:
            position, segment = 0, update.segment
        if update.position != position:
            yield f"{request_id}: ids at {update.position}, expected at {position}"
        position = update.position + len(update.ids)


def put_in_place(variant: str) -> None:
    """Makes vLLM's modules name the variant's schedulers."""
    if variant == "stock":
        return
    chosen = {
        "idle": (OmniARScheduler, OmniARAsyncScheduler),
        "wired": (WiredScheduler, WiredAsyncScheduler),
    }[variant]
    scheduler.Scheduler, async_scheduler.AsyncScheduler = chosen  # type: ignore[misc]


class Outcomes:
    """A node id's worst report decides; what fails in set-up or teardown has failed."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    def add(self, report: pytest.TestReport) -> None:
        """Takes one phase of one test."""
        if report.failed:
            self.by_test[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self.by_test.setdefault(report.nodeid, report.outcome)


outcomes = Outcomes()


def pytest_configure() -> None:
    """Swaps the classes before any test module is imported."""
    put_in_place(os.environ["OMNISTAGE_STAND_IN"])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes a test's outcome."""
    outcomes.add(report)


def pytest_sessionfinish() -> None:
    """Leaves the outcomes, and what was heard, where the caller looks."""
    result = {"outcomes": outcomes.by_test, "heard": bench.heard}
    Path(os.environ["OMNISTAGE_OUTCOMES"]).write_text(json.dumps(result))


@pytest.fixture(autouse=True)
def subscribers_agree() -> Iterator[None]:
    """Fails a test whose subscribers heard something else than its scheduler decided."""
    yield
    complaints = bench.end_test()
    assert not complaints, "; ".join(complaints)


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """The one fixture these tests take from a conftest that `--noconftest` leaves out."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog

"""The hop from the scheduler's hand-over to the application, beside bare pyzmq doing the same.

Two processes over ipc, the reader on an asyncio loop, rounds of each way interleaved:

* ``omnistage``: steps through output adapter, publisher, delivery and subscriber to the handler.
* ``thread``: the same hand-over to a thread, which sends MessagePack on an XPUB; a SUB reads it.
* ``direct``: as ``thread``, but sent by the thread that has it. Nobody numbers, keeps, checks,
  acknowledges or repairs anything in these two.

For updates a second there is ``delivery`` too: omnistage without output adapter and processor.

Run it on a quiet machine: ``python benchmarks/hop.py --rounds 10``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import zmq

from omnistage.adapters.processor import TokenUpdates
from omnistage.config import AUDIO
from omnistage.core.events import Event, Record, Refusal, StepEvents
from omnistage.core.output_adapter import OutputAdapter
from omnistage.request import Payload
from omnistage.transport.control import ControlServer
from omnistage.transport.endpoints import Endpoints, set_options
from omnistage.transport.handover import HandOver
from omnistage.transport.publisher import Outgoing, Publisher, PublisherConfig
from omnistage.transport.reader import SocketReader
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import PROTOCOL_VERSION, Admission, Update, encode, topic

TOPIC = topic(AUDIO, "bench")
MOST = 128  # requests
BARE = ("thread", "direct")
WAYS = ("omnistage", *BARE)
UNACKNOWLEDGED = 500  # messages; half of the credit
UNACKNOWLEDGED_BYTES = 32 << 20
WAITING_STEPS = 16
PAUSE_SECONDS = 50e-6


class Case(NamedTuple):
    """What a message carries."""

    requests: int
    ids: int
    tensor: int = 0  # bytes
    shape: tuple[int, ...] = ()
    dtype: str = "bfloat16"


CASES = {
    "1 id": Case(1, 1),
    "25 ids": Case(1, 25),
    "[1, 2048] bf16": Case(1, 1, 4096, (1, 2048)),
    "2 MiB": Case(1, 0, 2 << 20, (1, 2 << 20), "uint8"),
    "step of 1": Case(1, 1),
    "step of 32": Case(32, 1),
    "step of 128": Case(128, 1),
}


class Source(OutputAdapter):
    """The output adapter, and a way past it for messages that are built already."""

    built: deque[Outgoing]

    def messages(self) -> Iterator[Outgoing]:
        """Both."""
        yield from super().messages()
        while self.built:
            yield self.built.popleft()


class Engine:
    """The child: hands steps over as a scheduler does, one way or another.

    Args:
        control: The application's control endpoint.
        directory: Where sockets are.
        bare: Where the bare socket binds.
    """

    def __init__(self, control: str, directory: str, bare: str) -> None:
        self.steps: HandOver[StepEvents | Refusal] = HandOver(4096)
        self.source = Source({AUDIO: TokenUpdates()}, self.steps)
        config = PublisherConfig(
            bind="ipc", directory=directory, control=control, owner_pid=os.getppid()
        )
        self.source.built = deque()
        self.publisher = Publisher(self.source, config)
        self.publisher.start()
        self.records = [
            Record(
                Admission(PROTOCOL_VERSION, f"r{i}", consumers=((AUDIO, "bench"),)),
                takes_tokens=True,
            )
            for i in range(MOST)
        ]
        self.positions = [0] * MOST
        self.queue: HandOver[list[Any]] = HandOver(4096)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        set_options(self.socket)
        self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        self.socket.bind(bare)
        self.socket.recv()  # the subscription
        self._mutex = threading.Lock()  # only between rounds is it free for the other way
        threading.Thread(target=self._serve, daemon=True).start()

    def run(self, way: str, case: Case, count: int, gap: float) -> None:
        """Hand ``count`` steps over, ``gap`` seconds apart, or as fast as they are taken."""
        buffer = bytes(case.tensor)
        due = time.monotonic()
        for _ in range(count):
            due += gap
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            while self._is_behind(way):  # a reader that the machine has stopped is not measured
                time.sleep(PAUSE_SECONDS)
            self._step(way, case, buffer)
        while self._is_behind(way, 0):
            time.sleep(PAUSE_SECONDS)

    def _is_behind(self, way: str, steps: int = WAITING_STEPS) -> bool:
        if way in BARE:
            return len(self.queue) > steps
        retained = self.publisher._ledger.topics.get(TOPIC)
        owed = retained is not None and (
            retained.unacknowledged > UNACKNOWLEDGED or retained._bytes > UNACKNOWLEDGED_BYTES
        )
        return owed or len(self.steps) + len(self.source.built) > steps

    def _step(self, way: str, case: Case, buffer: bytes) -> None:
        ids = tuple(range(1000, 1000 + case.ids))
        if way == "omnistage":
            tensors = {"x": Payload(case.dtype, case.shape, 0, buffer)} if buffer else None
            events = []
            for i in range(case.requests):
                events.append(Event(self.records[i], ids, self.positions[i], 0, tensors))
                self.positions[i] += case.ids
            self.steps.put(StepEvents(time.monotonic_ns(), events))
            return
        if way == "delivery":
            made = tuple(Update(f"r{i}", ids=ids) for i in range(case.requests))
            self.source.built.append(Outgoing(TOPIC, time.monotonic_ns(), made))
            self.steps.wake()
            return
        updates = [(f"r{i}", ids) for i in range(case.requests)]
        message = [time.monotonic_ns(), updates, buffer]
        if way == "thread":
            self.queue.put(message)
        else:
            with self._mutex:
                self._send(message)

    def _send(self, message: list[Any]) -> None:
        stamp, updates, buffer = message
        frames = [TOPIC, msgspec.msgpack.encode([stamp, updates]), *([buffer] if buffer else [])]
        self.socket.send_multipart(frames, copy=len(frames[-1]) < 1 << 20)  # pyzmq's faster way

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self.queue.fileno(), zmq.POLLIN)
        while True:
            poller.poll()
            with self._mutex:
                for message in self.queue.drain():
                    self._send(message)


def serve(arguments: Sequence[str]) -> None:
    """The child's life: a line is a round."""
    engine = Engine(*arguments)
    print("ready", flush=True)
    for line in sys.stdin:
        way, case, count, gap = line.rstrip("\n").split("\t")
        engine.run(way, CASES[case], int(count), float(gap))
        print("done", flush=True)


@dataclass
class Meter:
    """What the reader notes of one round."""

    expected: int
    steps: int = 0
    first: int = 0
    last: int = 0
    taken: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self, stamp: int) -> None:
        """A step is where it belongs."""
        now = time.monotonic_ns()
        self.first = self.first or now
        self.taken.append((now - stamp) / 1e3)
        self.steps += 1
        if self.steps == self.expected:
            self.last = now
            self.done.set()


class Application:
    """The parent: reads both ways' messages on its event loop."""

    def __init__(self) -> None:
        self.meter = Meter(0)
        self.requests = 0  # coroutines a step; 0: the handler is the end
        self.per_step = 1
        self.updates = 0  # left of this step
        self.queues: dict[str, asyncio.Queue[tuple[int, Any]]] = {
            f"r{i}": asyncio.Queue() for i in range(MOST)
        }

    def on_update(self, update: Update, buffers: Sequence[Any], stamp: int) -> None:
        """Take an update of omnistage's."""
        self._take(update.request_id, update.ids, stamp)

    def on_lost(self, error: Exception) -> None:
        """Nothing may be lost here."""
        raise error

    def on_bare(self, frames: list[bytes]) -> None:
        """Take a bare message."""
        stamp, updates = msgspec.msgpack.decode(frames[1])
        for name, ids in updates:
            self._take(name, ids, stamp)

    async def read(self, name: str) -> None:
        """One request's coroutine."""
        queue = self.queues[name]
        while True:
            stamp, _ = await queue.get()
            self.updates -= 1
            if not self.updates:
                self.updates = self.requests
                self.meter.step(stamp)

    def _take(self, name: str, ids: Any, stamp: int) -> None:
        if self.requests:
            self.queues[name].put_nowait((stamp, ids))
            return
        self.updates -= 1
        if self.updates <= 0:
            self.updates = self.per_step
            self.meter.step(stamp)

    def expect(self, case: Case, count: int, *, coroutines: bool) -> Meter:
        """Be ready for a round."""
        self.per_step = case.requests
        self.updates = case.requests
        self.requests = case.requests if coroutines else 0
        self.meter = Meter(count)
        return self.meter


async def measure(rounds: int) -> dict[tuple[str, str], Any]:
    """All rounds; microseconds of each step, and updates a second."""
    taken: dict[tuple[str, str], list[float]] = {}
    with Endpoints() as endpoints:
        control = ControlServer(endpoints, lambda failed: sys.exit(failed.error))
        bare = endpoints.ipc()
        application = Application()
        raw = endpoints.context.socket(zmq.SUB)
        set_options(raw)
        raw.setsockopt(zmq.SUBSCRIBE, TOPIC)
        raw.connect(bare)
        reader = SocketReader(raw, application.on_bare)
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            "--engine",
            control.endpoint,
            str(endpoints.directory),
            bare,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if await child.stdout.readline() != b"ready\n":
            raise SystemExit("the engine's process did not start")
        (hello,) = await control.wait_for_hellos(1, within=10)
        subscriber = Subscriber(endpoints, AUDIO, "bench", application)
        await subscriber.connect([hello.data_endpoint], within=10)
        readers = [asyncio.create_task(application.read(name)) for name in application.queues]

        async def run(way: str, case: str, count: int, gap: float, coroutines: bool) -> Meter:
            meter = application.expect(CASES[case], count, coroutines=coroutines)
            child.stdin.write(f"{way}\t{case}\t{count}\t{gap}\n".encode())
            async with asyncio.timeout(60):
                await meter.done.wait()
                await child.stdout.readline()
            return meter

        for number in range(rounds + 1):
            for case in CASES:
                for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                    # 2 MiB each 2 ms are 1 GB/s: more than a busy machine copies.
                    gap = 0.02 if CASES[case].tensor > 1 << 20 else 0.002
                    meter = await run(way, case, 100, gap, case.startswith("step"))
                    if number:  # the first is a warm-up
                        taken.setdefault((case, way), []).extend(meter.taken)
            for way in ("delivery", *WAYS[number % 3 :], *WAYS[: number % 3]):
                meter = await run(way, "step of 32", 3000, 0.0, False)
                rate = 32 * (meter.expected - 1) / (meter.last - meter.first) * 1e9
                if number:
                    taken.setdefault(("updates/s", way), []).append(rate)
        for task in readers:
            task.cancel()
        subscriber.close()
        reader.close()
        raw.close()
        child.stdin.close()
        child.terminate()
        await child.wait()
        control.close()
    return taken


def scheduler_cpu(steps: int = 3000) -> dict[str, float]:
    """Microseconds of CPU that a step of 32 requests costs the scheduler's thread.

    What our scheduler adds to vLLM's own step: note the outputs, hand them over, wake the thread.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    from omnistage.core.collector import StepCollector

    collector = StepCollector({AUDIO: True}, 4096)
    for i in range(32):
        admission = Admission(PROTOCOL_VERSION, f"r{i}", consumers=((AUDIO, "bench"),))
        params = SimpleNamespace(extra_args={"omnistage": encode(admission)})
        collector.admit(SimpleNamespace(request_id=f"v{i}", sampling_params=params))
    collect, append = [], []
    for _ in range(steps):
        outputs = [EngineCoreOutput(request_id=f"v{i}", new_token_ids=[5]) for i in range(32)]
        step = {0: EngineCoreOutputs(outputs=outputs)}
        began = time.thread_time_ns()
        collector.begin(None)
        collector.collect(step, {})
        collect.append((time.thread_time_ns() - began) / 1e3)
        (events,) = collector.steps.drain()
        began = time.thread_time_ns()
        collector.steps.put(events)
        append.append((time.thread_time_ns() - began) / 1e3)
        collector.steps.drain()
    medians = map(statistics.median, (collect, append))
    return dict(zip(("collect and append", "of it the append"), medians, strict=True))


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p95 and p99."""
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.95, 0.99))  # type: ignore[return-value]


def report(taken: dict[tuple[str, str], Any], cpu: dict[str, float]) -> Iterator[str]:
    """The lines."""
    yield (
        f"Python {platform.python_version()}, pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    yield f"{'us':16}" + "".join(f"{way + ' p50/p95/p99':>26}" for way in WAYS) + "   p50 ratios"
    for case in CASES:
        each = {way: percentiles(taken[case, way]) for way in WAYS}
        cells = "".join(f"{'/'.join(f'{v:.0f}' for v in each[way]):>26}" for way in WAYS)
        ratios = " ".join(f"{each['omnistage'][0] / each[way][0]:.2f}" for way in WAYS[1:])
        yield f"{case:16}{cells}   {ratios}"
    for way in (*WAYS, "delivery"):
        rates = sorted(taken["updates/s", way])
        low, median, high = rates[0], statistics.median(rates), rates[-1]
        yield f"updates/s, steps of 32: {way:10} {median:11,.0f} [{low:,.0f}, {high:,.0f}]"
    yield from (f"scheduler's thread, CPU of a 32-step: {w} {us:.1f} us" for w, us in cpu.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine)
    else:
        print("\n".join(report(asyncio.run(measure(options.rounds)), scheduler_cpu())))

"""The descriptor reader on both event loops: nothing is lost, whatever the budgets."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
import zmq

from omnistage.transport.reader import SocketReader

COUNT = 100_000


def run_on(loop: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("seed", [1, 2])
def test_100000_messages_with_random_budgets_all_arrive_in_order(loop: str, seed: int) -> None:
    rng = random.Random(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    pauses = threading.Event()

    def send() -> None:
        push.connect(f"tcp://127.0.0.1:{port}")
        for i in range(COUNT):
            push.send(str(i).encode())
            if i % 9973 == 0:
                pauses.wait(0.005)  # lets the reader run dry, so that edges come and go
        push.close()

    async def main() -> None:
        received: list[int] = []
        done = asyncio.Event()

        def take(frames: list[bytes]) -> None:
            received.append(int(frames[0]))
            if rng.random() < 0.001:
                reader._max_messages = rng.randint(1, 200)
                reader._budget_ns = rng.choice([0, 1000, 100_000, 10_000_000])
            if rng.random() < 0.001:
                pull.getsockopt(zmq.EVENTS)  # touching the socket eats the edge
                reader.touch()
            if len(received) == COUNT:
                done.set()

        reader = SocketReader(pull, take)
        sender = threading.Thread(target=send)
        sender.start()
        async with asyncio.timeout(50):
            await done.wait()
        reader.close()
        await asyncio.to_thread(sender.join)
        assert received == list(range(COUNT))

    run_on(loop, main)
    context.destroy(linger=0)


async def test_a_callback_that_raises_loses_only_its_own_message() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pull.bind("inproc://x")
    push.connect("inproc://x")
    received: list[bytes] = []
    done = asyncio.Event()

    def take(frames: list[bytes]) -> None:
        if frames[0] == b"1":
            raise RuntimeError("no")
        received.append(frames[0])
        if frames[0] == b"4":
            done.set()

    reader = SocketReader(pull, take)
    for i in range(5):
        push.send(str(i).encode())
    async with asyncio.timeout(5):
        await done.wait()
    assert received == [b"0", b"2", b"3", b"4"]
    reader.close()
    reader.close()
    context.destroy(linger=0)


async def test_a_busy_socket_leaves_the_loop_to_others() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.setsockopt(zmq.SNDHWM, 0)
    pull.setsockopt(zmq.RCVHWM, 0)
    pull.bind("inproc://y")
    push.connect("inproc://y")
    for i in range(5000):
        push.send(str(i).encode())
    received: list[bytes] = []
    reader = SocketReader(pull, lambda frames: received.append(frames[0]), max_messages=10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(received) <= 40  # others have had their turn long before the socket is empty
    async with asyncio.timeout(5):
        while len(received) < 5000:
            await asyncio.sleep(0)
    reader.close()
    context.destroy(linger=0)

"""A subscription's own life: what it is given and holds, and that it ends when it is dropped."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client import REGISTRY

from omnistage import Pipeline, Subscription, subscribe
from omnistage.errors import ConfigError, StartupError
from omnistage.testing import Script, scripted
from omnistage.transport import link, shared
from omnistage.transport.keys import make_keys


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("",), "an endpoint is"),
        (("http://x",), "an endpoint is"),
        ((["ipc:///tmp/x", 5],), "an endpoint is"),
        (((),), "no endpoint"),
        (("ipc:///tmp/x", "a/b"), "channel name"),
    ],
)
async def test_what_cannot_be_is_refused_with_a_sentence(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        subscribe(*arguments)


@pytest.mark.parametrize("options", [{"subscriber": 5}, {"within": float("nan")}, {"within": "x"}])
async def test_an_option_of_another_kind_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        subscribe("ipc:///tmp/x", **options)


async def test_an_endpoint_that_zeromq_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot connect"):
        async with subscribe("ipc:///" + "x" * 200):
            pass


async def test_an_endpoint_where_nobody_is_fails_in_time() -> None:
    with pytest.raises(StartupError, match=r"0 of 1"):
        async with subscribe("ipc:///tmp/nobody-here", within=0.1):
            pass


async def test_64_share_one_context_and_one_link_and_leave_nothing() -> None:
    async with Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline:
        threads = threading.active_count()
        native = len(os.listdir("/proc/self/task"))
        async with AsyncExitStack() as stack:
            names = [f"t-{i}" for i in range(64)]
            for name in names:
                await stack.enter_async_context(subscribe(pipeline.endpoints, subscriber=name))
            assert len(os.listdir("/proc/self/task")) == native + 2  # ZeroMQ's reaper and its I/O
            ((endpoints, shares),) = next(iter(shared._shared.values())).values()
            assert len(shares) == 64
            assert len(link._links[endpoints]) == 1
        assert not shared._shared
        assert threading.active_count() == threads
        assert not endpoints.directory.exists()


async def test_one_of_many_closes_and_the_others_read_on() -> None:
    async with (
        Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline,
        subscribe(pipeline.endpoints, subscriber="a") as left,
        subscribe(pipeline.endpoints, subscriber="b") as other,
    ):
        await other.aclose()
        await other.aclose()
        await pipeline.submit("Hello.", subscribers=["a"]).finished()
        async for update in left:
            if update.terminal is not None:
                break


async def test_those_with_other_keys_share_nothing(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        pipelines = []
        for keys in (None, tmp_path / "one", tmp_path / "two"):
            if keys is not None:
                make_keys(keys)
            ar = scripted(Script(ids=range(9)), bind="tcp://127.0.0.1:0", keys=keys)
            pipelines.append((await stack.enter_async_context(Pipeline(ar=ar, decoder=None)), keys))
        for pipeline, keys in pipelines:
            reading = await stack.enter_async_context(subscribe(pipeline.endpoints, keys=keys))
            await pipeline.submit("Hello.", subscribers=["tokens"]).finished()
            assert (await anext(reading)).ids
        (of_loop,) = shared._shared.values()
        assert len({endpoints for endpoints, _ in of_loop.values()}) == 3
    assert not shared._shared


def test_two_event_loops_do_not_share() -> None:
    async def visit() -> None:
        async with Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline:
            async with subscribe(pipeline.endpoints):
                assert len(shared._shared) == 1
            assert not shared._shared

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(visit())


def test_one_that_outlives_its_event_loop_leaves_the_metrics_too() -> None:
    async def open_one() -> Subscription:
        async with Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline:
            return await subscribe(pipeline.endpoints, subscriber="late").__aenter__()

    with asyncio.Runner() as runner:
        subscription = runner.run(open_one())
    labels = {"channel": "audio", "subscriber": "late"}
    assert REGISTRY.get_sample_value("omnistage:delivery_credit", labels) is not None
    # What its finalizer does; who else may hold it for a while is the interpreter's affair.
    assert subscription._inbox is not None
    subscription._inbox.close_threadsafe()
    subscription._closed = True
    assert REGISTRY.get_sample_value("omnistage:delivery_credit", labels) is None
    assert not shared._shared


@pytest.mark.slow
async def test_64_idle_ones_cost_next_to_nothing() -> None:
    async with (
        Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline,
        AsyncExitStack() as stack,
    ):
        for i in range(64):
            subscription = subscribe(pipeline.endpoints, subscriber=f"t-{i}")
            await stack.enter_async_context(subscription)
        await asyncio.sleep(1)
        before = cpu_by_thread()
        await asyncio.sleep(10)
        used = {name: seconds - before.get(name, 0) for name, seconds in cpu_by_thread().items()}
    print({name: f"{1e3 * s:.1f} ms" for name, s in used.items() if s})  # noqa: T201 a measurement
    print(f"{1e3 * sum(used.values()):.1f} ms in all")  # noqa: T201
    # All threads of both sides, the publisher's included. 0.02 s is the aim, 0.2% of a core; the
    # bound leaves room for neighbours that empty the caches between two heartbeats.
    assert sum(used.values()) < 0.04


def cpu_by_thread() -> dict[str, float]:
    """Seconds that each thread of this process has run, by the scheduler's own nanoseconds."""
    used = {}
    for task in Path("/proc/self/task").iterdir():
        name = f"{(task / 'comm').read_text().strip()} {task.name}"
        used[name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


async def test_one_that_is_dropped_open_is_closed_and_says_so() -> None:
    async with Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline:

        async def last(confirmed: asyncio.Event) -> int:
            updates = subscribe(pipeline.endpoints)
            await updates.__aenter__()
            confirmed.set()
            # To the request's end: one whose subscriber leaves before fails, and rightly.
            async for update in updates:
                if update.terminal is not None:
                    return update.position
            return -1

        async def round_trip() -> None:
            confirmed = asyncio.Event()
            reading = asyncio.create_task(last(confirmed))
            await confirmed.wait()
            await pipeline.submit("Hello.", subscribers=["tokens"]).finished()
            assert await reading > 0

        async def dropped(times: int) -> tuple[int, int]:
            """Threads and descriptors after so many subscriptions were dropped open."""
            for _ in range(times):
                await round_trip()
                gc.collect()
            await asyncio.sleep(0.05)
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        with pytest.warns(ResourceWarning, match="dropped open"):
            before = await dropped(1)
        with pytest.warns(ResourceWarning, match="dropped open"):
            assert await dropped(3) == before

"""A subscription's own life: what it is given and holds, and that it ends when it is dropped."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import Any

import pytest

from omnistage import Pipeline, subscribe
from omnistage.errors import ConfigError, StartupError
from omnistage.testing import Script, scripted


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


async def test_one_that_is_dropped_open_is_closed_and_says_so() -> None:
    async with Pipeline(ar=scripted(Script(ids=range(9))), decoder=None) as pipeline:

        async def first() -> int:
            async for update in subscribe(pipeline.endpoints):
                return update.ids[0]
            return -1

        async def round_trip() -> None:
            reading = asyncio.create_task(first())
            await asyncio.sleep(0.1)
            await pipeline.submit("Hello.", subscribers=["tokens"]).finished()
            assert await reading == 0

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

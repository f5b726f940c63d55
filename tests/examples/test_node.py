"""The subscriber in JavaScript: what a stranger writes from docs/protocol.md works."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from omnistage import Pipeline
from omnistage.testing import Script, scripted
from omnistage.transport.endpoints import Endpoints
from tests.examples.documents import ROOT
from tests.transport.proxy import Faults, proxy
from tests.transport.test_faults import eventually

pytestmark = pytest.mark.timeout(240)  # the first run fetches two packages

IDS = list(range(100, 160))


@pytest.fixture(scope="module")
def program() -> Path:
    """The example with its packages, in the cache; the second time they are there."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("needs node and npm")
    folder = ROOT / ".cache" / "node"
    shutil.copytree(ROOT / "examples" / "node", folder, dirs_exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer")
    if done.returncode:
        pytest.skip(f"npm cannot install zeromq and @msgpack/msgpack: {done.stderr[-300:]}")
    return folder / "subscriber.js"


class Reader:
    """The program, running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, program: Path, endpoint: str, requests: int) -> Reader:
        command = ("node", program, endpoint, "audio/js", str(requests))
        reader = cls(await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE))
        assert reader._process.stderr is not None
        assert await reader._process.stderr.readline() == b"subscribed\n"
        return reader

    async def finish(self) -> dict[str, list[int]]:
        """Ids by request, in order, once it has ended."""
        async with asyncio.timeout(30):
            out, err = await self._process.communicate()
        assert self._process.returncode == 0, err.decode()
        ids: dict[str, list[int]] = {}
        ended = []
        for line in out.splitlines():
            update = json.loads(line)
            known = ids.setdefault(update["request"], [])
            assert update["position"] == len(known)
            known += update["ids"]
            if update["end"] is not None:
                ended.append((update["request"], update["end"]))
        assert sorted(ended) == sorted((request, "stop") for request in ids)
        return ids


async def submit(pipeline: Pipeline) -> None:
    await pipeline.submit("Hello.", subscribers=["js"]).finished()


async def test_a_subscriber_in_javascript_gets_every_id_and_leaves(program: Path) -> None:
    async with Pipeline(ar=scripted(Script(ids=IDS)), decoder=None) as pipeline:
        reader = await Reader.start(program, pipeline.endpoints[0], 8)
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(submit(pipeline))
        assert list((await reader.finish()).values()) == [IDS] * 8


async def test_it_asks_again_for_what_is_lost(program: Path) -> None:
    script = Script(ids=IDS, step_after=0.01)
    async with Pipeline(ar=scripted(script), decoder=None) as pipeline:
        with Endpoints() as endpoints, proxy(endpoints, pipeline.endpoints[0]) as between:
            between.unconfirmed = 1
            reader = await Reader.start(program, between.endpoint, 2)
            between.faults = Faults(drop=1)
            submitting = asyncio.create_task(submit(pipeline))
            await eventually(lambda: between.harmed > 2)
            between.faults = Faults(drop=0.05, double=0.05, delay=0.1)
            await submitting
            await submit(pipeline)
            assert list((await reader.finish()).values()) == [IDS] * 2

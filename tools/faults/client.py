"""The client process: it runs streams when it is told to and says in JSON what becomes of each.

Commands are lines on standard input: ``run ID COUNT`` starts long streams, ``one ID`` a short
request, ``stop`` aborts the streams. Times are the monotonic clock's, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from omnistage import Pipeline
from omnistage.errors import OmniStageError

LONG = "Please close the window before it starts to rain and bring the washing in. " * 200
SHORT = "Hello."
_LOOK_SECONDS = 0.01


def say(what: str, **facts: object) -> None:
    """Print one event."""
    print(json.dumps({"at": time.monotonic(), "what": what, **facts}), flush=True)


async def speak(pipeline: Pipeline, name: str, text: str) -> None:
    """Run one request to its end, whatever that is."""
    async with pipeline.submit(text) as stream:
        try:
            async for chunk in stream:
                if chunk.index == 0:
                    say("first", id=name)
                last[name] = time.monotonic()
        except OmniStageError as error:
            say("end", id=name, error=type(error).__name__, message=str(error))
        except Exception as error:
            say("end", id=name, error=f"untyped {type(error).__name__}", message=str(error))
        else:
            say("end", id=name, error=None)
    say("left", id=name)  # the stages have let go of it


async def watch(pipeline: Pipeline) -> None:
    """Say whenever the pipeline takes requests or takes none, and how many decoders it has."""
    known: tuple[bool, int] | None = None
    while True:
        health = pipeline.health()
        stage: Any = pipeline._routes[0].ar
        decoders = sum(len(branch.replicas) for branch in stage.branches)
        if (health.ok, decoders) != known:
            known = health.ok, decoders
            say("health", ok=health.ok, decoders=decoders, reason=health.reason)
        await asyncio.sleep(_LOOK_SECONDS)


async def main(endpoint: str) -> None:
    """Do what standard input says until it ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with Pipeline.connect(endpoint, within=60) as pipeline:
        say("ready")
        watching = asyncio.ensure_future(watch(pipeline))
        running: list[asyncio.Task[None]] = []
        asked: list[asyncio.Task[None]] = []  # kept, so that none is collected while it runs
        while line := (await reader.readline()).decode().split():
            if line[0] == "run":
                names = [f"{line[1]}-{index}" for index in range(int(line[2]))]
                running += [asyncio.create_task(speak(pipeline, name, LONG)) for name in names]
            elif line[0] == "one":
                asked.append(asyncio.create_task(speak(pipeline, line[1], SHORT)))
            elif line[0] == "stop":
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                running.clear()
                say("stopped", last=last)
        watching.cancel()


last: dict[str, float] = {}
"""When each stream had its last chunk."""

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

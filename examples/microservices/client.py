"""Speaks through stages that run elsewhere, and says what it heard.

    omnistage stage ar --bind tcp://127.0.0.1:7101 &
    omnistage stage decoder --connect tcp://127.0.0.1:7101 &
    python examples/microservices/client.py tcp://127.0.0.1:7101 hello.wav

Stop the services with SIGTERM: they refuse new requests, end the running ones, then themselves.
"""

from __future__ import annotations

import asyncio
import sys
import time

from omnistage import OmniStageError, Pipeline


async def speak(service: str, output: str) -> None:
    """Write what the services make of a sentence, and print when its first audio came."""
    # Longer than a service's start: whoever starts all three at once need not wait in between.
    async with Pipeline.connect(service, within=60) as pipeline:
        began = time.monotonic()
        stream = pipeline.submit("Good morning. The services are up.")
        async with stream:
            pieces = []
            async for chunk in stream:
                if not pieces:
                    print(f"first audio after {(time.monotonic() - began) * 1000:.0f} ms")
                pieces.append(chunk)
        seconds = sum(piece.seconds for piece in pieces)
        print(f"{len(pieces)} chunks, {seconds:.2f} s of audio, {stream.usage}")
        speech = await pipeline.submit("And this is all of it.").collect()
        speech.save(output)


if __name__ == "__main__":
    try:
        asyncio.run(speak(sys.argv[1], sys.argv[2]))
    except OmniStageError as error:
        sys.exit(f"{error}")

"""An answer that is spoken while it is still being written, as a language model writes it.

Run it as ``python examples/streamed_text.py [FOLDER]``; answer.wav goes to FOLDER, or to this one.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import wave
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage import Pipeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ANSWER = (
    "The kettle is boiling. You have two minutes, so take two cups, warm them, and put a spoon of "
    "leaves into each. Do you take milk? Mr. Jones does not!"
)


async def answer() -> AsyncIterator[str]:
    """Stands for your language model: a few letters at a time."""
    for delta in re.findall(".{1,5}", ANSWER):
        await asyncio.sleep(0.04)
        yield delta
    print("the text is complete")


async def main(folder: Path) -> None:
    """Speak the answer into a file, and say when what was there."""
    heard = 0.0
    async with Pipeline.from_preset("talker") as pipeline:
        with wave.open(str(folder / "answer.wav"), "wb") as wav:
            wav.setparams((1, 2, pipeline.sample_rate, 0, "NONE", ""))  # mono, 16 bit
            began = time.perf_counter()
            async with pipeline.submit(answer()) as stream:  # leaving the block closes answer()
                async for chunk in stream:
                    if not heard:
                        print(f"first audio after {time.perf_counter() - began:.2f} s")
                    heard += chunk.seconds
                    wav.writeframes((chunk.pcm * 32767).astype("<i2").tobytes())
    print(f"answer.wav: {heard:.2f} s")


# vLLM starts its processes by importing this file again, so nothing may run on import.
if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))

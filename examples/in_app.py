"""An asyncio application with a voice: three sentences at once, each written while it is spoken.

Run it as ``python examples/in_app.py [FOLDER]``; the wav files go to FOLDER, or to this one.
"""

from __future__ import annotations

import asyncio
import sys
import time
import wave
from pathlib import Path

from omnistage import Pipeline

SENTENCES = (
    "Hello world.",
    "The kettle is boiling.",
    "Please close the window before it starts to rain.",
)


async def speak(pipeline: Pipeline, sentence: str, path: Path) -> None:
    """Speak one sentence into a wav file, then say what it took."""
    began = time.perf_counter()
    first_audio = 0.0
    with wave.open(str(path), "wb") as wav:
        wav.setparams((1, 2, pipeline.sample_rate, 0, "NONE", ""))  # mono, 16 bit
        async with pipeline.submit(sentence) as stream:  # leaving the block aborts what is left
            async for chunk in stream:
                first_audio = first_audio or time.perf_counter() - began
                wav.writeframes((chunk.pcm * 32767).astype("<i2").tobytes())
    usage = stream.usage
    if usage is not None:
        print(
            f"{path.name}: first audio after {first_audio * 1000:.0f} ms, "
            f"{usage.output_tokens} tokens, finish reason {usage.finish_reason}"
        )


async def main(folder: Path) -> None:
    """Start the pipeline once, then speak all sentences concurrently."""
    async with Pipeline.from_preset("talker") as pipeline, asyncio.TaskGroup() as group:
        for number, sentence in enumerate(SENTENCES, start=1):
            group.create_task(speak(pipeline, sentence, folder / f"sentence-{number}.wav"))


# vLLM starts its processes by importing this file again, so nothing may run on import.
if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))

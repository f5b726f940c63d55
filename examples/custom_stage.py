"""A third stage: a resampler behind the talker's decoder, for a telephone line.

    python examples/custom_stage.py call.wav

It needs omnistage[audio] for soxr.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import TYPE_CHECKING

import numpy as np
import soxr

from omnistage import AudioChunk, AudioSink, OmniStageError, Pipeline
from omnistage.errors import StageClosed
from omnistage.models import load_preset

if TYPE_CHECKING:
    from omnistage.request import Pcm, Terminal


class Resampler:
    """Gives a decoder's audio at another rate.

    soxr takes 0.1 ms for a chunk, so it may run on the event loop; a stage that takes longer hands
    its work to a thread and gives the result to its sink from the loop.

    Args:
        rate: Samples a second of the audio it gives.
    """

    name = "resampler"

    def __init__(self, rate: int) -> None:
        self.sample_rate = rate
        self._open: dict[str, Resampling] = {}
        self._closed = False
        self._idle = asyncio.Event()

    async def start(self) -> None:
        """Nothing to load."""

    async def serve(self) -> None:
        """Nothing to do of its own accord: the decoder's calls move the audio."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Refuse new requests and wait for the open ones."""
        self._closed = True
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Let go of everything."""
        self._closed = True
        self._open.clear()

    def open(self, request_id: str, sink: AudioSink) -> Resampling:
        """Take a request."""
        if self._closed:
            raise StageClosed("the stage takes no requests", stage=self.name)
        self._open[request_id] = Resampling(self, request_id, sink)
        return self._open[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a request, finished or not."""
        if request := self._open.pop(request_id, None):
            request.sink = None
        if not self._open:
            self._idle.set()

    async def release(self, request_id: str) -> None:
        """Nothing outlives a drop: no thread has anything in its hands."""


class Resampling:
    """One request on its way through: what the decoder calls."""

    def __init__(self, stage: Resampler, request_id: str, sink: AudioSink) -> None:
        self.sink: AudioSink | None = sink
        self._stage = stage
        self._request_id = request_id
        self._stream: soxr.ResampleStream | None = None
        self._decoder = ""
        self._index = 0

    def on_chunk(self, chunk: AudioChunk) -> None:
        """Resample a chunk; the filter holds some milliseconds back."""
        if self._stream is None:
            self._decoder = chunk.decoder
            self._stream = soxr.ResampleStream(
                chunk.sample_rate, self._stage.sample_rate, num_channels=1, dtype="float32"
            )
        self._give(self._stream.resample_chunk(chunk.pcm))

    def on_end(self, terminal: Terminal) -> None:
        """Give what the filter held back, then the end."""
        if self._stream is not None:
            self._give(self._stream.resample_chunk(np.zeros(0, np.float32), last=True))
        sink = self.sink
        self._stage.drop(self._request_id)
        if sink is not None:
            sink.on_end(terminal)

    def on_error(self, error: OmniStageError) -> None:
        """Pass it on: somebody waits for it."""
        sink = self.sink
        self._stage.drop(self._request_id)
        if sink is not None:
            sink.on_error(error)

    def _give(self, pcm: Pcm) -> None:
        if len(pcm) and self.sink is not None:
            rate, index = self._stage.sample_rate, self._index
            self._index += 1
            self.sink.on_chunk(AudioChunk(self._request_id, index, pcm, rate, self._decoder))


async def main(path: str) -> None:
    """Speak one sentence at 8 kHz."""
    ar, decoder = load_preset("talker")
    decoder = dataclasses.replace(decoder, then=[lambda: Resampler(8000)])
    async with Pipeline(ar=ar, decoder=decoder) as pipeline:
        speech = await pipeline.submit("Please hold the line.").collect()
    speech.save(path)
    print(
        f"{path}: {speech.seconds:.2f} s at {speech.sample_rate} Hz, {speech.usage.finish_reason}"
    )


# vLLM starts its processes by importing this file again, so nothing may run on import.
if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "call.wav"))

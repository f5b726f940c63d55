"""A decoder, a sink and a feed of updates made by hand, for tests of the decoder stage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from omnistage.config import DecoderStageConfig
from omnistage.errors import OmniStageError
from omnistage.request import AudioChunk, Codes, FinishReason, Pcm, Start, Terminal
from omnistage.stages.base import Stage
from omnistage.stages.decoder import DecoderStage
from omnistage.transport.endpoints import Endpoints
from omnistage.wire import Update

SIZE = 100
END = Terminal(FinishReason.STOP, 9)


class Decoder:
    """Two codebooks; a sample is the sum of a frame and of its neighbours on either side."""

    sample_rate = 8000
    hop_length = 1
    codebooks = 2
    codebook_size = SIZE
    left_context = 1
    right_context = 1
    deterministic = True

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.threads: set[str] = set()
        self.gate: threading.Event | None = None

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        if self.gate is not None:
            self.gate.wait(10)
        self.batches.append(len(windows))
        self.threads.add(threading.current_thread().name)
        if any((w == 66).any() for w in windows):
            raise RuntimeError("66")
        out = []
        for w in windows:
            x = np.pad(w.sum(axis=1), 1)
            out.append(((x[:-2] + x[1:-1] + x[2:]) / 1000).astype(np.float32))
        return out


def audio(frames: Sequence[tuple[int, int]]) -> list[float]:
    return [float(x) for x in Decoder().decode([np.array(frames)])[0]] if frames else []


class Sink:
    counts = False

    def __init__(self) -> None:
        self.unread_seconds = 0.0
        self.chunks: list[AudioChunk] = []
        self.outcome: asyncio.Future[Terminal | OmniStageError] = (
            asyncio.get_running_loop().create_future()
        )

    def on_chunk(self, chunk: AudioChunk) -> None:
        assert not self.outcome.done()
        assert chunk.index == len(self.chunks)
        self.chunks.append(chunk)
        self.unread_seconds += chunk.seconds if self.counts else 0

    def on_end(self, terminal: Terminal) -> None:
        self.outcome.set_result(terminal)

    def on_error(self, error: OmniStageError) -> None:
        self.outcome.set_result(error)

    @property
    def pcm(self) -> list[float]:
        return [float(x) for chunk in self.chunks for x in chunk.pcm]


class Feed:
    """Sends one request's frames in updates of any size."""

    def __init__(
        self, stage: DecoderStage, request_id: str, *, sink: Sink | None = None, **start: Any
    ) -> None:
        self.sink = sink or Sink()
        self._stage = stage
        self.request_id = request_id
        self._start: Start | None = Start(**start)
        self._position = 0
        stage.open(request_id, self.sink)

    def send(self, *frames: tuple[int, int], terminal: Terminal | None = None) -> None:
        ids = tuple(i for frame in frames for i in frame)
        update = Update(
            self.request_id, position=self._position, ids=ids, start=self._start, terminal=terminal
        )
        self._start = None
        self._position += len(ids)
        self._stage.on_update(update, (), 0)

    async def end(self) -> Terminal | OmniStageError:
        async with asyncio.timeout(10):
            return await self.sink.outcome


@asynccontextmanager
async def running(decoder: Any = None, **config: Any) -> AsyncIterator[DecoderStage]:
    decoder = decoder or Decoder()
    with Endpoints() as endpoints:
        stage = DecoderStage(DecoderStageConfig(build=lambda: decoder, **config), endpoints)
        assert isinstance(stage, Stage)
        await stage.start()
        serving = asyncio.create_task(stage.serve())
        yield stage
        await stage.aclose()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert not len(stage)


FRAMES = [(i % 50, i % 7) for i in range(60)]

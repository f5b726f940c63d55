"""One request in the decoder stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.request import ChunkPolicy

if TYPE_CHECKING:
    from omnistage.decoders.window import WindowedStream
    from omnistage.request import Terminal
    from omnistage.stages.base import PacedSink
    from omnistage.stages.watch import Watch


class Decoding:
    """One request between its first update and its last sample."""

    def __init__(self, request_id: str, sink: PacedSink, watch: Watch) -> None:
        self.request_id = request_id
        self.sink = sink
        self.watch = watch
        self.stream: WindowedStream | None = None  # until the start record is here
        self.chunks = ChunkPolicy()
        self.chunk_index = 0
        self.generation: int | None = None  # until the start record is here
        self.position = 0
        self.wanted = 0  # frames until the next chunk can be decoded
        self.terminal: Terminal | None = None
        self.dropped = False
        self.busy = False  # its stream is in the worker thread
        self.held = False  # its reader does not read

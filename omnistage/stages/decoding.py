"""One request in the decoder stage, and who receives its audio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from omnistage.request import ChunkPolicy

if TYPE_CHECKING:
    from omnistage.decoders.window import WindowedStream
    from omnistage.errors import OmniStageError
    from omnistage.request import AudioChunk, Terminal
    from omnistage.stages.watch import Watch


class AudioSink(Protocol):
    """Who receives one request's audio; called on the event loop, must not block.

    Attributes:
        unread_seconds: Audio that it was given and that nobody has read.
    """

    unread_seconds: float

    def on_chunk(self, chunk: AudioChunk) -> None:
        """The next piece of audio."""
        ...

    def on_end(self, terminal: Terminal) -> None:
        """All audio has been given; called once, and nothing follows."""
        ...

    def on_error(self, error: OmniStageError) -> None:
        """The request failed in this stage; called once, and nothing follows."""
        ...


class Decoding:
    """One request between its first update and its last sample."""

    def __init__(self, request_id: str, sink: AudioSink, watch: Watch) -> None:
        self.request_id = request_id
        self.sink = sink
        self.watch = watch
        self.stream: WindowedStream | None = None  # until the start record is here
        self.chunks = ChunkPolicy()
        self.chunk_index = 0
        self.position = 0
        self.wanted = 0  # frames until the next chunk can be decoded
        self.terminal: Terminal | None = None
        self.dropped = False
        self.busy = False  # its stream is in the worker thread
        self.held = False  # its reader does not read

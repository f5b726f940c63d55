"""One request in the decoder stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.errors import ProtocolError, UpdatesLost
from omnistage.request import ChunkPolicy, Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.decoders.frames import FrameFormat, Frames
    from omnistage.decoders.window import WindowedStream
    from omnistage.request import Terminal
    from omnistage.stages.base import PacedSink
    from omnistage.stages.watch import Watch
    from omnistage.wire import Buffer, Update


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
        self.row: int | None = None  # position of the row that is due, once one has come
        self.wanted = 0  # frames until the next chunk can be decoded
        self.terminal: Terminal | None = None
        self.dropped = False
        self.busy = False  # its stream is in the worker thread
        self.held = False  # its reader does not read

    def frames(self, of: FrameFormat, update: Update, buffers: Sequence[Buffer]) -> Frames:
        """The frames that an update brings.

        Args:
            of: What the decoder takes.
            update: The request's next update.
            buffers: Those of its message.

        Raises:
            ProtocolError: Ids that are no whole frames, or no rows at all where there are due.
            DecoderError: Rows of another shape or dtype.
            UpdatesLost: Rows are missing before these.
        """
        if not of.key:
            return of.of_ids(update.ids)
        for info in update.tensors:
            if info.name == of.key:
                data = buffers[info.frame]
                rows = of.of_rows(Payload(info.dtype, info.shape, info.first_row, data))
                if self.row not in (None, info.first_row):
                    raise UpdatesLost(
                        f"rows of {of.key!r} from {info.first_row} came where {self.row} was due"
                    )
                self.row = info.first_row + len(rows)
                return rows
        terminal = update.terminal
        if self.row is None and terminal is not None and terminal.tokens and not terminal.error:
            raise ProtocolError(
                f"{of.name} takes rows of {of.key!r}, and none came: what the AR stage's "
                "processor emits are others"
            )
        return of.zeros(0)

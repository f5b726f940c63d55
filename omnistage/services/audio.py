"""A decoder service's audio on its way to its clients: chunks in, updates out.

Audio is an update like any other: a float32 tensor, its first row the index of its first sample.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from omnistage.errors import ProtocolError
from omnistage.request import AudioChunk, FinishReason, Start, Terminal
from omnistage.transport.handover import HandOver
from omnistage.transport.publisher import Outgoing
from omnistage.wire import TensorInfo, Update, topic
from omnistage.wire_services import AUDIO_TENSOR, SPEECH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from omnistage.errors import OmniStageError
    from omnistage.request import Pcm
    from omnistage.wire import Buffer, Failed

_WAITING: Final = 100_000
"""Updates between the event loop and the publisher's thread; flow control holds them far below."""
RATE_OPTION: Final = "sample_rate"


class AudioOut:
    """What a decoder service's publisher sends; the event loop puts in, its thread takes out.

    Args:
        on_undelivered: Called in the publisher's thread with the topic of a client that gets no
            more, and why.
    """

    def __init__(self, on_undelivered: Callable[[bytes, OmniStageError], None]) -> None:
        self._waiting: HandOver[Outgoing] = HandOver(_WAITING)
        self._on_undelivered = on_undelivered

    def put(self, client: str, update: Update, pcm: Pcm | None = None) -> None:
        """Hand over one update, with its samples if it has any."""
        buffers = () if pcm is None else (np.ascontiguousarray(pcm, "<f4").tobytes(),)
        self._waiting.put_beyond_limit(
            Outgoing(topic(SPEECH, client), time.monotonic_ns(), (update,), buffers)
        )

    def close(self) -> None:
        """Give the queue back; the publisher must have ended."""
        self._waiting.close()

    def fileno(self) -> int:
        """Readable while there is something to send."""
        return self._waiting.fileno()

    def messages(self) -> Iterable[Outgoing]:
        """Take what there is."""
        return self._waiting.drain()

    def failures(self) -> Iterable[Failed]:
        """None: a client is told of an error by its terminal."""
        return ()

    def release(self, request_id: str) -> None:
        """Nothing is kept a request."""

    def undelivered(self, topic: bytes, error: OmniStageError) -> None:
        """Pass it on."""
        self._on_undelivered(topic, error)


class Outlet:
    """One request's audio to one client: what its branch gives it, as updates.

    Args:
        out: Where to.
        request_id: Internal id.
        generation: The AR stage's count of it.
        client: The client's subscriber id.
        sample_rate: Samples a second.
        stage: The decoder stage's name.
        on_over: Called with its id and how it ended when that has been handed over.
    """

    def __init__(
        self,
        out: AudioOut,
        request_id: str,
        generation: int,
        client: str,
        *,
        sample_rate: int,
        stage: str,
        on_over: Callable[[str, str], None],
    ) -> None:
        self.client = client
        self._stage = stage
        self._out = out
        self._request_id = request_id
        self._generation = generation
        self._rate = sample_rate
        self._on_over = on_over
        self._index = 0
        self._given = 0  # samples
        self._read = 0

    @property
    def unread_seconds(self) -> float:
        """Audio that the client's reader has not read, on its way included."""
        return (self._given - self._read) / self._rate

    def read(self, samples: int) -> None:
        """The client's reader has got so far."""
        self._read = max(self._read, min(samples, self._given))

    def on_chunk(self, chunk: AudioChunk) -> None:
        """Send a chunk."""
        pcm = chunk.pcm
        info = TensorInfo(AUDIO_TENSOR, "float32", (len(pcm),), self._given, 0)
        self._given += len(pcm)
        self._put(tensors=(info,), pcm=pcm)

    def on_end(self, terminal: Terminal) -> None:
        """Send the end."""
        self._put(terminal=terminal)
        self._on_over(self._request_id, "ok")

    def on_error(self, error: OmniStageError) -> None:
        """Send what went wrong as the end."""
        self._put(terminal=_failed(error, self._stage))
        self._on_over(self._request_id, type(error).__name__)

    def _put(
        self,
        *,
        tensors: tuple[TensorInfo, ...] = (),
        terminal: Terminal | None = None,
        pcm: Pcm | None = None,
    ) -> None:
        start = Start(options={RATE_OPTION: self._rate}) if self._index == 0 else None
        update = Update(
            self._request_id,
            self._generation,
            position=self._index,
            tensors=tensors,
            start=start,
            terminal=terminal,
        )
        self._index += 1
        self._out.put(self.client, update, pcm)


class Inlet:
    """The client's end of an outlet: updates in, chunks out, each checked.

    Args:
        request_id: Internal id.
        decoder: Name of the decoder's stage.
    """

    def __init__(self, request_id: str, decoder: str) -> None:
        self._request_id = request_id
        self._decoder = decoder
        self._rate = 0
        self._index = 0  # of the next update
        self._chunks = 0
        self._samples = 0

    def read_samples(self, unread_seconds: float) -> int:
        """Samples that the reader has read, by the seconds that it has not."""
        return max(0, self._samples - round(unread_seconds * self._rate))

    def chunk(self, update: Update, buffers: Sequence[Buffer]) -> AudioChunk | None:
        """The audio of an update, if it has any.

        Raises:
            ProtocolError: The update is not the one that was due, or holds no audio as agreed.
        """
        if update.start is not None:
            self._rate = update.start.options.get(RATE_OPTION, 0)
        if type(self._rate) is not int or self._rate < 1:
            raise ProtocolError("the decoder's audio came without a sample rate")
        if update.position != self._index:
            raise ProtocolError(f"audio update {update.position} came where {self._index} was due")
        self._index += 1
        if not update.tensors:
            return None
        info = update.tensors[0]
        if len(update.tensors) > 1 or (info.name, info.dtype) != (AUDIO_TENSOR, "float32"):
            raise ProtocolError("an audio update holds one float32 tensor")
        if len(info.shape) != 1 or not info.shape[0] or info.first_row != self._samples:
            raise ProtocolError(
                f"samples of shape {info.shape} from {info.first_row} came where "
                f"{self._samples} was due"
            )
        # A copy, so that it is the reader's own, aligned and writable.
        pcm = np.frombuffer(buffers[info.frame], "<f4").astype(np.float32, copy=True)
        self._samples += len(pcm)
        index, self._chunks = self._chunks, self._chunks + 1
        return AudioChunk(self._request_id, index, pcm, self._rate, self._decoder)


def _failed(error: OmniStageError, here: str) -> Terminal:
    """The terminal that tells of an error; it names the stage unless that is the sender."""
    where = f" (stage {error.stage!r})" if error.stage not in {None, here} else ""
    kind = type(error).__name__
    return Terminal(FinishReason.ERROR, error=f"{error.message}{where}", kind=kind)

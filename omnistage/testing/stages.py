"""The contract of a stage: a life that ends cleanly, and, behind a decoder, audio in order."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from omnistage.errors import DecoderError, OmniStageError, StageClosed
from omnistage.request import AudioChunk, FinishReason, Pcm, Terminal
from omnistage.stages.base import AudioSink, AudioStage, Stage
from omnistage.testing.checks import contract

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

_S = TypeVar("_S", bound=Stage)

_RATE: Final = 24_000
_SECONDS: Final = 5.0
_LATE_SECONDS: Final = 0.05  # what comes within this after an end is found
_DECODER: Final = "voice"  # no default, so that a chunk that was made anew is told apart
_END: Final = Terminal(FinishReason.STOP, 40)


def lives_and_ends(make: Callable[[], Stage]) -> None:
    """``serve`` runs until it is cancelled; afterwards nothing of the stage's is left running."""

    async def check() -> None:
        before = asyncio.all_tasks()
        async with _running(make) as stage:
            assert isinstance(stage, Stage), "an attribute or method of the protocol is missing"
            assert stage.name, "a stage needs a name"
            await asyncio.sleep(0.05)
        left = asyncio.all_tasks() - before
        assert not left, f"tasks are left after aclose(): {sorted(t.get_name() for t in left)}"

    _run(check)


def closes_twice_and_unstarted(make: Callable[[], Stage]) -> None:
    """``aclose`` is called whatever happened before, also twice, also without a start."""

    async def check() -> None:
        stage = make()
        await stage.aclose()
        async with _running(make) as started:
            await started.aclose()

    _run(check)


def drains_at_once_when_idle(make: Callable[[], Stage]) -> None:
    """Without requests there is nothing to wait for."""

    async def check() -> None:
        async with _running(make) as stage:
            await _soon(stage.drain(), "drain() of an idle stage does not return")

    _run(check)


STAGE_CONTRACT: Final = contract(
    lives_and_ends,
    closes_twice_and_unstarted,
    drains_at_once_when_idle,
)
"""Checks of any :class:`~omnistage.Stage`; each takes what makes the stage, in a running loop."""


def passes_audio_on_in_order(make: Callable[[], AudioStage]) -> None:
    """Chunks count from 0, carry the stage's own rate, and one end follows the last."""

    async def check() -> None:
        async with _running(make) as stage:
            assert isinstance(stage, AudioStage), (
                "an attribute or method of the protocol is missing"
            )
            sink = await _play(stage, "one", _audio(1))
            assert sink.outcome == _END, f"the end came as {sink.outcome!r}"
            assert sink.chunks, "audio went in and none came out"
            rates = {chunk.sample_rate for chunk in sink.chunks}
            assert rates == {stage.sample_rate}, (
                f"chunks say {rates}, the stage {stage.sample_rate}"
            )

    _run(check)


def ends_without_audio(make: Callable[[], AudioStage]) -> None:
    """A request may end before its first chunk."""

    async def check() -> None:
        async with _running(make) as stage:
            sink = await _play(stage, "empty", [])
            assert sink.outcome == _END, f"the end came as {sink.outcome!r}"

    _run(check)


def gives_the_same_in_any_chunks(make: Callable[[], AudioStage]) -> None:
    """How audio is cut into chunks is the decoder's affair and must not be heard."""

    async def check() -> None:
        whole = np.concatenate(_audio(1))
        async with _running(make) as stage:
            expected = (await _play(stage, "whole", [whole])).pcm
            for size in (1, 997, 4800):
                pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
                if size == 1:  # some thousand calls would say no more
                    pieces = [*pieces[:50], whole[50:]]
                pcm = (await _play(stage, f"by-{size}", pieces)).pcm
                assert len(pcm) == len(expected), f"{size} samples a chunk give another length"
                worst = float(np.abs(pcm - expected).max(initial=0.0))
                assert worst <= 1e-4, f"{size} samples a chunk sound otherwise: {worst:.2g}"

    _run(check)


def keeps_requests_apart(make: Callable[[], AudioStage]) -> None:
    """Two requests whose chunks alternate get what each gets alone."""

    async def check() -> None:
        first, second = _audio(1), _audio(2)
        async with _running(make) as stage:
            alone = [(await _play(stage, n, a)).pcm for n, a in (("a", first), ("b", second))]
            sinks = [_Sink("c"), _Sink("d")]
            entries = [stage.open(sink.request_id, sink) for sink in sinks]
            for index, pair in enumerate(zip(first, second, strict=True)):
                for sink, entry, pcm in zip(sinks, entries, pair, strict=True):
                    entry.on_chunk(_chunk(sink.request_id, index, pcm))
                    await asyncio.sleep(0)
            for sink, entry, expected in zip(sinks, entries, alone, strict=True):
                entry.on_end(_END)
                await sink.ended()
                assert np.array_equal(sink.pcm, expected), "interleaved requests change each other"

    _run(check)


def passes_errors_on(make: Callable[[], AudioStage]) -> None:
    """What failed a request before this stage reaches its caller, once and unchanged."""

    async def check() -> None:
        async with _running(make) as stage:
            sink = _Sink("r")
            entry = stage.open("r", sink)
            entry.on_chunk(_chunk("r", 0, _audio(1)[0]))
            error = DecoderError("on purpose")
            entry.on_error(error)
            await sink.ended()
            assert sink.outcome is error, f"the error came as {sink.outcome!r}"

    _run(check)


def is_silent_once_dropped(make: Callable[[], AudioStage]) -> None:
    """After ``drop`` the sink hears nothing; ``release`` returns; unknown ids are fine."""

    async def check() -> None:
        async with _running(make) as stage:
            sink = _Sink("r")
            entry = stage.open("r", sink)
            entry.on_chunk(_chunk("r", 0, _audio(1)[0]))
            stage.drop("r")
            heard = len(sink.chunks)
            await _soon(stage.release("r"), "release() of a dropped request does not return")
            await asyncio.sleep(_LATE_SECONDS)
            assert len(sink.chunks) == heard, "a chunk came after drop()"
            assert sink.outcome is None, "an end came after drop()"
            stage.drop("r")
            stage.drop("never-opened")
            await _soon(stage.release("never-opened"), "release() of an unknown id does not return")
            outcome = (await _play(stage, "next", _audio(1))).outcome
            assert outcome == _END, f"the end of the request after a dropped one is {outcome!r}"

    _run(check)


def waits_for_open_requests_when_draining(make: Callable[[], AudioStage]) -> None:
    """``drain`` returns when the open requests are over, and no new one is taken meanwhile."""

    async def check() -> None:
        async with _running(make) as stage:
            sink = _Sink("r")
            entry = stage.open("r", sink)
            draining = asyncio.ensure_future(stage.drain())
            await asyncio.sleep(0.05)
            assert not draining.done(), "drain() returned while a request was open"
            try:
                stage.open("late", _Sink("late"))
            except StageClosed:
                pass
            else:
                raise AssertionError("a draining stage must refuse requests with StageClosed")
            entry.on_chunk(_chunk("r", 0, _audio(1)[0]))
            entry.on_end(_END)
            await sink.ended()
            await _soon(draining, "drain() does not return after the last request")

    _run(check)


AUDIO_STAGE_CONTRACT: Final = (
    *STAGE_CONTRACT,
    *contract(
        passes_audio_on_in_order,
        ends_without_audio,
        gives_the_same_in_any_chunks,
        keeps_requests_apart,
        passes_errors_on,
        is_silent_once_dropped,
        waits_for_open_requests_when_draining,
    ),
)
"""Checks of an :class:`~omnistage.AudioStage`, those of any stage included.

Each takes what makes the stage, in a running loop, and feeds it mono audio at 24 kHz.
"""


class _Sink:
    """Hears one request's audio, and complains as soon as it comes otherwise than promised."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.chunks: list[AudioChunk] = []
        self.outcome: Terminal | OmniStageError | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._over = asyncio.Event()
        self._complaint: str | None = None

    @property
    def pcm(self) -> Pcm:
        return np.concatenate([np.zeros(0, np.float32), *(chunk.pcm for chunk in self.chunks)])

    def on_chunk(self, chunk: AudioChunk) -> None:
        self._check_thread("on_chunk")
        if self.outcome is not None:
            self._complain("a chunk came after the end")
        elif chunk.index != len(self.chunks):
            self._complain(f"chunk {chunk.index} came where {len(self.chunks)} was due")
        elif chunk.request_id != self.request_id:
            self._complain(f"a chunk of {chunk.request_id} came to {self.request_id}")
        elif chunk.decoder != _DECODER:
            self._complain(f"chunk.decoder came as {chunk.decoder!r}, it went in as {_DECODER!r}")
        elif chunk.pcm.dtype != np.float32 or chunk.pcm.ndim != 1 or not len(chunk.pcm):
            self._complain(f"a chunk is {chunk.pcm.dtype} {list(chunk.pcm.shape)}")
        elif not np.isfinite(chunk.pcm).all():
            self._complain("a chunk has samples that are not finite")
        self.chunks.append(chunk)

    def on_end(self, terminal: Terminal) -> None:
        self._check_thread("on_end")
        self._finish(terminal)

    def on_error(self, error: OmniStageError) -> None:
        self._check_thread("on_error")
        self._finish(error)

    async def ended(self) -> None:
        """Return when the request has ended, once and as promised."""
        await _soon(self._over.wait(), f"request {self.request_id} does not end")
        await asyncio.sleep(_LATE_SECONDS)  # for what must not come any more
        assert self._complaint is None, self._complaint

    def _finish(self, outcome: Terminal | OmniStageError) -> None:
        if self.outcome is not None:
            self._complain("a second end came")
        self.outcome = outcome
        self._wake()

    def _check_thread(self, what: str) -> None:
        if threading.get_ident() != self._thread:
            self._complain(f"{what} was called from another thread than the event loop's")

    def _complain(self, what: str) -> None:
        # Not raised here: that would be the stage's to handle.
        self._complaint = self._complaint or what
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: so late that nobody listens
            self._loop.call_soon_threadsafe(self._over.set)


def _chunk(request_id: str, index: int, pcm: Pcm) -> AudioChunk:
    return AudioChunk(request_id, index, pcm, _RATE, _DECODER)


def _audio(seed: int) -> list[Pcm]:
    """Half a second of noise in chunks of growing size."""
    random = np.random.default_rng(seed)
    sizes = (1200, 1800, 2400, 3000, 3600)
    return [(random.standard_normal(size) * 0.1).astype(np.float32) for size in sizes]


async def _play(stage: AudioStage, request_id: str, pieces: Sequence[Pcm]) -> _Sink:
    sink = _Sink(request_id)
    entry: AudioSink = stage.open(request_id, sink)
    for index, pcm in enumerate(pieces):
        entry.on_chunk(_chunk(request_id, index, pcm))
    entry.on_end(_END)
    await sink.ended()
    return sink


@asynccontextmanager
async def _running(make: Callable[[], _S]) -> AsyncIterator[_S]:
    stage = make()
    await _soon(stage.start(), "start() does not return")
    serving = asyncio.ensure_future(stage.serve())
    await asyncio.sleep(0)
    assert not serving.done(), "serve() must run until it is cancelled"
    try:
        yield stage
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        await _soon(stage.aclose(), "aclose() does not return")
        await _soon(stage.aclose(), "a second aclose() does not return")
    assert serving.cancelled(), f"serve() ended otherwise than cancelled: {serving!r}"


async def _soon(waiting: Any, complaint: str) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            await waiting
    except TimeoutError as error:
        raise AssertionError(f"{complaint} within {_SECONDS:g} s") from error


def _run(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(check())

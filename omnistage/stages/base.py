"""What a stage is: the life that all have in common, and what each kind takes and gives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omnistage.errors import StageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.errors import OmniStageError
    from omnistage.request import AudioChunk, StageInput, StageRequest, Terminal, Usage


@runtime_checkable
class Stage(Protocol):
    """A part of a pipeline with a life of its own.

    ``start`` is called once and returns when the stage can take requests; ``serve`` then runs
    beside the others until it is cancelled, and its error ends the pipeline; ``drain`` refuses new
    requests and returns when the running ones are over; ``aclose`` gives everything back, whatever
    happened before, and may be called twice.

    Attributes:
        name: Names the stage in errors, logs and metrics.
    """

    name: str

    async def start(self) -> None:
        """Come up.

        Raises:
            StartupError: The stage cannot serve; nothing is left behind.
        """
        ...

    async def serve(self) -> None:
        """Run until cancelled."""
        ...

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        ...

    async def aclose(self) -> None:
        """Release every process, thread, socket and file. Idempotent."""
        ...


class AudioSink(Protocol):
    """Who receives one request's audio; called on the event loop, must not block.

    Chunks come in order; then ``on_end`` or ``on_error`` is called once, and nothing after it.
    """

    def on_chunk(self, chunk: AudioChunk) -> None:
        """The next piece of audio."""
        ...

    def on_end(self, terminal: Terminal) -> None:
        """All audio has been given."""
        ...

    def on_error(self, error: OmniStageError) -> None:
        """The request failed on its way here."""
        ...


class PacedSink(AudioSink, Protocol):
    """A sink that says how far its reader is behind, so that a decoder can wait for it."""

    @property
    def unread_seconds(self) -> float:
        """Audio that it was given and that nobody has read."""
        ...


class TextSink(Protocol):
    """Who receives one request's text; called on the event loop, must not block."""

    def write(self, piece: str) -> None:
        """The next piece of it, of one character or more."""
        ...

    def end(self) -> None:
        """All of it has been written."""
        ...


@runtime_checkable
class AudioStage(Stage, Protocol):
    """A stage behind a decoder: audio in, audio out.

    An error that it raises while it handles a request fails that request; one from ``serve`` ends
    the pipeline. What it was given last it must end in bounded time.
    """

    @property
    def sample_rate(self) -> int:
        """Samples a second of the audio it gives, known once it is started."""
        ...

    def open(self, request_id: str, sink: AudioSink) -> AudioSink:
        """Expect a request.

        Args:
            request_id: Internal id.
            sink: Receives this stage's audio of the request, then its end or an error, each as it
                came or as this stage makes it.

        Returns:
            What the stage before this one gives its audio to.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request: its sink is not called again. Idempotent, unknown ids are fine."""
        ...

    async def release(self, request_id: str) -> None:
        """Return when nothing of a dropped request is in the stage's hands any more."""
        ...


class RunningRequest(Protocol):
    """A request that an AR stage has taken."""

    async def abort(self) -> None:
        """Abort, and return when the AR stage has let go of it. Idempotent.

        Raises:
            DeadlineExceeded: It has not in time.
        """
        ...

    def fail(self, error: OmniStageError) -> None:
        """Report ``error`` instead of the result, and abort.

        After the end of a request with ``more``, it says that no other continues it.
        """
        ...


@runtime_checkable
class AutoregressiveStage(Stage, Protocol):
    """What a pipeline asks of its AR stage: vLLM's, or a scripted one.

    It may say more of itself, the latter two once it is started: ``has_text``, whether its requests
    write text; ``row_keys``, the keys of the tensors that its updates carry, so that a decoder that
    takes others is refused; ``io``, a :class:`~omnistage.config.ModelIO` that a stage behind it, or
    before it, must fit.

    Attributes:
        model_name: Names the model in metrics.
        publishers: Endpoints of its publishers, known once it is started.
    """

    model_name: str
    publishers: list[str]

    def __len__(self) -> int:
        """Requests that it runs."""
        ...

    @property
    def closed(self) -> StageClosed | None:
        """Why the stage takes no requests; None while it does."""
        ...

    async def split(self, asked: StageInput) -> Sequence[StageInput]:
        """The requests that a submission becomes, one after the other; mostly itself alone.

        With ``by_sentence`` it is called for each sentence, and may leave that out.

        Raises:
            InvalidRequest: It cannot be served.
        """
        ...

    def submit(
        self, request: StageRequest, *, on_done: Callable[[Usage | OmniStageError], None]
    ) -> RunningRequest:
        """Start a request, whose updates are published to its consumers.

        Args:
            request: What to run.
            on_done: Called once on the event loop, with the usage or with what went wrong.

        Raises:
            StageClosed: The stage takes no requests.
        """
        ...

    async def ended(self) -> None:
        """Return when the stage can serve nobody any more, because its engine has died."""
        ...


async def serve(stages: Sequence[Stage]) -> None:
    """Serve stages beside one another until cancelled, or until the first of them fails.

    Raises:
        StageClosed: One's ``serve`` has returned.
        Exception: What one raised.
    """
    serving = [asyncio.create_task(stage.serve(), name=stage.name) for stage in stages]
    try:
        (done, *_), _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        await done
        raise StageClosed("a stage's serve() has returned", stage=done.get_name())
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` is done, and be cancelled only then."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError

"""Speech for programs without an event loop: one runs in a thread behind a plain object."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from omnistage.errors import StageClosed, UnsupportedEnvironment
from omnistage.pipeline import Pipeline

if TYPE_CHECKING:
    from types import TracebackType

    from omnistage.speech import Speech


def speak(text: str, *, preset: str = "talker", **options: Any) -> Speech:
    """Speak one text, engine start and stop included; :class:`Speaker` keeps the engine.

    Args:
        text: What to say.
        preset: The preset that says it.
        options: Those of :meth:`Pipeline.submit`.

    Returns:
        All of its audio; ``.save("out.wav")`` writes it.

    Raises:
        OmniStageError: What starting the pipeline or reading the stream raises.
        UnsupportedEnvironment: There is a running event loop, which this would block.
    """
    with Speaker(preset) as speaker:
        return speaker.speak(text, **options)


class Speaker:
    """A pipeline for synchronous code: enter it once, speak any number of texts.

    It may be used by several threads at once; their texts are spoken concurrently. One that is
    never left ends, with a ResourceWarning, once the main thread and the one that entered it are
    over. It belongs to the process that entered it: in a fork of that, it is not running.

    Args:
        preset: The preset that speaks.
        changes: Fields of its AR stage's configuration to replace.

    Raises:
        ConfigError: An unknown preset or field.
    """

    def __init__(self, preset: str = "talker", /, **changes: Any) -> None:
        self._pipeline = Pipeline.from_preset(preset, **changes)
        self._host: _Host | None = None

    def __enter__(self) -> Self:
        _refuse_event_loop()
        host = _Host(self._pipeline)
        host.start()
        self._host = host
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.stop()

    def speak(self, text: str, **options: Any) -> Speech:
        """Speak one text and return when its last sample is there.

        Args:
            text: What to say.
            options: Those of :meth:`Pipeline.submit`.

        Raises:
            OmniStageError: What reading the stream raises.
            StageClosed: The speaker is not entered, or another process has entered it.
            UnsupportedEnvironment: There is a running event loop, which this would block.
        """
        _refuse_event_loop()
        if self._host is None:
            raise StageClosed("the speaker is not running; use it as `with`")
        return self._host.speak(text, options)


class _Host:
    """A running pipeline, with the event loop and the thread that it runs in."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.entered_by = threading.current_thread()
        self._process = os.getpid()
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._calls: set[Future[Speech]] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        # No daemon: the interpreter must wait until the pipeline is closed.
        self._thread = threading.Thread(target=self._run, name="omnistage-speaker", daemon=False)

    def start(self) -> None:
        """Return when the pipeline takes requests."""
        _running.add(self)
        try:
            self._thread.start()
        except BaseException:
            _running.remove(self)
            raise
        try:
            self._started.result()
        except BaseException:
            self._interrupt()
            self._thread.join()
            raise

    def stop(self) -> None:
        """Close the pipeline, and return when nothing of it is left."""
        if os.getpid() != self._process:
            return  # a fork has neither the thread nor the engine
        self._close()
        self._thread.join()
        self._ended.result()

    def abandon(self) -> None:
        """Close the pipeline because nobody can do it any more."""
        if not self._close():
            return
        warnings.warn(
            "a Speaker was never left; it ends with the program. Use it as `with`",
            ResourceWarning,
            stacklevel=2,
        )

    def join(self) -> None:
        """Return when nothing of the pipeline is left."""
        self._thread.join()

    def speak(self, text: str, options: dict[str, Any]) -> Speech:
        """See :meth:`Speaker.speak`."""
        if os.getpid() != self._process:
            raise StageClosed(
                "the speaker runs in the process that entered it, not in a fork of that; enter one "
                "of your own"
            )
        with self._lock:
            if self._closed or self._loop is None:
                raise StageClosed("the speaker was left")
            call = asyncio.run_coroutine_threadsafe(self._speak(text, options), self._loop)
            self._calls.add(call)
        try:
            return call.result()
        finally:
            call.cancel()  # for who is interrupted while waiting
            with self._lock:
                self._calls.discard(call)

    def _close(self) -> bool:
        """Have the loop close the pipeline; whether that is news."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
            return True

    def _interrupt(self) -> None:
        """Give up a start."""
        with self._lock:
            self._closed = True
            if self._loop is not None and self._serving is not None:
                self._loop.call_soon_threadsafe(self._serving.cancel)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._finish(error)
        else:
            self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        _running.remove(self)
        for waiting in (self._started, self._ended):
            if waiting.done():
                continue
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)

    async def _serve(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        try:
            async with self._pipeline:
                self._started.set_result(None)
                await self._stop.wait()
        finally:
            with self._lock:
                self._closed, self._loop = True, None
                calls = [asyncio.wrap_future(call) for call in self._calls]
            # The pipeline is closed and each has its error, but has yet to hear it.
            await asyncio.gather(*calls, return_exceptions=True)

    async def _speak(self, text: str, options: dict[str, Any]) -> Speech:
        async with self._pipeline.submit(text, **options) as stream:
            return await stream.collect()


class _Running:
    """The hosts of this process, and a thread that ends those which outlive the program.

    asyncio's and anyio's worker threads are no daemons, so that the interpreter would wait for
    those of a pipeline before it calls what :mod:`atexit` knows: too late to close it there.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: a fork has none of the threads, and a lock that may be held."""
        self._lock = threading.Lock()
        self._hosts: set[_Host] = set()
        self._watching = False

    def add(self, host: _Host) -> None:
        """Watch over a host that is about to run."""
        with self._lock:
            if not self._watching:
                threading.Thread(target=self._watch, name="omnistage-exit", daemon=True).start()
                self._watching = True
            self._hosts.add(host)

    def remove(self, host: _Host) -> None:
        """It has ended."""
        with self._lock:
            self._hosts.discard(host)

    def _watch(self) -> None:
        threading.main_thread().join()
        while True:
            with self._lock:
                hosts = tuple(self._hosts)
                if not hosts:
                    self._watching = False
                    return
            for host in hosts:
                if not host.entered_by.daemon:  # a daemon's end is the interpreter's
                    host.entered_by.join()
                with suppress(ResourceWarning):  # turned into an error, it has nobody to go to
                    host.abandon()
                host.join()


_running: Final = _Running()
os.register_at_fork(after_in_child=_running.forget)


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UnsupportedEnvironment(
        "this call would block the running event loop; use omnistage.Pipeline there"
    )

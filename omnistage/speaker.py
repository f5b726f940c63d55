"""Speech for programs without an event loop: one runs in a thread behind a plain object."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

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

    It may be used by several threads at once; their texts are spoken concurrently.

    Args:
        preset: The preset that speaks.
        changes: Fields of its AR stage's configuration to replace.

    Raises:
        ConfigError: An unknown preset or field.
    """

    def __init__(self, preset: str = "talker", /, **changes: Any) -> None:
        self._pipeline = Pipeline.from_preset(preset, **changes)
        self._portal: BlockingPortal | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        _refuse_event_loop()
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(self._pipeline))
            self._open = stack.pop_all()
        self._portal = portal
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._portal = None
        self._open.close()

    def speak(self, text: str, **options: Any) -> Speech:
        """Speak one text and return when its last sample is there.

        Args:
            text: What to say.
            options: Those of :meth:`Pipeline.submit`.

        Raises:
            OmniStageError: What reading the stream raises.
            StageClosed: The speaker is not entered.
            UnsupportedEnvironment: There is a running event loop, which this would block.
        """
        _refuse_event_loop()
        if self._portal is None:
            raise StageClosed("the speaker is not running; use it as `with`")
        speech: Speech = self._portal.call(self._speak, text, options)
        return speech

    async def _speak(self, text: str, options: dict[str, Any]) -> Speech:
        async with self._pipeline.submit(text, **options) as stream:
            return await stream.collect()


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UnsupportedEnvironment(
        "this call would block the running event loop; use omnistage.Pipeline there"
    )

"""One request in the AR stage: the task that runs it, its abort, its outcome."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from omnistage.errors import OmniStageError, ServerError, StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.request import StageRequest, Usage

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What a request needs of its AR stage.

    Attributes:
        name: The stage's name.
    """

    name: str

    async def run(self, request: StageRequest, generation: int) -> Usage:
        """Run a request to its end; cancelling it aborts it."""
        ...

    async def release(self, request_id: str) -> None:
        """Return when an aborted request is held nowhere any more."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a request that is over."""
        ...


class ARRequest:
    """A request that an AR stage is running, in a task of its own.

    It is cancelled once and by asyncio's own means: vLLM aborts in its ``except CancelledError``,
    and a cancel scope would cancel that again.
    """

    def __init__(
        self,
        stage: Runner,
        request: StageRequest,
        generation: int,
        on_done: Callable[[Usage | OmniStageError], None],
    ) -> None:
        self.request_id = request.request_id
        self._stage = stage
        self._on_done = on_done
        self._error: OmniStageError | None = None
        self._abort_failure: ServerError | None = None
        self._cancelled = False
        self._releasing: asyncio.Future[None] | None = None
        self._task = asyncio.get_running_loop().create_task(
            stage.run(request, generation), name=f"omnistage-ar-{request.request_id}"
        )
        self._task.add_done_callback(self._finished)

    async def abort(self) -> None:
        """Abort, and return when scheduler, processor and transport have let go. Idempotent.

        Raises:
            DeadlineExceeded: They have not in time.
            ServerError: The abort itself failed.
        """
        self._cancel()
        await asyncio.wait([self._task])
        if self._abort_failure is not None:
            raise self._abort_failure
        if self._cancelled:
            self._releasing = self._releasing or asyncio.ensure_future(
                self._stage.release(self.request_id)
            )
            # Shielded: who cancels one waiting abort does not take it away from another.
            await asyncio.shield(self._releasing)

    def fail(self, error: OmniStageError) -> None:
        """Report ``error`` instead of the result, and abort."""
        if self._error is None:
            self._error = error
        self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel()

    def _finished(self, task: asyncio.Task[Usage]) -> None:
        self._stage.forget(self.request_id)
        error = None if task.cancelled() else task.exception()
        if self._cancelled and error is not None and not isinstance(error, OmniStageError):
            log.error("request %s: aborting failed", self.request_id, exc_info=error)
            self._abort_failure = ServerError(
                f"aborting failed: {type(error).__name__}: {error}",
                request_id=self.request_id,
                stage=self._stage.name,
            )
            self._abort_failure.__cause__ = error
        if self._error is not None:
            outcome: Usage | OmniStageError = self._error
        elif task.cancelled():
            outcome = StreamClosed("the request was aborted", request_id=self.request_id)
        elif error is None:
            outcome = task.result()
        elif isinstance(error, OmniStageError):
            error.request_id = error.request_id or self.request_id
            error.stage = error.stage or self._stage.name
            outcome = error
        elif self._abort_failure is not None:
            outcome = self._abort_failure
        else:
            log.error("request %s failed", self.request_id, exc_info=error)
            outcome = ServerError(f"{type(error).__name__}: {error}", request_id=self.request_id)
            outcome.__cause__ = error
        self._on_done(outcome)

"""The AR stage: vLLM's ``AsyncLLM`` with our scheduler, submitted to, aborted and watched.

Sampled ids do not come back through here: they leave the engine process for the decoder directly,
and only the end of a request, with its counts, returns over vLLM's own path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from itertools import count
from typing import TYPE_CHECKING, Final

from anyio import to_thread

from omnistage.adapters.input import (
    InputAdapter,
    TextInput,
    check_consumable,
    conditioning,
    split,
)
from omnistage.adapters.processor import ChunkProcessor
from omnistage.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    OmniStageError,
    StageClosed,
    StartupError,
    error_of_kind,
)
from omnistage.stages.admission import admission_record
from omnistage.stages.ar_request import ARRequest
from omnistage.stages.base import settled
from omnistage.stages.environment import check_environment
from omnistage.transport.control import ControlServer
from omnistage.transport.endpoints import check_bind
from omnistage.transport.keys import load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vllm.v1.engine.async_llm import AsyncLLM

    from omnistage.config import ARStageConfig, ModelIO
    from omnistage.core.engine import Engine
    from omnistage.core.wiring import WiredConfig
    from omnistage.request import StageInput, StageRequest, Usage
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Failed

log = logging.getLogger(__name__)

_RELEASE_SECONDS: Final = 10.0


class ARStage:
    """Runs an autoregressive model in vLLM and has its updates published to their consumers.

    Args:
        config: What to run.
        endpoints: This process's sockets.
        llm: An engine that runs already, attached to this stage's configuration; it stays.

    Raises:
        ConfigError: A bind address that is not allowed, keys that cannot be used, or a processor or
            an input adapter that is none.
    """

    def __init__(
        self, config: ARStageConfig, endpoints: Endpoints, *, llm: AsyncLLM | None = None
    ) -> None:
        self.name = config.name
        self.model_name = config.served_name
        self._config = config
        self._endpoints = endpoints
        self._llm = llm
        check_bind(config.bind, load_keys(config.keys))
        if not isinstance(config.processor, ChunkProcessor):
            raise ConfigError(f"{config.processor!r} is no ChunkProcessor", stage=config.name)
        if not isinstance(config.input_adapter, InputAdapter | None):
            raise ConfigError(f"{config.input_adapter!r} is no InputAdapter", stage=config.name)
        self.input_adapter: InputAdapter = config.input_adapter or TextInput()
        self._generations = count()
        self._running: dict[str, ARRequest] = {}
        self._engine: Engine | None = None
        self._adopted: WiredConfig | None = None
        self._control: ControlServer | None = None
        self._watched: list[int] = []
        self._closed: StageClosed | None = None
        self._idle = asyncio.Event()
        self._dead = asyncio.Event()
        self.publishers: list[str] = []
        # Known once it is started: the keys of its updates' tensors, and what its model is.
        self.row_keys: frozenset[str] | None = None
        self.io: ModelIO | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def closed(self) -> StageClosed | None:
        """Why the stage takes no requests; None while it does."""
        closed = self._closed
        # A new one each time: a raised error keeps a traceback, and with it frames, for ever.
        return None if closed is None else type(closed)(closed.message, stage=closed.stage)

    async def start(self) -> None:
        """Start vLLM and wait until each engine core's publisher has said hello.

        Raises:
            UnsupportedEnvironment: Platform, Python or vLLM out of range.
            ConfigError: Engine arguments that vLLM refuses, or an input adapter that cannot start.
            StartupError: The engine did not come up.
        """
        check_environment()
        try:
            engine = await (self._start_engine() if self._llm is None else self._adopt(self._llm))
            if self._control is None:
                raise StageClosed("the stage is closed", stage=self.name)
            hellos = await self._control.wait_for_hellos(
                engine.ranks, within=self._config.startup_timeout
            )
            await self.input_adapter.start()
        except BaseException:
            await self.aclose()
            raise
        self.publishers = [hello.data_endpoint for hello in hellos]
        self.row_keys, self.io = engine.row_keys, engine.io
        for hello in hellos:
            self._watch(hello.pid)
        if self._llm is None:
            await engine.note_processes([hello.pid for hello in hellos])
        log.info("stage %s started: %s", self.name, self._config.model)

    async def split(self, asked: StageInput) -> Sequence[StageInput]:
        """See :meth:`AutoregressiveStage.split`: what the input adapter makes of it."""
        return split(self.input_adapter, asked)

    def submit(
        self, request: StageRequest, *, on_done: Callable[[Usage | OmniStageError], None]
    ) -> ARRequest:
        """Start a request.

        Args:
            request: What to run.
            on_done: Called once on the event loop, with the usage or with what went wrong.

        Returns:
            A handle to abort it.

        Raises:
            StageClosed: The stage is stopping, stopped or dead.
        """
        if (closed := self.closed) is not None:
            raise closed
        if self._engine is None:
            raise StageClosed("the stage is not started", stage=self.name)
        running = ARRequest(self, request, next(self._generations), on_done)
        self._running[request.request_id] = running
        return running

    async def release(self, request_id: str) -> None:
        """Return when scheduler, processor and transport have let go of an aborted request.

        Raises:
            DeadlineExceeded: They have not within 10 s; the log says so too.
        """
        engine, control = self._engine, self._control
        if engine is None or control is None or self._dead.is_set():
            return
        waits = [
            asyncio.ensure_future(_let_go(engine, control, request_id)),
            # An engine that dies meanwhile answers nothing, and holds nothing any more.
            asyncio.ensure_future(self._dead.wait()),
        ]
        try:
            done, _ = await asyncio.wait(
                waits, timeout=_RELEASE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            log.error("request %s: the engine did not let go of it in time", request_id)
            raise DeadlineExceeded(
                f"the engine did not let go of the request within {_RELEASE_SECONDS:g} s",
                request_id=request_id,
                stage=self.name,
            )
        if waits[0] in done and (error := waits[0].exception()) and not self._dead.is_set():
            log.error("request %s: aborting failed", request_id, exc_info=error)
            raise error

    async def serve(self) -> None:
        """Nothing to do: the event loop's own callbacks watch the engine and the control socket."""
        await asyncio.Event().wait()

    async def ended(self) -> None:
        """Return when an engine process has died."""
        await self._dead.wait()

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._close(StageClosed("the stage is draining and takes no requests", stage=self.name))
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Abort what is running and stop vLLM. Idempotent."""
        self._close(StageClosed("the stage is closed", stage=self.name))
        aborts = [request.abort() for request in list(self._running.values())]
        # What an abort raises is logged there; the engine is stopped in any case.
        await asyncio.gather(*aborts, return_exceptions=True)
        self._unwatch()
        engine, self._engine = self._engine, None
        if engine is not None and self._llm is None:
            await engine.shutdown()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._adopted is not None:
            self._adopted.served, self._adopted = False, None

    async def _start_engine(self) -> Engine:
        """Start vLLM in a thread: importing it and loading a model blocks for seconds."""
        # Always ipc: vLLM starts its engine cores on this host, and a fixed port is for the data.
        self._control = ControlServer(self._endpoints, self._on_failed)
        starting = asyncio.ensure_future(
            to_thread.run_sync(
                _start_engine, self._config, self._control.endpoint, self._endpoints.directory
            )
        )
        try:
            self._engine = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread cannot be stopped; without waiting for it, its engine would never be. It is
            # waited for however often we are cancelled.
            try:
                await settled(starting)
            finally:
                if starting.exception() is None:
                    self._engine = starting.result()
            raise
        return self._engine

    async def _adopt(self, llm: AsyncLLM) -> Engine:
        """Take an engine that runs already; who made it has imported vLLM."""
        from omnistage.core.engine import adopt

        self._engine, self._adopted = adopt(llm, self._config)
        self._control = ControlServer(
            self._endpoints,
            self._on_failed,
            bind=self._adopted.omnistage.publisher.control,
            hellos=self._adopted.hellos,
        )
        return self._engine

    async def run(self, request: StageRequest, generation: int) -> Usage:
        """Run one request to its end; cancelling it aborts it in vLLM.

        Raises:
            InvalidRequest: The input adapter or vLLM refused it.
            EngineDead: The engine died.
            ServerError: vLLM failed it.
        """
        engine_input = await self.input_adapter.adapt(request.input)
        if not request.final_stage:
            check_consumable(engine_input.sampling)
        engine = self._engine
        if engine is None:
            raise self.closed or StageClosed("the stage is not started", stage=self.name)
        try:
            return await engine.generate(
                engine_input,
                admission_record(request, generation),
                request_id=request.request_id,
                priority=request.input.priority,
                trace_headers=request.input.trace_headers,
                conditioning=conditioning(request.input, engine_input),
                consumed=bool(request.consumers) and not request.final_stage,
                text=request.text,
            )
        except EngineDead:
            # Perhaps known here first: a worker died, and its engine core is still ending.
            self._on_death()
            raise
        except asyncio.CancelledError:
            # vLLM's generate() aborts by itself only once the request was added.
            await engine.abort(request.request_id)
            raise

    def _death(self, request_id: str | None = None) -> EngineDead:
        return EngineDead(
            "vLLM's engine process is gone; its log says why. Start the pipeline again",
            request_id=request_id,
            stage=self.name,
        )

    def _on_failed(self, message: Failed) -> None:
        # A record that could not be read is reported under vLLM's id: ours and 8 hex digits.
        ours = message.request_id.rpartition("-")[0]
        running = self._running.get(message.request_id) or self._running.get(ours)
        if running is None:
            log.warning("engine side failed request %s: %s", message.request_id, message.error)
            return
        error = error_of_kind(message.kind, message.error)
        error.request_id, error.stage = running.request_id, self.name
        running.fail(error)

    def _watch(self, pid: int) -> None:
        """Notice the end of an engine core at once, also while it is idle."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death()
            return
        self._watched.append(fd)
        asyncio.get_running_loop().add_reader(fd, self._on_death)

    def _unwatch(self) -> None:
        for fd in self._watched:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        self._watched.clear()

    def _on_death(self) -> None:
        if self._dead.is_set():
            return
        self._unwatch()
        log.error("stage %s: an engine process ended", self.name)
        self._close(self._death())
        self._dead.set()
        for running in list(self._running.values()):
            running.fail(self._death(running.request_id))

    def _close(self, reason: StageClosed) -> None:
        if self._closed is None or isinstance(reason, EngineDead):
            self._closed = reason

    def forget(self, request_id: str) -> None:
        """Drop a request that is over; called by its own handle."""
        self._running.pop(request_id, None)
        if not self._running:
            self._idle.set()


async def _let_go(engine: Engine, control: ControlServer, request_id: str) -> None:
    """Wait for the scheduler's abort first: the publisher then has all that it will ever get."""
    await engine.settle()
    await control.release(request_id)


def _start_engine(config: ARStageConfig, control: str, directory: Path) -> Engine:
    """Import vLLM and start it, in the calling thread; one engine at a time.

    A start sets environment variables of the process, and may fork it while another imports.
    """
    with _starting:
        try:
            from omnistage.core.engine import start_engine
        except Exception as error:
            raise StartupError(
                f"vLLM cannot be imported: {error}; `omnistage check` says what to do",
                stage=config.name,
            ) from error

        return start_engine(config, control, directory)


_starting: Final = threading.Lock()

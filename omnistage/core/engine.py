"""vLLM as the AR stage sees it: start it with our scheduler, speak its types, translate its errors.

The one module of this package that runs in the application's process. It imports vllm when it is
imported, which takes seconds, so the AR stage imports it in a thread when it starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import weakref
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from omnistage.adapters.processor import check_keys
from omnistage.config import AUDIO, ModelIO
from omnistage.core.collector import EXTRA_ARG
from omnistage.core.processes import Processes, stop
from omnistage.core.prompts import Prompts
from omnistage.core.row_source import give_payloads, with_rows
from omnistage.core.sampling import Sampling
from omnistage.core.wiring import WiredConfig, Wiring, payload_keys, wiring_of
from omnistage.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    OmniStageError,
    ServerError,
    StartupError,
)
from omnistage.request import FinishReason, Payload, Usage
from omnistage.transport.endpoints import check_bind, ipc_endpoint
from omnistage.transport.keys import load_keys
from omnistage.transport.owner import end_with
from omnistage.transport.publisher import PublisherConfig
from omnistage.worker.payload import WANTS_PAYLOAD

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from vllm.outputs import RequestOutput

    from omnistage.adapters.input import EngineInput
    from omnistage.config import ARStageConfig
    from omnistage.stages.base import TextSink

log = logging.getLogger(__name__)


class Engine:
    """A running ``AsyncLLM`` whose scheduler publishes.

    Args:
        llm: The engine, started with our scheduler and wiring.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._processes: Processes | None = None
        config = llm.vllm_config
        self.ranks: int = config.parallel_config.data_parallel_size
        wiring = wiring_of(config)
        self._gives_rows = wiring is not None and bool(wiring.takes_rows)
        self.row_keys = None if wiring is None else wiring.row_keys  # of its updates' tensors
        self._keeps_prefixes = wiring is not None and wiring.prefix_rows
        self._prompts = Prompts(llm, None if wiring is None else wiring.contract)
        self._sampling = Sampling(llm, self._prompts)
        if not self._sampling.ends:
            log.warning("the model declares no end id that it can sample; requests must say theirs")

    @property
    def io(self) -> ModelIO:
        """What its model takes and gives beside ids."""
        model = self._llm.model_config
        return ModelIO(
            has_tokenizer=self._llm.renderer.tokenizer is not None,
            hidden_size=model.get_hidden_size(),
            embedding_size=model.get_inputs_embeds_size() if model.enable_prompt_embeds else None,
        )

    async def generate(
        self,
        engine_input: EngineInput,
        record: bytes | None,
        *,
        request_id: str,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        conditioning: Mapping[str, Payload] | None = None,
        consumed: bool = True,
        text: TextSink | None = None,
    ) -> Usage:
        """Run one request to its end. Cancelling it needs :meth:`abort` as well.

        Args:
            engine_input: Prompt and sampling fields.
            record: The scheduler's admission record.
            request_id: Internal id.
            priority: vLLM's request priority.
            trace_headers: W3C trace context.
            conditioning: Tensors for the model.
            consumed: Whether anybody receives what it emits.
            text: Receives its text as it is sampled.

        Raises:
            InvalidRequest: vLLM, or its model, refuses what was asked.
            EngineDead: The engine died.
            ServerError: vLLM failed the request.
        """
        sampling = engine_input.sampling
        extra: dict[str, Any] = {} if record is None else {EXTRA_ARG: record}
        if self._gives_rows and consumed:
            extra[WANTS_PAYLOAD] = True
            if not self._keeps_prefixes:
                sampling = with_rows(sampling)
        params = self._sampling.params(sampling, extra or None, text=text is not None)
        try:
            tensors, salt = await self._prompts.pack(conditioning or {})
            if tensors:
                params.extra_args = {**extra, **tensors}
            prompt = await self._prompts.render(engine_input.prompt, salt)
            outputs = self._llm.generate(
                prompt, params, request_id, priority=priority, trace_headers=trace_headers
            )
            usage = await _read(outputs, text)
        except Exception as error:
            raise translate(error) from error
        if isinstance(engine_input.prompt, Payload):  # of which vLLM gives no ids back
            usage = replace(usage, prompt_tokens=engine_input.prompt.shape[0])
        if usage.finish_reason in {FinishReason.ABORT, FinishReason.ERROR}:
            # Said here, not left to a terminal: one that never reached the scheduler has none.
            raise ServerError(f"vLLM ended the request with {usage.finish_reason!s}")
        return usage

    async def abort(self, request_id: str) -> None:
        """Abort a request, whether or not vLLM knows it (yet)."""
        await self._llm.abort(request_id)

    async def settle(self) -> None:
        """Return when the engine cores have handled everything sent to them before.

        Raises:
            EngineDead: The engine died.
        """
        try:
            # Any call will do: vLLM handles calls and aborts in the order they were sent.
            await self._llm.is_sleeping()
        except Exception as error:
            raise translate(error) from error

    async def note_processes(self, cores: Sequence[int]) -> None:
        """Note what the engine cores of these process ids have started."""
        self._processes = await to_thread.run_sync(Processes, cores)

    async def shutdown(self) -> None:
        """Stop vLLM's processes and return when they are gone."""
        await stop(self._llm, self._processes)


def start_engine(config: ARStageConfig, control: str, directory: Path) -> Engine:
    """Create vLLM's configuration, attach the wiring, start the engine; blocks for seconds.

    Args:
        config: What to run.
        control: Endpoint of the AR stage's control socket.
        directory: Private directory for ipc paths.

    Raises:
        ConfigError: vLLM refuses the engine arguments.
        StartupError: The engine did not come up.
    """
    try:
        args = AsyncEngineArgs(model=config.model, **config.engine_args)
        vllm_config = args.create_engine_config()
    except (TypeError, ValueError, OSError, VLLMClientError) as error:
        raise ConfigError(
            f"vLLM refuses the engine arguments: {error}", stage=config.name
        ) from error
    _wire(vllm_config, config, control, directory)
    try:
        with _variables(config.start_method, directory):
            llm = AsyncLLM.from_vllm_config(
                vllm_config,
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )
    except Exception as error:
        raise StartupError(f"vLLM did not start: {error}", stage=config.name) from error
    return Engine(llm)


def _wire(vllm_config: Any, config: ARStageConfig, control: str, directory: Path) -> None:
    """Have an engine of this configuration run our scheduler and publish."""
    ranks = vllm_config.parallel_config.data_parallel_size
    if ranks > 1 and config.bind.startswith("tcp://") and not config.bind.endswith(":0"):
        raise ConfigError(
            f"{ranks} data-parallel ranks cannot share {config.bind}; use port 0", stage=config.name
        )
    if not isinstance(vllm_config.additional_config or {}, dict):
        raise ConfigError("additional_config must be a dict, to which it adds", stage=config.name)
    contract, takes_rows = give_payloads(vllm_config, config)
    check_keys(config.processor, payload_keys(contract), contract.model)
    scheduler = vllm_config.scheduler_config
    kind = "OmniARAsyncScheduler" if scheduler.async_scheduling else "OmniARScheduler"
    scheduler.scheduler_cls = f"omnistage.core.scheduler.{kind}"
    publisher = PublisherConfig(
        bind=config.bind,
        directory=str(directory),
        control=control,
        owner_pid=os.getpid(),
        keys=load_keys(config.keys),
    )
    wiring = Wiring(
        stage=config.name,
        channels={AUDIO: config.processor},
        publisher=publisher,
        takes_rows=takes_rows,
        contract=contract,
        prefix_rows=bool(takes_rows) and config.prefix_rows,
    )
    items: Any = vllm_config.additional_config or {}
    vllm_config.additional_config = WiredConfig(items, wiring)


def attach(vllm_config: Any, config: ARStageConfig) -> None:
    """See :func:`omnistage.attach`."""
    if config.engine_args or config.start_method is not None:
        raise ConfigError(
            "engine_args and start_method describe an engine that the stage starts; set them where "
            "you make yours",
            stage=config.name,
        )
    if vllm_config.scheduler_config.scheduler_cls is not None:
        raise ConfigError(
            "the engine's configuration has a scheduler_cls, which must be omnistage's",
            stage=config.name,
        )
    check_bind(config.bind, load_keys(config.keys))
    directory = Path(tempfile.mkdtemp(prefix="omni-"))
    removal = weakref.finalize(vllm_config, _remove, directory, os.getpid())
    try:
        _wire(vllm_config, config, ipc_endpoint(directory), directory)
    except ConfigError:
        removal()
        raise


def adopt(llm: AsyncLLM, config: ARStageConfig) -> tuple[Engine, WiredConfig]:
    """An engine that runs already, and what it was attached with.

    Raises:
        ConfigError: Its configuration was not attached to this stage, or it serves another one.
    """
    vllm_config = getattr(llm, "vllm_config", None)
    wired: Any = getattr(vllm_config, "additional_config", None)
    wiring = wiring_of(vllm_config)
    if wiring is None or wiring.channels.get(AUDIO) is not config.processor:
        raise ConfigError(
            "this AsyncLLM was not made for this stage: give its VllmConfig and the same "
            "ARStageConfig to omnistage.attach() before AsyncLLM.from_vllm_config()",
            stage=config.name,
        )
    if wired.served:
        raise ConfigError(
            "this AsyncLLM serves a pipeline already; leave that one first", stage=config.name
        )
    wired.served = True
    return Engine(llm), wired


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in an engine that was forked with it
        shutil.rmtree(directory, ignore_errors=True)


def translate(error: Exception) -> OmniStageError:
    """What vLLM raised as one of our errors: the client branch for a request it refused."""
    if isinstance(error, OmniStageError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineDead(
            "vLLM's engine process is gone; its log says why. Start the pipeline again"
        )
    cause = error.__cause__ or error
    if isinstance(cause, VLLMClientError | ValueError | TypeError):
        return InvalidRequest(str(cause), parameter=getattr(cause, "parameter", None))
    return ServerError(f"vLLM failed the request: {type(cause).__name__}: {cause}")


async def _read(outputs: AsyncGenerator[RequestOutput], text: TextSink | None) -> Usage:
    """Read a request to its end: one output, or with a sink for its text one a step."""
    final = None
    tokens, pieces = 0, []
    async with aclosing(outputs):
        async for final in outputs:
            if text is not None:
                tokens += len(final.outputs[0].token_ids)
                if piece := final.outputs[0].text:
                    pieces.append(piece)
                    text.write(piece)
    if final is None:
        raise ServerError("vLLM ended the request without output")
    usage = _usage(final)
    if text is not None:
        usage = replace(usage, output_tokens=tokens, text="".join(pieces) or None)
    return usage


def _usage(output: RequestOutput) -> Usage:
    completion = output.outputs[0]
    return Usage(
        prompt_tokens=len(output.prompt_token_ids or ()),
        output_tokens=len(completion.token_ids),
        finish_reason=FinishReason(str(completion.finish_reason)),
        text=completion.text or None,
    )


def _detach() -> None:
    """In a forked engine: end with the application it came from, and have no part in its signals.

    asyncio learns of signals through a socket that the fork shares, so that the SIGTERM which ends
    the engine would look like one for the application. And a terminal sends Ctrl-C to the whole
    process group: the application is to end the engine in order, not to find it dead.
    """
    if _forking:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # asyncio's does nothing; vLLM sets its own
        os.setpgid(0, 0)
        end_with(*_forking[0])


_forking: list[tuple[int, str]] = []  # the owner's pid and directory, while it starts an engine
os.register_at_fork(after_in_child=_detach)


@contextlib.contextmanager
def _variables(method: str | None, directory: Path) -> Iterator[None]:
    """Set the environment variables that vLLM and its processes read while they start.

    The start method only after ``create_engine_config``: the CPU platform writes its own choice.
    And vLLM's own socket files go into our directory, because it never removes them.
    """
    changes = {"VLLM_WORKER_MULTIPROC_METHOD": method}
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        changes["VLLM_RPC_BASE_PATH"] = str(directory)
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    if method == "fork":
        _forking.append((os.getpid(), str(directory)))
    try:
        yield
    finally:
        _forking.clear()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

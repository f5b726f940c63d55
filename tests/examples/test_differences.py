"""What docs/differences.md says of the application's side of vLLM, where no other test says it.

A stand-in takes vLLM's place: what matters is what it is asked for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from omnistage.adapters.input import EngineInput
from omnistage.adapters.processor import TokenUpdates
from omnistage.config import ARStageConfig
from omnistage.core import engine as module
from omnistage.core.engine import Engine
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.handover import HandOver
from omnistage.transport.publisher import Outgoing, Publisher, PublisherConfig

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
SOCKETS = "VLLM_RPC_BASE_PATH"


class StandIn:
    """An ``AsyncLLM`` that samples one id and notes what it was asked for."""

    output_handler = None

    def __init__(self, *, chunked_prefill: bool = False) -> None:
        self.asked: list[SamplingParams] = []
        self.patience: float | None = None
        self.model_config = SimpleNamespace(
            is_encoder_decoder=False,
            get_vocab_size=lambda: 100,
            try_get_generation_config=lambda: {"eos_token_id": 2},
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked_prefill),
        )
        self.renderer = self
        self.tokenizer = None

    async def render_cmpl_async(self, prompts: list[Any]) -> list[Any]:
        return prompts

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.asked.append(params)
        completion = SimpleNamespace(token_ids=[7], finish_reason="stop", text="")
        yield SimpleNamespace(outputs=[completion], prompt_token_ids=[1, 2])

    def shutdown(self, timeout: float) -> None:
        self.patience = timeout


def engine_of(stand_in: Any) -> Engine:
    return Engine(stand_in)


async def ask(stand_in: StandIn, **sampling: Any) -> SamplingParams:
    given = EngineInput(prompt=[1, 2], sampling=sampling)
    usage = await engine_of(stand_in).generate(given, b"record", request_id="r")
    assert (usage.prompt_tokens, usage.output_tokens) == (2, 1)
    return stand_in.asked[-1]


async def test_requests_run_final_only_without_detokenization_and_without_a_default_length() -> (
    None
):
    params = await ask(StandIn())
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.detokenize is False
    assert params.max_tokens is None
    assert params.extra_args == {"omnistage": b"record"}
    params = await ask(StandIn(), detokenize=True, max_tokens=5)
    assert (params.detokenize, params.max_tokens) == (True, 5)


async def test_a_seed_is_refused_on_cpu_where_prefills_are_split() -> None:
    assert (await ask(StandIn(), seed=3)).seed == 3
    stand_in = StandIn(chunked_prefill=True)
    with pytest.raises(InvalidRequest, match="enable_chunked_prefill=False") as raised:
        await ask(stand_in, seed=3)
    assert raised.value.parameter == "seed"
    assert stand_in.asked == []
    assert (await ask(stand_in)).seed is None


async def test_vllm_has_15_seconds_to_shut_down() -> None:
    stand_in = StandIn()
    await engine_of(stand_in).shutdown()
    assert stand_in.patience == 15.0


@pytest.mark.parametrize("before", [None, "spawn"])
def test_the_start_method_is_set_for_the_start_alone(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(METHOD, raising=False)
    if before is not None:
        monkeypatch.setenv(METHOD, before)
    monkeypatch.delenv(SOCKETS, raising=False)
    with module._variables("fork", Path("/private")):
        assert os.environ[METHOD] == "fork"
        assert os.environ[SOCKETS] == "/private"
    assert os.environ.get(METHOD) == before
    assert SOCKETS not in os.environ
    monkeypatch.setenv(SOCKETS, "/mine")
    with module._variables(None, Path("/private")):
        assert os.environ.get(METHOD) == before
        assert os.environ[SOCKETS] == "/mine"
    assert os.environ[SOCKETS] == "/mine"


@pytest.mark.parametrize("name", ["scheduler_cls", "model"])
def test_the_ar_stage_chooses_the_scheduler(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine_args.{name} is set by the AR stage"):
        ARStageConfig(model="m", processor=TokenUpdates(), engine_args={name: "another"})


class Failing:
    """A publisher's source that raises when it is asked for messages."""

    def __init__(self) -> None:
        self.steps: HandOver[None] = HandOver(1)

    def fileno(self) -> int:
        return self.steps.fileno()

    def messages(self) -> Iterable[Outgoing]:
        raise RuntimeError("on purpose")

    def failures(self) -> Iterator[Any]:
        return iter(())

    def undelivered(self, topic: bytes, error: Exception) -> None: ...

    def release(self, request_id: str) -> None: ...


def test_an_engine_whose_publisher_fails_stops() -> None:
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    source = Failing()
    try:
        with Endpoints() as endpoints:
            config = PublisherConfig(
                bind="ipc",
                directory=str(endpoints.directory),
                control=endpoints.ipc(),
                owner_pid=os.getpid(),
            )
            publisher = Publisher(source, config)
            publisher.start()
            source.steps.put(None)
            assert stopped.wait(30)
            assert publisher.close(30)
    finally:
        signal.signal(signal.SIGTERM, before)
        source.steps.close()

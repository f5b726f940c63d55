"""vLLM's own worker with a payload on its output, where a request of the step wants one.

It knows requests that want rows and requests that do not: no stage, no channel, no endpoint. The
model runner is vLLM's and untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import WorkerBase

from omnistage.worker.build import Taken, build, take
from omnistage.worker.contract import PAYLOAD_OPTIONS
from omnistage.worker.hooks import ModelHooks
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE
from omnistage.worker.prefixes import Prefixes
from omnistage.worker.reader import read_executed, read_prepared
from omnistage.worker.requests import WorkerRequests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PayloadWorkerMixin(WorkerBase):
    """Attaches what a step computed to its output, for the requests that want it.

    While no request of a step wants any, and the model has no work of its own, it does nothing. A
    payload that cannot be built costs the requests concerned, and the engine lives.
    """

    _omni_hooks: ModelHooks
    _omni_requests: WorkerRequests
    _omni_scheduled: SchedulerOutput | None = None
    _omni_later = False
    _omni_prefixes: Prefixes | None = None

    def load_model(self, **options: Any) -> None:
        """Load the model as vLLM does, and look at what it declares."""
        super().load_model(**options)
        self._omni_hooks = ModelHooks(self.get_model(), self._omni_option("include_hidden"))
        contract = self._omni_hooks.contract
        self._omni_requests = WorkerRequests(
            all_of_them=contract.preprocesses or contract.postprocesses
        )
        if contract.preprocesses:
            self._omni_hooks.before_forward(self._preprocess)
        # Only there is an output waited for in a thread of its own.
        parallel, scheduler = self.vllm_config.parallel_config, self.vllm_config.scheduler_config
        self._omni_later = (
            bool(scheduler.async_scheduling) and parallel.distributed_executor_backend == "mp"
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Make the KV cache as vLLM does, and what keeps the rows beside it if they are kept."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if self._omni_option("prefix_rows") and _is_output_rank():
            self._omni_prefixes = Prefixes(self.vllm_config, kv_cache_config)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Execute as vLLM does, after noting which requests want what, and which are over."""
        self._omni_requests.note(scheduler_output)
        if self._omni_prefixes is not None:
            self._omni_prefixes.follow(scheduler_output)
        self._omni_scheduled = scheduler_output
        try:
            return super().execute_model(scheduler_output)
        finally:
            self._omni_scheduled = None

    def sample_tokens(
        self, grammar_output: GrammarOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample as vLLM does, and attach what its forward pass computed."""
        taken = self._take()
        output = super().sample_tokens(grammar_output)
        return output if taken is None else with_payload(output, taken)

    def _omni_option(self, name: str) -> Any:
        """What the stage's configuration says of payloads."""
        configured: Any = self.vllm_config.additional_config
        return configured.get(PAYLOAD_OPTIONS, {}).get(name)

    def _preprocess(self) -> None:
        if self._omni_scheduled is not None:  # None in a warm-up
            batch = read_prepared(self.model_runner, self._omni_scheduled)
            self._omni_hooks.preprocess(self._omni_requests.spans(batch))

    def _take(self) -> Taken | None:
        """What is to be sent of the step that is about to be sampled from."""
        hooks, requests, prefixes = self._omni_hooks, self._omni_requests, self._omni_prefixes
        outputs = hooks.take_outputs()
        keeps = prefixes is not None
        if not (requests.wanted or hooks.contract.postprocesses or keeps):
            return None
        # Before sampling, which clears it.
        executed = read_executed(self.model_runner)
        if executed is None:
            return None
        if hooks.contract.postprocesses:
            # On every rank that has hidden states, so that they stay in step.
            hooks.postprocess(requests.spans(executed), executed.hidden, outputs)
        if not _is_output_rank() or not (requests.wanted or keeps):
            return None
        return take(
            executed,
            outputs,
            hooks.contract,
            requests.wanted,
            later=self._omni_later,
            prefixes=None if prefixes is None else prefixes.step(executed.request_ids),
        )


class PayloadOutput(AsyncModelRunnerOutput):
    """An output of vLLM's that is not there yet, and what was taken of its step.

    ``get_output`` runs in a thread of its own under the multiprocess executor.
    """

    def __init__(self, output: AsyncModelRunnerOutput, taken: Taken) -> None:
        self._output = output
        self._taken = taken

    def get_output(self) -> ModelRunnerOutput:
        """Wait for vLLM's output, and attach the payload."""
        return _attach(self._output.get_output(), self._taken)

    def get_kv_connector_output(self) -> Any:
        """VLLM 0.33 asks an output for it before the output is there."""
        return self._output.get_kv_connector_output()  # type: ignore[attr-defined]


def with_payload(
    output: ModelRunnerOutput | AsyncModelRunnerOutput, taken: Taken
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """The same output with a payload on it, now or once it is there."""
    if isinstance(output, AsyncModelRunnerOutput):
        return PayloadOutput(output, taken)
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        return output  # one object for all steps of a process, without a request in it
    return _attach(output, taken)


def _attach(output: ModelRunnerOutput, taken: Taken) -> ModelRunnerOutput:
    payload = build(taken, output.req_ids)
    if payload.places:
        setattr(output, PAYLOAD_ATTRIBUTE, payload)
    return output


def _is_output_rank() -> bool:
    """Whether the executor takes this rank's output: the first of the last pipeline stage."""
    return bool(get_pp_group().is_last_rank and get_tp_group().is_first_rank)

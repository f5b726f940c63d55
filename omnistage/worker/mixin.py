"""vLLM's own worker with a payload on its output, where a request of the step wants one.

It knows requests that want rows and requests that do not: no stage, no channel, no endpoint. The
model runner and the model are vLLM's and untouched.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import WorkerBase

from omnistage.worker.build import build_payload
from omnistage.worker.payload import PAYLOAD_ATTRIBUTE, WANTS_PAYLOAD
from omnistage.worker.reader import read_executed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from omnistage.worker.payload import StepPayload
    from omnistage.worker.reader import Executed

log = logging.getLogger(__name__)


class PayloadWorkerMixin(WorkerBase):
    """Attaches rows of hidden states to a step's output, for the requests that want them.

    While no request of a step wants any, it does nothing. A payload that cannot be built is logged
    and left out: the scheduler then fails the requests that lack rows, and the engine lives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._omni_wanted: set[str] = set()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Execute as vLLM does, after noting which requests want rows, and which are over."""
        wanted = self._omni_wanted
        if wanted:
            wanted -= scheduler_output.finished_req_ids
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and (params.extra_args or {}).get(WANTS_PAYLOAD) is True:
                wanted.add(new.req_id)
        return super().execute_model(scheduler_output)

    def sample_tokens(
        self, grammar_output: GrammarOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample as vLLM does, and attach the rows that its forward pass computed."""
        if not self._omni_wanted or not _is_output_rank():
            return super().sample_tokens(grammar_output)
        # Before: sampling clears it. It holds on to the tensors, which nothing reuses until the
        # next execution.
        executed = read_executed(self.model_runner)
        payload = None if executed is None else self._build(executed)
        output = super().sample_tokens(grammar_output)
        return output if payload is None else with_payload(output, payload)

    def _build(self, executed: Executed) -> StepPayload | None:
        try:
            return build_payload(executed, self._omni_wanted)
        except Exception:
            log.exception("the rows of a step could not be taken; their requests will fail")
            return None


class PayloadOutput(AsyncModelRunnerOutput):
    """An output of vLLM's that is not there yet, and the payload that it will carry."""

    def __init__(self, output: AsyncModelRunnerOutput, payload: StepPayload) -> None:
        self._output = output
        self._payload = payload

    def get_output(self) -> ModelRunnerOutput:
        """Wait for vLLM's output, and attach the payload."""
        output = self._output.get_output()
        setattr(output, PAYLOAD_ATTRIBUTE, self._payload)
        return output

    def get_kv_connector_output(self) -> Any:
        """VLLM 0.33 asks an output for it before the output is there."""
        return self._output.get_kv_connector_output()  # type: ignore[attr-defined]


def with_payload(
    output: ModelRunnerOutput | AsyncModelRunnerOutput, payload: StepPayload
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """The same output with a payload on it, now or once it is there."""
    if isinstance(output, AsyncModelRunnerOutput):
        return PayloadOutput(output, payload)
    if output is EMPTY_MODEL_RUNNER_OUTPUT:
        return output  # one object for all steps of a process, without a request in it
    setattr(output, PAYLOAD_ATTRIBUTE, payload)
    return output


def _is_output_rank() -> bool:
    """Whether the executor takes this rank's output: the first of the last pipeline stage."""
    return bool(get_pp_group().is_last_rank and get_tp_group().is_first_rank)

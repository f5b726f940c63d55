"""vLLM's schedulers with omnistage's output adapter attached: they read outputs and decide nothing.

Every override calls ``super()``; what happens around the call is the step collector's work, and an
error there costs a request its consumer, never the engine its life.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from omnistage.core.collector import StepCollector
from omnistage.core.output_adapter import OutputAdapter
from omnistage.core.wiring import wiring_of
from omnistage.transport.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

log = logging.getLogger(__name__)

# vLLM kills an engine that takes longer than 5 s to stop, and its workers' own end comes out of
# these.
_CLOSE_SECONDS: Final = 1.0


class OmniARSchedulerMixin(Scheduler):
    """Attaches the output adapter to one of vLLM's schedulers.

    Without an AR stage's wiring in ``additional_config``, or where ``__init__`` never ran, it is
    the base class and nothing else.
    """

    _omni_collector: StepCollector | None = None
    _omni_publisher: Publisher | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wiring = wiring_of(self.vllm_config)
        if wiring is None:
            return
        takes_tokens = {
            name: bool(processor.requires_token_updates)
            for name, processor in wiring.channels.items()
        }
        self._omni_collector = StepCollector(
            takes_tokens,
            wiring.handover_limit,
            log_stats=self.log_stats,
            takes_rows=wiring.takes_rows,
            only_prefill=wiring.contract is not None and wiring.contract.only_prefill,
        )
        adapter = OutputAdapter(wiring.channels, self._omni_collector.steps)
        self._omni_publisher = Publisher(
            adapter,
            wiring.publisher,
            dp_index=self.vllm_config.parallel_config.data_parallel_index,
        )
        self._omni_publisher.start()

    def add_request(self, request: Request) -> None:
        """Queue a request as vLLM does, and note its consumers if it is new."""
        collector = self._omni_collector
        new = collector is not None and request.request_id not in self.requests
        super().add_request(request)
        if collector is not None and new:
            try:
                collector.admit(request)
            except Exception:
                log.exception(
                    "request %s could not be admitted; it has no consumer", request.request_id
                )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update from a step as vLLM does, and hand what it brought to the publisher thread."""
        collector = self._omni_collector
        if collector is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        collector.begin(model_runner_output)
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        except BaseException:
            collector.abandon()
            raise
        try:
            collector.collect(outputs, self.requests, scheduler_output.preempted_req_ids)
        except Exception:
            log.exception("a step could not be collected; its requests will miss updates")
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish requests as vLLM does, and give each that was served its terminal."""
        finished = super().finish_requests(request_ids, finished_status)
        if self._omni_collector is not None and finished:
            try:
                self._omni_collector.finished(finished)
            except Exception:
                log.exception("finished requests could not be reported")
        return finished

    def shutdown(self) -> None:
        """Shut down as vLLM does, after the last updates have left."""
        publisher, collector = self._omni_publisher, self._omni_collector
        self._omni_publisher = self._omni_collector = None
        if publisher is not None and collector is not None:
            if publisher.close(_CLOSE_SECONDS):
                collector.steps.close()
            else:
                log.warning("the publisher did not stop within %g s", _CLOSE_SECONDS)
        super().shutdown()


class OmniARScheduler(OmniARSchedulerMixin):
    """vLLM's ``Scheduler`` with the output adapter attached."""


class OmniARAsyncScheduler(OmniARSchedulerMixin, AsyncScheduler):
    """vLLM's ``AsyncScheduler`` with the output adapter attached."""

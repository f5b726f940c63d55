"""vLLM's CPU worker with payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from omnistage.worker.mixin import PayloadWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import CompilationTimes


class OmniCPUWorker(PayloadWorkerMixin, CPUWorker):
    """vLLM's ``CPUWorker`` that attaches what its requests want, and runs pipeline parallel."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up as vLLM does, after making what its CPU runner lacks.

        A pipeline stage that is not the first receives into buffers that runner V1 makes in its
        dummy run, which an eager engine on CPU never does: its first step would end the engine.
        """
        runner: Any = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return super().compile_or_warm_up_model()

"""vLLM's CPU worker with payloads."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from omnistage.worker.mixin import PayloadWorkerMixin


class OmniCPUWorker(PayloadWorkerMixin, CPUWorker):
    """vLLM's ``CPUWorker`` that attaches the rows its requests want."""

"""vLLM's GPU worker with payloads; unproven on a GPU."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from omnistage.worker.mixin import PayloadWorkerMixin


class OmniGPUWorker(PayloadWorkerMixin, Worker):
    """vLLM's ``Worker`` that attaches the rows its requests want."""

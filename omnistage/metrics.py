"""Prometheus metrics of a pipeline: their names, labels and buckets, and when each is counted.

The names follow vLLM-Omni's, under a prefix of our own: vLLM removes every collector whose name
starts with its own when an engine starts.
"""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

PREFIX: Final = "omnistage:"
LABELS: Final = ("model_name", "stage", "replica")

_LATENCY: Final = (0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_FACTOR: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 4.0)
_AUDIO: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_UNDERRUN: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """The metric families, once a registry.

    Args:
        registry: Where they are registered; prometheus_client's own by default.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.running = Gauge(
            f"{PREFIX}num_requests_running", "Requests in the pipeline.", LABELS, registry=registry
        )
        self.success = Counter(
            f"{PREFIX}requests_success",
            "Requests that gave all their audio.",
            (*LABELS, "finished_reason"),
            registry=registry,
        )
        self.failure = Counter(
            f"{PREFIX}requests_failure",
            "Requests that ended in an error, by its class.",
            (*LABELS, "error"),
            registry=registry,
        )
        self.latency = self._histogram(
            registry, "e2e_request_latency_s", "Seconds from a request to its last chunk.", _LATENCY
        )
        self.first_audio = self._histogram(
            registry, "audio_ttfp_s", "Seconds from a request to its first chunk.", _LATENCY
        )
        self.factor = self._histogram(
            registry, "audio_rtf", "Seconds of generation a second of audio.", _FACTOR
        )
        self.duration = self._histogram(
            registry, "audio_duration_s", "Seconds of audio a request.", _AUDIO
        )
        self.underrun = self._histogram(
            registry,
            "audio_underrun_s",
            "Seconds a player that starts with the first chunk would have waited for later ones.",
            _UNDERRUN,
        )

    @staticmethod
    def _histogram(
        registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"{PREFIX}{name}", text, LABELS, buckets=buckets, registry=registry)


_default: list[Metrics] = []


def default_metrics() -> Metrics:
    """The families in prometheus_client's own registry, made at the first call."""
    if not _default:
        _default.append(Metrics())
    return _default[0]


class RequestMetrics:
    """What one request adds; the clock starts when it is made.

    Args:
        metrics: The families.
        model: The AR stage's model.
        stage: The stage that gives the audio.
    """

    def __init__(self, metrics: Metrics, model: str, stage: str) -> None:
        self._metrics = metrics
        self._labels = (model, stage, "0")
        self._began = time.monotonic()
        self._audio = 0.0
        self._played_at: float | None = None  # when a player will have played all it got
        self._underrun = 0.0
        metrics.running.labels(*self._labels).inc()

    def chunk(self, seconds: float) -> None:
        """A chunk of so much audio is there."""
        now = time.monotonic()
        if self._played_at is None:
            self._metrics.first_audio.labels(*self._labels).observe(now - self._began)
            self._played_at = now
        self._underrun += max(0.0, now - self._played_at)
        self._played_at = max(now, self._played_at) + seconds
        self._audio += seconds

    def success(self, reason: str) -> None:
        """All audio was given."""
        took = time.monotonic() - self._began
        metrics, labels = self._metrics, self._labels
        metrics.running.labels(*labels).dec()
        metrics.success.labels(*labels, reason).inc()
        metrics.latency.labels(*labels).observe(took)
        metrics.duration.labels(*labels).observe(self._audio)
        metrics.underrun.labels(*labels).observe(self._underrun)
        if self._audio:
            metrics.factor.labels(*labels).observe(took / self._audio)

    def failure(self, error: str) -> None:
        """The request ended in an error of this class."""
        self._metrics.running.labels(*self._labels).dec()
        self._metrics.failure.labels(*self._labels, error).inc()

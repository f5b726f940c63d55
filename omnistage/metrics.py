"""Prometheus metrics of a pipeline: their names, labels and buckets, and when each is counted.

The names follow vLLM-Omni's, under a prefix of our own: vLLM removes every collector whose name
starts with its own when an engine starts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate
from threading import RLock
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

PREFIX: Final = "omnistage:"
LABELS: Final = ("model_name", "stage", "replica")

_LATENCY: Final = (0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_FACTOR: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 4.0)
_AUDIO: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_HOP_NS: Final = tuple(
    int(seconds * 1e9)
    for seconds in (5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0)
)
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

        self.service_running = Gauge(
            f"{PREFIX}service_requests_running",
            "Requests that a service has.",
            ("stage",),
            registry=registry,
        )
        self.service_ended = Counter(
            f"{PREFIX}service_requests_ended",
            "Requests that a service is done with, by how.",
            ("stage", "outcome"),
            registry=registry,
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


class Depths(NamedTuple):
    """What waits in a subscription now."""

    unread: int  # updates that wait for the reader
    reordering: int  # messages that wait for an earlier one
    credit: int  # messages that a publisher may still send


class ServiceMetrics:
    """What a stage that is a service counts.

    Args:
        metrics: The families.
        stage: The stage's name.
    """

    def __init__(self, metrics: Metrics, stage: str) -> None:
        self._running = metrics.service_running.labels(stage)
        self._ended = metrics.service_ended
        self._stage = stage

    def begun(self) -> None:
        """A request has come."""
        self._running.inc()

    def ended(self, outcome: str) -> None:
        """It is over: ``ok``, ``aborted``, or an error's class."""
        self._running.dec()
        self._ended.labels(self._stage, outcome).inc()


class DeliveryCounts:
    """What one subscription has received: plain numbers, cheap to count with.

    Args:
        channel: The subscription's channel.
        subscriber: Its subscriber id.
        depths: What waits in it; called in whichever thread collects.
    """

    def __init__(self, channel: str, subscriber: str, depths: Callable[[], Depths]) -> None:
        self.channel = channel
        self.subscriber = subscriber
        self.depths = depths
        self.updates = 0
        self.replayed = 0
        self.lost = 0
        self.malformed = 0
        self.hops = [0] * (len(_HOP_NS) + 1)
        self.hop_ns = 0

    def hop(self, ns: int) -> None:
        """Count a message that was so long on its way."""
        self.hops[bisect_left(_HOP_NS, ns)] += 1
        self.hop_ns += ns

    def add(self, other: DeliveryCounts) -> None:
        """Take over what another one has counted."""
        for name in ("updates", "replayed", "lost", "malformed", "hop_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.hops = [a + b for a, b in zip(self.hops, other.hops, strict=True)]


class DeliveryMetrics(Collector):
    """The delivery families: counters by channel, and what waits by open subscription.

    The counters keep what closed subscriptions have counted; a subscriber id, of which there may be
    any number, is a label only for as long as it is open.

    Args:
        registry: Where they are registered; prometheus_client's own by default.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        # Not for the counting: for who is open while a thread collects. A finalizer may come
        # between, in the same thread.
        self._lock = RLock()
        self._open: list[DeliveryCounts] = []
        self._closed: dict[str, DeliveryCounts] = {}
        registry.register(self)

    def add(self, counts: DeliveryCounts) -> None:
        """Show an open subscription's."""
        with self._lock:
            self._open.append(counts)

    def remove(self, counts: DeliveryCounts) -> None:
        """Keep the numbers of a subscription that is closed, and forget it. Idempotent."""
        with self._lock:
            if counts in self._open:
                self._open.remove(counts)
                self._total(self._closed, counts.channel).add(counts)

    def describe(self) -> Iterable[Metric]:
        """No families yet: what is there is known when it is collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families as they are now; called in any thread."""
        with self._lock:
            open_ones = list(self._open)
            totals: dict[str, DeliveryCounts] = {}
            for counts in (*self._closed.values(), *open_ones):
                self._total(totals, counts.channel).add(counts)
        yield from _counters(totals)
        yield from _depths(open_ones)

    @staticmethod
    def _total(totals: dict[str, DeliveryCounts], channel: str) -> DeliveryCounts:
        return totals.setdefault(channel, DeliveryCounts(channel, "", lambda: Depths(0, 0, 0)))


def _counters(totals: dict[str, DeliveryCounts]) -> Iterator[Metric]:
    for name, text in (
        ("updates", "Updates received."),
        ("replayed", "Messages that came a second time, because the first had not come."),
        ("lost", "Times that updates were lost for good, and requests failed."),
        ("malformed", "Messages that were none."),
    ):
        family = CounterMetricFamily(f"{PREFIX}delivery_{name}", text, labels=("channel",))
        for channel, total in totals.items():
            family.add_metric((channel,), getattr(total, name))
        yield family
    hops = HistogramMetricFamily(
        f"{PREFIX}delivery_hop_s",
        "Seconds from the scheduler's hand-over to the handler, on one host.",
        labels=("channel",),
    )
    bounds = (*(str(ns / 1e9) for ns in _HOP_NS), "+Inf")
    for channel, total in totals.items():
        buckets = list(zip(bounds, accumulate(total.hops), strict=True))
        hops.add_metric((channel,), buckets, total.hop_ns / 1e9)
    yield hops


def _depths(open_ones: list[DeliveryCounts]) -> Iterator[Metric]:
    waiting: dict[tuple[str, str], Depths] = {}
    for counts in open_ones:
        depths, key = counts.depths(), (counts.channel, counts.subscriber)
        if (other := waiting.get(key)) is not None:  # a topic with two readers in this process
            depths = Depths(
                depths.unread + other.unread,
                depths.reordering + other.reordering,
                min(depths.credit, other.credit),
            )
        waiting[key] = depths
    for index, (name, text) in enumerate(
        (
            ("unread", "Updates that wait for the subscription's reader."),
            ("reordering", "Messages that wait for an earlier one."),
            ("credit", "Messages that a publisher may still send before the subscriber stalls."),
        )
    ):
        labels = ("channel", "subscriber")
        family = GaugeMetricFamily(f"{PREFIX}delivery_{name}", text, labels=labels)
        for key, depths in waiting.items():
            family.add_metric(key, depths[index])
        yield family


_delivery: list[DeliveryMetrics] = []


def delivery_metrics() -> DeliveryMetrics:
    """The delivery families in prometheus_client's own registry, made at the first call."""
    if not _delivery:
        _delivery.append(DeliveryMetrics())
    return _delivery[0]

"""What a request adds to the metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from omnistage import metrics as module
from omnistage.config import ARStageConfig
from omnistage.metrics import Metrics, RequestMetrics

LABELS = {"model_name": "m", "stage": "s", "replica": "0"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_finished_request_adds_its_times_once(clock: Clock) -> None:
    registry = CollectorRegistry()
    request = RequestMetrics(Metrics(registry), "m", "s")

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"omnistage:{name}", {**LABELS, **labels})

    assert sample("num_requests_running") == 1
    clock.now += 0.1
    request.chunk(1.0)  # plays until 1.1 s after the start
    clock.now += 0.5
    request.chunk(1.0)  # in time: plays until 2.1 s
    clock.now += 2.0
    request.chunk(1.0)  # half a second late
    request.success("stop")
    assert sample("num_requests_running") == 0
    assert sample("requests_success_total", finished_reason="stop") == 1
    assert sample("audio_ttfp_s_sum") == pytest.approx(0.1)
    assert sample("e2e_request_latency_s_sum") == pytest.approx(2.6)
    assert sample("audio_duration_s_sum") == pytest.approx(3.0)
    assert sample("audio_underrun_s_sum") == pytest.approx(0.5)
    assert sample("audio_rtf_sum") == pytest.approx(2.6 / 3)


def test_a_request_without_audio_has_no_real_time_factor(clock: Clock) -> None:
    registry = CollectorRegistry()
    RequestMetrics(Metrics(registry), "m", "s").success("stop")
    assert registry.get_sample_value("omnistage:audio_rtf_count", LABELS) in (None, 0)


def test_a_failed_request_is_counted_by_its_error(clock: Clock) -> None:
    registry = CollectorRegistry()
    RequestMetrics(Metrics(registry), "m", "s").failure("EngineDead")
    labels = {**LABELS, "error": "EngineDead"}
    assert registry.get_sample_value("omnistage:requests_failure_total", labels) == 1
    assert registry.get_sample_value("omnistage:num_requests_running", LABELS) == 0


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("org/model-3b", None, "model-3b"),
        ("/a/dir/", None, "dir"),
        ("x", "y", "y"),
        ("x", ["z", "y"], "z"),
    ],
)
def test_a_model_is_named_as_vllm_serves_it(model: str, served: object, name: str) -> None:
    arguments = {"served_model_name": served} if served else {}
    config = ARStageConfig(model=model, processor=None, engine_args=arguments)  # type: ignore[arg-type]
    assert config.served_name == name

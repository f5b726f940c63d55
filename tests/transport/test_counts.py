"""What delivery counts, as Prometheus sees it."""

from __future__ import annotations

from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from omnistage import metrics
from omnistage.metrics import DeliveryCounts, DeliveryMetrics, Depths
from omnistage.transport import subscriber as module
from omnistage.transport.endpoints import is_local
from omnistage.transport.retained import CREDIT
from tests.transport.proxy import Faults, proxy
from tests.transport.test_faults import eventually, site
from tests.transport.test_transport import Handler, Site

__all__ = ["site"]  # a fixture


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    delivery = DeliveryMetrics(registry)
    monkeypatch.setattr(module, "delivery_metrics", lambda: delivery)
    return registry


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    labels = {"channel": "audio", **labels}
    return registry.get_sample_value(f"omnistage:delivery_{name}", labels)


async def test_what_comes_is_counted_and_stays_counted(
    site: Site, registry: CollectorRegistry
) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    subscriber = await site.subscriber(handler, "d", endpoint)
    for i in range(20):
        source.send(subscriber.topic, i)
    await handler.wait_for(lambda: len(handler.ids) == 20)

    def check() -> None:
        assert sample(registry, "updates_total") == 20
        assert sample(registry, "hop_s_count") == 20
        assert 0 < (sample(registry, "hop_s_sum") or 0) < 20 * 10
        assert sample(registry, "hop_s_bucket", le="+Inf") == 20
        for name in ("lost", "replayed", "malformed"):
            assert sample(registry, f"{name}_total") == 0

    check()
    await eventually(lambda: sample(registry, "credit", subscriber="d") == CREDIT)
    assert sample(registry, "unread", subscriber="d") == 0
    subscriber.close()
    subscriber.close()
    check()
    assert sample(registry, "credit", subscriber="d") is None


async def test_what_is_repaired_is_counted_as_such(site: Site, registry: CollectorRegistry) -> None:
    source, endpoint = await site.publisher()
    handler = Handler()
    with proxy(site.endpoints, endpoint) as between:
        subscriber = await site.subscriber(handler, "d", between.endpoint)
        between.faults = Faults(drop=1)
        source.send(subscriber.topic, 1)
        await eventually(lambda: between.harmed > 0)
        between.faults = Faults()
        between.silent = True  # so that it stays missing
        for i in range(2, 5):
            source.send(subscriber.topic, i)
        await eventually(lambda: sample(registry, "reordering", subscriber="d") == 3)
        assert sample(registry, "credit", subscriber="d") == CREDIT - 4
        between.silent = False
        await handler.wait_for(lambda: len(handler.ids) == 4)
        assert sample(registry, "replayed_total") == 1
        assert sample(registry, "lost_total") == 0
        subscriber.close()


def test_two_readers_of_one_topic_are_one_line() -> None:
    delivery = DeliveryMetrics(registry := CollectorRegistry())
    for credit in (5, 3):
        delivery.add(DeliveryCounts("audio", "d", partial(Depths, 1, 2, credit)))
    assert sample(registry, "unread", subscriber="d") == 2
    assert sample(registry, "reordering", subscriber="d") == 4
    assert sample(registry, "credit", subscriber="d") == 3


def test_the_families_in_the_default_registry_are_made_once() -> None:
    assert metrics.delivery_metrics() is metrics.delivery_metrics()


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://10.0.0.1:5", False),
        ("tcp://127.0.0.1.example:5", False),
    ],
)
def test_times_are_compared_on_one_host_only(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) == local

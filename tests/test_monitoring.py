"""Metrics and health over real HTTP: what is answered, to whom, and what it costs."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from omnistage import DecoderStageConfig, Pipeline
from omnistage import monitoring as module
from omnistage.errors import ConfigError, StartupError
from omnistage.monitoring import Health, MetricsServer, serve_metrics
from omnistage.testing import FakeDecoder, Script, scripted

WELL = Health(ok=True, reason=None, running=3)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("omnistage:things", "What was counted.", registry=registry).inc(7)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    with serve_metrics("127.0.0.1:0", lambda: WELL, registry=registry) as server:
        yield server
    assert not [t for t in threading.enumerate() if t.name == "omnistage-metrics"]


def ask(server: MetricsServer, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()
    finally:
        connection.close()


def connected(server: MetricsServer) -> socket.socket:
    host, port = server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def send_on(raw: socket.socket, piece: bytes, *, pause: float) -> int:
    """Send until the server has closed, and say how often."""
    for sent in range(1000):
        try:
            raw.sendall(piece)
        except OSError:
            return sent
        time.sleep(pause)
    return 1000


def test_the_metrics_are_what_prometheus_reads(server: MetricsServer) -> None:
    for path in ("/metrics", "/metrics?name[]=x"):
        status, kind, body = ask(server, path)
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        families = text_string_to_metric_families(body.decode())
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        assert samples["omnistage:things_total"] == 7


@pytest.mark.parametrize(
    ("health", "status"), [(WELL, 200), (Health(ok=False, reason="asleep", running=0), 503)]
)
def test_health_is_json_and_its_status_says_it_too(health: Health, status: int) -> None:
    with serve_metrics("0", lambda: health) as server:
        assert server.address.startswith("127.0.0.1:")
        got, kind, body = ask(server, "/health")
    assert (got, kind) == (status, "application/json")
    assert json.loads(body) == {"ok": health.ok, "reason": health.reason, "running": health.running}


def test_a_health_that_raises_is_ill() -> None:
    def raises() -> Health:
        raise RuntimeError("on purpose")

    with serve_metrics("127.0.0.1:0", raises) as server:
        status, _, body = ask(server, "/health")
        assert (status, json.loads(body)["reason"]) == (503, "RuntimeError: on purpose")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/metrics/x", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/health", 405),
        ("HEAD", "/health", 200),
    ],
)
def test_nothing_else_is_served(server: MetricsServer, method: str, path: str, status: int) -> None:
    got, _, body = ask(server, path, method)
    assert got == status
    assert (body == b"") == (method == "HEAD")


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 99 + b"\r\n\r\n", b" \r\n\r\n"]
)
def test_what_is_no_http_is_answered_with_an_error(server: MetricsServer, sent: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(sent)
        assert raw.recv(99).startswith(b"HTTP/1.1 405 ")
    assert ask(server, "/health")[0] == 200


def test_a_request_without_end_is_cut_at_its_limit(server: MetricsServer) -> None:
    with connected(server) as raw:
        assert send_on(raw, b"x" * 65536, pause=0) < 1000
    assert ask(server, "/health")[0] == 200


def test_a_request_that_takes_too_long_is_closed(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    began = time.monotonic()
    with connected(server) as raw:
        send_on(raw, b"G", pause=0.02)
        assert 0.25 < time.monotonic() - began < 5


def test_a_reader_that_reads_nothing_is_closed(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    Counter("large", "x" * 20_000_000, registry=registry)
    with serve_metrics("127.0.0.1:0", lambda: WELL, registry=registry) as server:
        with connected(server) as raw:
            raw.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            end = time.monotonic() + 10
            while not server._open:
                assert time.monotonic() < end
            while server._open:
                assert time.monotonic() < end
        assert ask(server, "/health")[0] == 200


def test_connections_that_say_nothing_keep_nobody_out_and_cost_no_thread(
    server: MetricsServer,
) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    silent = [connected(server) for _ in range(300)]
    for each in silent[-60:]:
        each.sendall(b"GET /metr")
    assert ask(server, "/health")[0] == 200
    assert threading.active_count() == threads
    assert len(server._open) <= module._MAX_CONNECTIONS
    for each in silent:
        each.close()
    end = time.monotonic() + 10
    while server._open or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_many_ask_at_once(server: MetricsServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(server, "/metrics")[0], range(200)))
    assert answers == [200] * 200


def test_nobody_wakes_the_thread_while_nobody_asks(server: MetricsServer) -> None:
    ask(server, "/health")
    time.sleep(0.1)
    status = Path(f"/proc/self/task/{server._thread.native_id}/status")

    def switches() -> str:
        return status.read_text().partition("\nvoluntary_ctxt_switches:")[2]

    before = switches()
    time.sleep(1.5)
    assert switches() == before


def test_closing_does_not_wait_for_those_that_say_nothing() -> None:
    server = serve_metrics("127.0.0.1:0", lambda: WELL)
    with connected(server) as raw:
        raw.sendall(b"GET")
        while not server._open:
            time.sleep(0.005)
        began = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - began < 2
        assert raw.recv(9) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(server)


def test_ipv6_is_in_brackets() -> None:
    with serve_metrics("[::1]:0", lambda: WELL) as server:
        assert server.address.startswith("[::1]:")
        assert ask(server, "/health")[0] == 200


@pytest.mark.parametrize("address", ["", "host", "127.0.0.1:", "127.0.0.1:x", "1:70000", "-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        serve_metrics(address, lambda: WELL)


def test_an_address_that_is_taken_or_elsewhere_is_named(server: MetricsServer) -> None:
    for address in (server.address, "203.0.113.1:0"):
        with pytest.raises(StartupError, match=f"at {address}"):
            serve_metrics(address, lambda: WELL)


async def test_a_pipelines_health_is_told_while_its_event_loop_is_blocked() -> None:
    ar = scripted(Script(ids=[1, 2, 3]))
    async with Pipeline(ar=ar, decoder=DecoderStageConfig(build=FakeDecoder)) as pipeline:
        with serve_metrics("127.0.0.1:0", pipeline.health) as server:
            await pipeline.submit("Hello.").collect()
            answers: list[tuple[int, str, bytes]] = []
            asking = threading.Thread(
                target=lambda: answers.extend(ask(server, p) for p in ("/health", "/metrics"))
            )
            asking.start()
            asking.join()  # blocks the loop
    assert json.loads(answers[0][2]) == {"ok": True, "reason": None, "running": 0}
    assert b'omnistage:requests_success_total{finished_reason="stop"' in answers[1][2]

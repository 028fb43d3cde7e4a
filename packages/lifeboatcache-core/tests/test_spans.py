"""OpenTelemetry spans: only where they are asked for, and never in the way."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache import spans
from lifeboat_cache.interface import Namespace, Outcome, Store, open_block_store
from lifeboat_cache.testing import StoreDriver

NOT_ASKED: list[dict[str, str]] = [
    {},
    {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"},
    {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
    {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4318"},
]


@pytest.mark.parametrize("environ", NOT_ASKED)
def test_nobody_asks(environ: dict[str, str]) -> None:
    assert not spans.asked_for(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_SDK_DISABLED": "false", "OTEL_TRACES_EXPORTER": "console"},
    ],
)
def test_somebody_asks(environ: dict[str, str]) -> None:
    assert spans.asked_for(environ)


class Collector:
    """Takes what an OTLP exporter sends over HTTP."""

    def __init__(self) -> None:
        received: list[bytes] = []
        self.received = received

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/traces"
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """The spans so far, each with what its resource says."""
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        found = []
        for body in list(self.received):
            request = service.ExportTraceServiceRequest.FromString(body)
            for one in request.resource_spans:
                said = {item.key: item.value.string_value for item in one.resource.attributes}
                found += [(said, span) for scope in one.scope_spans for span in scope.spans]
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setattr(spans, "_PAUSE_S", 0.02)
    yield collector
    collector.close()


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Store]]:
    """Opens stores as engines do."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    (home / "lifeboat.yaml").write_text(
        "storage: {fallback_local: {min_free_gb: 0}}\nagent: {autostart: false}\n"
    )
    from lifeboat_cache.config import load_config

    opened: list[Store] = []

    def make() -> Store:
        namespace = Namespace.from_identity({"engine": "test", "model": "spans"})
        opened.append(open_block_store(load_config().config, namespace))
        assert opened[-1].wait_recovered(60)
        return opened[-1]

    yield make
    for store in opened:
        store.close()
    assert spans.spans is None


def until(right: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + 60
    while not (found := right()):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return found


def test_a_collector_is_told_of_lookups_stores_and_loads(
    collector: Collector, open_store: Callable[[], Store]
) -> None:
    store = open_store()
    until(lambda: spans.spans)
    driver = StoreDriver(store)
    before = time.time_ns()
    assert driver.store(range(4)) == [Outcome.OK] * 4
    driver.lookup(range(6))
    assert driver.load([0, 1, 2, 3, 9])[-1] is Outcome.MISSING
    after = time.time_ns()
    store.close()
    found = until(lambda: len(collector.spans()) >= 3 and collector.spans())
    by_name = {span.name: (said, span) for said, span in found}
    assert set(by_name) == {"lifeboat.store", "lifeboat.lookup", "lifeboat.load"}
    for said, span in by_name.values():
        assert said["service.name"] == "lifeboatcache"
        assert before <= span.end_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= after
    facts = {
        name: {one.key: one.value.int_value or one.value.string_value for one in span.attributes}
        for name, (_, span) in by_name.items()
    }
    assert facts["lifeboat.store"] == {
        "lifeboat.target": "fallback_local",
        "lifeboat.blocks": 4,
        "lifeboat.bytes": 4 * driver.size,
        "lifeboat.codec": "raw",
        "lifeboat.outcome.ok": 4,
    }
    assert facts["lifeboat.lookup"] == {"lifeboat.blocks": 6, "lifeboat.hits": 4}
    failed = by_name["lifeboat.load"][1].status
    assert (failed.code, failed.message) == (2, "missing")


def test_the_engines_own_provider_is_used(
    collector: Collector, open_store: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    provider, kept = sdk.TracerProvider(), memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    store = open_store()
    until(lambda: spans.spans)
    StoreDriver(store).store(range(2))
    store.close()
    (span,) = kept.get_finished_spans()
    assert span.name == "lifeboat.store"
    assert not collector.received


def test_a_collector_that_is_not_there_holds_nothing_up(
    collector: Collector, open_store: Callable[[], Store]
) -> None:
    collector.close()
    store = open_store()
    made = until(lambda: spans.spans)
    driver = StoreDriver(store)
    assert driver.store(range(4)) == [Outcome.OK] * 4
    assert driver.load(range(4)) == [Outcome.OK] * 4
    store.close()
    assert spans.spans is None
    assert made.dropped == 0


def test_what_does_not_fit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    gate = threading.Event()

    class Span:
        def set_status(self, _: Any) -> None:
            pass

        def end(self, _: int) -> None:
            pass

    class Tracer:
        def start_span(self, name: str, **_: Any) -> Span:
            gate.wait()
            made.append(name)
            return Span()

    pytest.importorskip("opentelemetry.trace")
    monkeypatch.setattr(spans, "_MOST_WAITING", 5)
    monkeypatch.setattr(spans, "_PAUSE_S", 0.001)
    one = spans.Spans(Tracer())
    for number in range(20):
        one.note(f"lookup {number}", 0.0, {})
    assert one.dropped >= 14
    gate.set()
    one.close()
    assert len(made) + one.dropped == 20


def test_without_opentelemetry_it_is_said_once_and_stores_go_on(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "lifeboat.yaml").write_text(
        "storage: {fallback_local: {min_free_gb: 0}}\nagent: {autostart: false}\n"
    )
    program = """
import logging, sys
sys.modules["opentelemetry"] = None
logging.basicConfig()
from lifeboat_cache import spans
from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Namespace, open_block_store
from lifeboat_cache.testing import StoreDriver
for name in ("first", "second"):
    store = open_block_store(load_config().config, Namespace.from_identity({"model": name}))
    assert store.wait_recovered(60)
    assert all(one.good for one in StoreDriver(store).store(range(3)))
    if name == "first":
        kept = store
assert spans.spans is None
for one in (kept, store):
    one.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "LIFEBOAT_CACHE_HOME": str(home),
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there are none of LifeboatCache") == 1
    assert "opentelemetry-sdk" in done.stderr


def test_a_process_that_is_not_asked_does_not_import_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "lifeboat.yaml").write_text("agent: {autostart: false}\n")
    program = """
import sys
from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Namespace, open_block_store
store = open_block_store(load_config().config, Namespace.from_identity({"model": "m"}))
store.wait_recovered(60)
store.close()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=120,
        env={
            **environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "LIFEBOAT_CACHE_HOME": str(home),
        },
    )

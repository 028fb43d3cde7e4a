"""Metrics of all processes of a home directory, over HTTP."""

from __future__ import annotations

import http.client
import logging
import os
import re
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from lifeboat_cache.agent.caretaker import Caretaker
from lifeboat_cache.agent.wanted import WantedTarget
from lifeboat_cache.config import load_config
from lifeboat_cache.janitor import JanitorReport
from lifeboat_cache.registry import (
    Registration,
    StorePublisher,
    TargetFacts,
    agent_document,
    attach,
)
from lifeboat_cache.registry import prometheus as prometheus_module
from lifeboat_cache.registry.document import TOKEN_COUNTS, store_values
from lifeboat_cache.registry.metrics import METRICS
from lifeboat_cache.registry.prometheus import Exporter, start_exporter
from lifeboat_cache.store.counters import CounterSnapshot
from lifeboat_cache.testing import StoreDriver

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()

Start = Callable[..., Any]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path, start_registry_process: Callable[[str, Path], Any]) -> Start:
    return lambda mode="publish": start_registry_process(mode, home)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def exporter(home: Path, port: int) -> Iterator[Exporter]:
    exporter = Exporter(home, "127.0.0.1", port)
    assert exporter.listening, exporter.reason
    yield exporter
    exporter.close()


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def samples(port: int) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(fetch(port)):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a sample is shown once"
            found[key] = sample.value
    return found


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(
        value
        for (known, pairs), value in found.items()
        if known == f"lifeboat_node_{name}" and labels.items() <= set(pairs)
    )


def counted(number: float, **labels: str) -> dict[str, Any]:
    labels = {"namespace": "n", "engine": "e", "target": "t"} | labels
    return {"counters": [{"labels": labels, "values": {"lookups": number}}]}


def labelled(name: str) -> dict[str, Any]:
    return counted(1, namespace=name) | {"namespace": {"name": name}, "index": {"blocks": 1}}


def test_a_store_and_an_agent_over_http(
    home: Path, port: int, exporter: Exporter, open_driver: Callable[..., StoreDriver]
) -> None:
    driver = open_driver()
    store = driver.block_store
    publisher = StorePublisher(store, home, queue=lambda: {"jobs": 2, "pending_bytes": 300})
    attach(store, lambda: {"engine": "vllm", "model": 'a "model"\n', "served_tokens": 640})
    driver.store(range(5))
    driver.load(range(7))
    publisher.publish()
    facts = TargetFacts(
        "local", "/kv", 5, 10, 20, 3, 4, counters={"evicted_blocks": 2, "janitor_seconds": 0.5}
    )
    agent = Registration(home, "agent", describe=lambda: agent_document([facts]))
    found = samples(port)
    assert store.namespace is not None
    labels = {"namespace": store.namespace.hex[:12], "engine": "vllm", "target": "local"}
    for name, expected in (
        ("stored_blocks_total", 5),
        ("loaded_blocks_total", 5),
        ("stored_bytes_total", store.counters().bytes_stored),
        ("served_tokens_total", 640),
        ("index_blocks", 5),
        ("queue_jobs", 2),
        ("queue_bytes", 300),
    ):
        assert total(found, name, **labels) == expected, name
    assert total(found, "load_outcomes_total", outcome="ok") == 5
    assert total(found, "load_outcomes_total", outcome="missing") == 2
    assert total(found, "processes", role="engine") == 1
    assert total(found, "processes", role="agent") == 1
    assert total(found, "stores", state="ready") == 1
    assert total(found, "namespace_info", model='a "model"\n') == 1
    assert total(found, "target_capacity_bytes", target="local") == 10
    assert total(found, "target_usable", target="local") == 1
    assert total(found, "evicted_blocks_total", target="local") == 2
    assert total(found, "janitor_seconds_total", target="local") == 0.5
    assert total(found, "healthy") == 1
    publisher.close()
    agent.close()
    later = samples(port)
    assert total(later, "stored_blocks_total", **labels) == 5
    assert total(later, "evicted_blocks_total") == 2
    assert total(later, "processes") == 0


def test_codecs_have_labels_of_their_own(home: Path, port: int, exporter: Exporter) -> None:
    labels = {"namespace": "0123456789ab", "engine": "vllm", "target": "nvme"}
    names = {"name": "0123456789ab", "model": "small"}
    kept = {"fp8": (9, 200, 100), "codec 77": (1, 1, 1)}
    none = {"samples": 9, "error": 0.0, "attention": 0.0, "output": 0.0, "ruled_out": ""}
    guard = [
        none | {"codec": "fp8", "error": 0.02, "attention": 0.01},
        none | {"codec": "fp8", "error": 0.03, "output": 0.04, "ruled_out": "bad"},
        none | {"codec": "lbq4", "samples": 0},
        none | {"codec": "strange", "error": 0.5},
    ]
    values = {
        "encoded_blocks:fp8": 3,
        "encoded_raw_bytes:fp8": 200,
        "encoded_bytes:fp8": 100,
        "decoded_blocks:raw": 2,
        "encoded_blocks:strange": 1,
    }
    entry = Registration(
        home,
        describe=lambda: {
            "kind": "store",
            "state": "ready",
            "engine": {"name": "vllm"},
            "namespace": names,
            "target": {"name": "nvme"},
            "codecs": {"guard": guard},
            "counters": [{"labels": labels, "values": values}],
        },
    )
    agent = Registration(
        home,
        "agent",
        describe=lambda: agent_document([TargetFacts("nvme", "/kv", read=2e9, codecs=kept)]),
    )
    found = samples(port)
    assert total(found, "encoded_blocks_total", codec="fp8", **labels) == 3
    assert total(found, "encoded_raw_bytes_total", codec="fp8", **labels) == 200
    assert total(found, "encoded_bytes_total", codec="fp8", **labels) == 100
    assert total(found, "decoded_blocks_total", codec="raw", **labels) == 2
    assert total(found, "encoded_blocks_total", codec="other", **labels) == 1
    assert total(found, "codec_error", codec="fp8", **labels) == 0.03
    assert total(found, "codec_attention_error", codec="fp8", **labels) == 0.01
    assert total(found, "codec_output_error", codec="fp8", **labels) == 0.04
    assert total(found, "codec_ruled_out", codec="fp8", **labels) == 1
    assert not [key for key in found if key[0].endswith("codec_error") and "fp8" not in str(key)]
    assert total(found, "target_read_bytes_per_second", target="nvme") == 2e9
    assert total(found, "target_codec_blocks", target="nvme", codec="fp8") == 9
    assert total(found, "target_codec_raw_bytes", target="nvme", codec="fp8") == 200
    assert total(found, "target_codec_bytes", target="nvme") == 100
    for one in (entry, agent):
        one.close()


def test_prometheus_may_ask_for_its_newer_format(home: Path, port: int, exporter: Exporter) -> None:
    entry = Registration(home, describe=lambda: counted(5))
    agent = Registration(home, "agent", describe=lambda: agent_document([TargetFacts("t", "/")]))
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        text = answer.read().decode()
    found = {
        sample.name: sample.value
        for family in openmetrics_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert found["lifeboat_node_lookups_total"] == 5
    for one in (entry, agent):
        one.close()


def test_counters_go_on_while_processes_come_and_go(
    home: Path, port: int, exporter: Exporter, start: Start
) -> None:
    stop = threading.Event()
    faults: list[str] = []
    scrapes = 0

    def scrape() -> None:
        nonlocal scrapes
        highest: Samples = {}
        while not stop.is_set():
            found = samples(port)
            scrapes += 1
            for key, value in highest.items():
                if key[0].endswith("_total") and found.get(key, -1) < value:
                    faults.append(f"{key}: {found.get(key)} after {value}")
            highest = found

    scrapers = [threading.Thread(target=scrape) for _ in range(2)]
    for scraper in scrapers:
        scraper.start()
    entries = [Registration(home, describe=lambda: counted(0, target=f"t{n}")) for n in range(3)]  # noqa: B023
    folder = start("fold")
    expected = 0
    try:
        for round_ in range(4):
            looping = int(folder.ask("loop"))
            for number, entry in enumerate(entries):
                for value in range(1, 30):
                    entry.publish(counted(value, target=f"t{number}"))
                expected += 29
                entry.close(counted(29, target=f"t{number}"))
            entries = [
                Registration(home, describe=partial(counted, 0, target=f"t{n}")) for n in range(3)
            ]
            if round_ == 2:
                folder.ask(3)
            os.kill(looping, 9)
    finally:
        stop.set()
        for scraper in scrapers:
            scraper.join()
    assert faults == []
    assert scrapes > 5
    assert total(samples(port), "lookups_total") == expected
    for entry in entries:
        entry.close()


def test_a_killed_process_is_counted_and_gone(
    home: Path, port: int, exporter: Exporter, start: Start
) -> None:
    child = start()
    child.hear()
    child.ask(3)
    assert total(samples(port), "processes", role="engine") == 1
    child.kill()
    assert total(samples(port), "processes", role="engine") == 0
    names = {path.name for path in (home / "run").iterdir()}
    assert names == {"totals.json", "totals.lock"}


def test_while_others_hold_the_totals_the_last_answer_stands(
    home: Path, port: int, exporter: Exporter, start: Start
) -> None:
    entry = Registration(home, describe=lambda: counted(5))
    assert total(samples(port), "lookups_total") == 5
    holder = start("idle")
    assert holder.hear() == "True"
    entry.publish(counted(9))
    assert total(samples(port), "lookups_total") == 5
    holder.kill()
    assert total(samples(port), "lookups_total") == 9
    entry.close()


def test_a_fault_keeps_the_last_answer(
    home: Path, port: int, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Registration(home, describe=lambda: counted(5))
    assert total(samples(port), "lookups_total") == 5

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(prometheus_module, "snapshot", broken)
    assert total(samples(port), "lookups_total") == 5
    entry.close()


def test_a_port_that_is_taken_is_said_once_and_tried_again(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    exporter = Exporter(home, "127.0.0.1", port, retry_s=0.02)
    assert not exporter.listening
    assert "choose another telemetry.prometheus.port" in exporter.reason
    time.sleep(0.2)
    assert not exporter.listening
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"127.0.0.1:{port}" in warnings[0].getMessage()
    taken.close()
    give_up = time.monotonic() + 60
    while exporter.reason:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert "lifeboat_node_healthy 1" in fetch(port)
    assert exporter.reason == ""
    exporter.close()
    exporter.close()
    assert not exporter.listening
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_it_ends_while_it_waits_for_a_port(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporter = Exporter(home, "127.0.0.1", taken.getsockname()[1], retry_s=3600)
        exporter.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "x" * 300])
def test_an_address_that_is_not_ours(home: Path, host: str) -> None:
    exporter = Exporter(home, host, 9402)
    assert not exporter.listening
    assert "correct telemetry.prometheus.host" in exporter.reason
    exporter.close()


def test_the_configuration_says_where(home: Path, port: int) -> None:
    home.mkdir()
    file = home / "lifeboat.yaml"

    def exporter() -> Exporter | None:
        environ = {"LIFEBOAT_CACHE_HOME": str(home)}
        return start_exporter(home, load_config(environ=environ).config)

    file.write_text("telemetry: {prometheus: {port: 0}}\n")
    assert exporter() is None
    file.write_text(f"telemetry: {{prometheus: {{port: {port}, host: localhost}}}}\n")
    found = exporter()
    assert found is not None
    assert found.listening, found.reason
    assert "lifeboat_node_healthy" in fetch(port)
    found.close()
    file.unlink()
    config = load_config(environ={"LIFEBOAT_CACHE_HOME": str(home)}).config
    assert config.telemetry.prometheus.port == 9402
    assert config.telemetry.prometheus.host == "127.0.0.1"


def test_nonsense_does_not_end_it(
    port: int, exporter: Exporter, capfd: pytest.CaptureFixture[str]
) -> None:
    for nonsense in (b"\x16\x03\x01\x00\xff" * 20, b"GET /metrics\r\n", b"\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(nonsense)
    # One that says nothing holds up nobody.
    with socket.create_connection(("127.0.0.1", port), 30):
        assert "lifeboat_node_healthy" in fetch(port)
    poster = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    poster.request("POST", "/metrics", body=b"x")
    assert poster.getresponse().status == 501
    poster.close()
    assert "lifeboat_node_healthy" in fetch(port)
    assert capfd.readouterr().err == ""


def test_labels_are_bounded(home: Path, port: int, exporter: Exporter) -> None:
    for number in range(150):
        document = counted(1, namespace=f"n{number}") | {
            "state": "ready",
            "namespace": {"name": f"n{number}"},
            "engine": {"name": "e", "model": f"m{number}"},
            "target": {"name": "t"},
            "index": {"blocks": 1},
        }
        Registration(home, describe=lambda: document).close()  # noqa: B023
    entries = [
        Registration(
            home,
            describe=partial(labelled, f"l{n}"),
        )
        for n in range(30)
    ]
    found = samples(port)
    lookups = [key for key in found if key[0] == "lifeboat_node_lookups_total"]
    assert len(lookups) <= 129
    assert total(found, "lookups_total") == 180
    gauges = [key for key in found if key[0] == "lifeboat_node_index_blocks"]
    assert len(gauges) <= 30
    for entry in entries:
        entry.close()


def test_an_outcome_of_a_newer_release_is_another(
    home: Path, port: int, exporter: Exporter
) -> None:
    values = {f"store_outcome:new{number}": 1 for number in range(50)} | {"store_outcome:ok": 2}
    labels = {"namespace": "n", "engine": "e", "target": "t"}
    document = {"counters": [{"labels": labels, "values": values}]}
    entry = Registration(home, describe=lambda: document)
    found = samples(port)
    assert total(found, "store_outcomes_total", outcome="ok") == 2
    assert total(found, "store_outcomes_total", outcome="other") == 50
    entry.close()


def test_unhealthy_is_0(home: Path, port: int, exporter: Exporter) -> None:
    document = {"state": "disabled", "reason": "no disk: mount it"}
    entry = Registration(home, describe=lambda: document)
    found = samples(port)
    assert found["lifeboat_node_healthy", ()] == 0
    assert total(found, "stores", state="disabled") == 1
    entry.close()


# --- the document ----------------------------------------------------------------------------


def rows(section: str) -> list[list[str]]:
    text = DOCUMENT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_document_has_every_metric_and_no_other() -> None:
    stated = {row[0].strip("`"): row[1:] for row in rows("`lifeboat_node_*` of the agent")}
    known = {
        info.name: [info.kind, ", ".join(f"`{label}`" for label in info.labels), info.meaning]
        for info in METRICS
    }
    assert stated == known


def test_names_are_none_that_an_engine_shows() -> None:
    engines = {row[0].strip("`") for row in rows("`lifeboat_*` on vLLM's `/metrics`")}
    assert "lifeboat_blocks_stored_total" in engines
    names = [info.name for info in METRICS]
    assert len(set(names)) == len(names)
    assert not engines & set(names)
    for info in METRICS:
        assert re.fullmatch(r"lifeboat_node_[a-z0-9_]+", info.name)
        assert info.name.endswith("_total") == (info.kind == "counter")


def test_queries_of_the_document_name_metrics_that_exist() -> None:
    named = set(re.findall(r"lifeboat_node_[a-z0-9_]+", DOCUMENT))
    named.discard("lifeboat_node_")
    assert {name.removesuffix("_bucket") for name in named} <= {info.name for info in METRICS}


def test_every_count_that_is_published_is_shown() -> None:
    counters = CounterSnapshot(store_outcomes={"ok": 1}, load_outcomes={"ok": 1})
    values = store_values(counters, dict.fromkeys(TOKEN_COUNTS, 1))
    shown = {info.counted for info in METRICS if info.counted}
    for name in values:
        assert name in shown or f"{name.partition(':')[0]}:" in shown, name


def test_what_the_agent_counts_is_shown(tmp_path: Path) -> None:
    caretaker = Caretaker.__new__(Caretaker)
    caretaker._totals = Counter()
    caretaker._said = {}
    caretaker._wanted = WantedTarget(tmp_path, "nvme", None, 0, "auto")
    caretaker._note(JanitorReport())
    shown = {info.counted for info in METRICS}
    assert set(caretaker._totals) <= shown

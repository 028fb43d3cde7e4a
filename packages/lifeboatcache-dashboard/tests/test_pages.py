"""The pages, their JSON twins, metrics and health."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from published import MadeUpHome, agent_facts, engine_facts

from lifeboat_cache.registry.metrics import METRICS, families
from lifeboat_cache.registry.totals import snapshot

Dashboard = Callable[..., TestClient]

PAGES = ("/", "/targets", "/contents", "/recovery", "/processes")


def text_of(html: str) -> str:
    """What a reader sees, in one line."""
    html = re.sub(r"(?s)<(script|style|noscript|title).*?</\1>", " ", html)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_nothing_is_there_yet(dashboard: Dashboard, home: Path) -> None:
    client = dashboard()
    for page in PAGES:
        answer = client.get(page)
        assert answer.status_code == 200, page
        assert "LifeboatCache" in answer.text
    assert "no engine runs" in text_of(client.get("/").text)
    facts = client.get("/api/overview").json()
    assert facts["healthy"] is True
    assert facts["engines"] == 0
    assert not (home / "run").exists(), "looking makes nothing that engines own"


def test_the_overview_says_what_was_gained(dashboard: Dashboard, made: MadeUpHome) -> None:
    made.publish(engine_facts(), since=100)
    made.publish(agent_facts(), "agent", since=100)
    client = dashboard()
    shown = text_of(client.get("/").text)
    assert "All is well" in shown
    assert "1 engine · agent runs" in shown
    facts = client.get("/api/overview").json()
    ever = facts["since_ever"]
    assert ever["hit_rate"] == pytest.approx(0.77)
    assert ever["served_tokens"] == 12_800 * 256
    assert ever["saved_bytes"] == 6_000 * (3_145_728 - 1_597_000)
    assert facts["medium_bytes_per_second"] == 6.4e9
    assert facts["codecs"][0]["error"] == 0.0132
    assert ever["token_hit_rate"] == pytest.approx(12_800 * 256 / 9_100_000)
    assert ever["engine_hit_rate"] == pytest.approx(1.7 / 9.1)
    assert ever["saved_seconds"] == pytest.approx(12_800 * 256 / 5_200)
    assert ever["loads"] == 2_520
    assert 0.01 < ever["load_p50_s"] < 0.025 < ever["load_p99_s"] <= 0.25
    assert "3.3M in all, 36 %" in shown
    assert "engines compute 5.2k tokens/s" in shown
    assert "10.5 min in all" in shown
    assert "77 % in all" in shown
    assert "3.3M in all" in shown


def test_what_is_wrong_is_said_with_its_remedy(dashboard: Dashboard, made: MadeUpHome) -> None:
    recent = {"seconds": 600, "store_dropped": {"busy": 12}, "load_failed": {}}
    made.publish(engine_facts(recent=recent, counts={"store_outcome:busy": 12}))
    made.publish(agent_facts(), "agent")
    client = dashboard()
    facts = client.get("/api/overview").json()
    (problem,) = facts["problems"]
    assert problem["what"].endswith("12 blocks were not stored (busy): storage is slower than "
                                    "prompts come in")  # fmt: skip
    assert problem["remedy"] == "use a faster disk, or raise engine.native_cpu_gb"
    (lost,) = facts["not_stored"]
    assert lost["reason"] == "busy"
    assert lost["blocks"] == 12
    shown = text_of(client.get("/").text)
    assert "1 thing needs attention" in shown
    assert "What to do use a faster disk" in shown
    assert "1 thing needs attention" in text_of(client.get("/targets").text)


def test_targets_recovery_and_processes(dashboard: Dashboard, made: MadeUpHome) -> None:
    reading = {"done": False, "blocks": 50_000, "seconds": 0.0, "bad_entries": 2}
    config = {"problem": "", "restart": ["engine.io_workers"]}
    made.publish(engine_facts(state="recovering", recovery=reading, config=config))
    made.publish(agent_facts(), "agent")
    client = dashboard()
    (target,) = client.get("/api/targets").json()["targets"]
    assert target["state"] == "ready"
    assert target["used_part"] == pytest.approx(311 / 400)
    assert target["queue_bytes"] == 64_000_000
    assert target["hit_rate"] == pytest.approx(0.77)
    assert target["load_block_seconds"] == pytest.approx(0.0031)
    assert target["latency"]["load"]["count"] == 2_520
    assert "A load 22.6 ms median" in text_of(client.get("/targets").text)
    assert "311.0 GB of 400.0 GB used (78 %)" in text_of(client.get("/targets").text)
    (recovery,) = client.get("/api/recovery").json()["processes"]
    assert recovery["part"] == pytest.approx(0.4)
    assert "50.0k blocks so far of about 125k" in text_of(client.get("/recovery").text)
    facts = client.get("/api/processes").json()
    (process,) = facts["processes"]
    assert process["pid"] == os.getpid()
    assert process["restart"] == ["engine.io_workers"]
    assert process["fits"] is True
    assert facts["agent"]["state"] == "active"
    assert "restart required to apply engine.io_workers" in text_of(client.get("/processes").text)


def test_a_failing_target_says_why(dashboard: Dashboard, made: MadeUpHome) -> None:
    made.publish(agent_facts(problem="has not answered for 90 s: check the mount"), "agent")
    client = dashboard()
    (target,) = client.get("/api/targets").json()["targets"]
    assert (target["state"], target["reason"]) == (
        "failing",
        "has not answered for 90 s: check the mount",
    )
    assert "has not answered for 90 s" in text_of(client.get("/targets").text)


def test_targets_are_shown_as_engines_see_them(dashboard: Dashboard, made: MadeUpHome) -> None:
    local = {
        "name": "nvme",
        "location": "/kv/nvme",
        "type": "filesystem",
        "rung": "local",
        "state": "ready",
        "reason": "",
        "writing": True,
        "blocks": 7,
        "queue": {"jobs": 1, "pending_bytes": 5_000_000, "limit_bytes": 9_000_000},
    }
    share = {
        **local,
        "name": "share",
        "location": "/mnt/share",
        "type": "nfs",
        "rung": "shared",
        "reason": "it has not answered for 10 s: check the mount",
        "writing": False,
        "breaker": "open",
        "retry_s": 12.0,
        "load_s": [0.004, 0.09],
        "store_s": [0.01, 0.2],
    }
    made.publish(engine_facts(targets=[local, share]))
    made.publish(agent_facts(), "agent")
    client = dashboard()
    found = {one["name"]: one for one in client.get("/api/targets").json()["targets"]}
    assert found["nvme"]["queue_bytes"] == 5_000_000
    assert found["nvme"]["state"] == "ready"
    assert (found["share"]["state"], found["share"]["type"]) == ("failing", "nfs")
    assert found["share"]["used_bytes"] is None
    shown = text_of(client.get("/targets").text)
    assert "it has not answered for 10 s" in shown
    assert "open tried again in 12.0 s" in shown
    assert "4.0 ms, 90.0 ms" in shown
    assert "none: a local disk" in shown


def test_metrics_are_those_of_the_agent(dashboard: Dashboard, made: MadeUpHome, home: Path) -> None:
    made.publish(engine_facts())
    made.publish(engine_facts(1, engine={"name": "sglang", "version": "0.5", "model": "other"}))
    made.publish(agent_facts(), "agent")
    text = dashboard().get("/metrics").text
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    known = snapshot(home)
    assert known is not None
    wanted = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(known)
        for sample in family.samples
    }
    assert found.keys() == wanted.keys()
    ages = {"lifeboat_node_silence_seconds"}
    for key, value in wanted.items():
        assert key[0] in ages or found[key] == value, key
    series = {
        name
        for info in METRICS
        for name in (
            [f"{info.name}_{part}" for part in ("bucket", "sum", "count")]
            if info.kind == "histogram"
            else [info.name]
        )
    }
    assert {name for name, _ in found} <= series


def test_counts_of_processes_that_ended_stay(dashboard: Dashboard, made: MadeUpHome) -> None:
    entry = made.publish(engine_facts())
    entry.close()
    facts = dashboard().get("/api/overview").json()
    assert facts["engines"] == 0
    assert facts["since_ever"]["served_tokens"] == 12_800 * 256


def test_health_is_plain_and_errors_have_one_shape(dashboard: Dashboard) -> None:
    client = dashboard()
    assert client.get("/healthz").text == "ok\n"
    assert client.head("/healthz").status_code == 200
    for answer, status in (
        (client.get("/api/nothing"), 404),
        (client.delete("/api/overview"), 403),
        (client.get("/api/overview?range=never"), 422),
        (client.request("GET", "/api/overview", headers={"host": "evil.example"}), 421),
    ):
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"code", "message", "problems"}
        assert answer.json()["error"]["message"]
    missing = client.get("/nothing")
    assert missing.status_code == 404
    assert "Not found" in missing.text


def test_a_home_that_cannot_be_read_is_a_problem_and_no_error(
    dashboard: Dashboard, made: MadeUpHome, home: Path
) -> None:
    made.publish(engine_facts())
    client = dashboard()
    assert client.get("/api/overview").json()["engines"] == 1
    run = home / "run"
    shutil.move(run, home / "elsewhere")
    run.write_text("not a directory")
    try:
        facts = {}
        for _ in range(600):
            time.sleep(0.05)
            facts = client.get("/api/overview").json()
            if facts["problems"]:
                break
        assert "cannot be read" in facts["problems"][0]["text"]
        assert client.get("/").status_code == 200
    finally:
        run.unlink()
        shutil.move(home / "elsewhere", run)


def test_text_of_others_is_never_markup(dashboard: Dashboard, made: MadeUpHome) -> None:
    evil = "<script>alert(1)</script>"
    engine = {"name": evil, "version": evil, "model": evil}
    made.publish(engine_facts(state="disabled", reason=evil, engine=engine,
                              namespace={"name": evil, "model": evil}))  # fmt: skip
    made.publish(agent_facts(name=evil, location=evil, problem=evil), "agent")
    client = dashboard()
    for page in PAGES:
        text = client.get(page).text
        assert "<script>alert" not in text
        assert "style=" not in text, "inline styles are refused by the browser"


def test_no_page_loads_anything_from_elsewhere(dashboard: Dashboard, made: MadeUpHome) -> None:
    made.publish(engine_facts())
    client = dashboard()
    for page in PAGES:
        for address in re.findall(r'(?:src|href|action)="([^"]*)"', client.get(page).text):
            assert address.startswith(("/", "#")), address
            if address.startswith("/static/"):
                assert client.get(address).status_code == 200

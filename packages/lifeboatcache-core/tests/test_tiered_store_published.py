"""What people see of a ladder: its configuration, followed live, status, metrics and doctor."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.cli.main import main
from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.interface import Namespace, Outcome, State, Store, open_block_store
from lifeboat_cache.registry import snapshot
from lifeboat_cache.registry.metrics import families
from lifeboat_cache.store import copier, member, tiered_store
from lifeboat_cache.testing import StoreDriver

OK = Outcome.OK
Open = Callable[[], Store]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    monkeypatch.setattr(tiered_store, "_TICK_S", 0.02)
    monkeypatch.setattr(tiered_store, "_COMPANION_S", 0.02)
    monkeypatch.setattr(member, "_LEAST_PAUSE_S", 0.02)
    monkeypatch.setattr(member, "_MOST_PAUSE_S", 0.1)
    monkeypatch.setattr(copier, "_LOOK_S", 0.02)
    return home


@pytest.fixture
def open_store() -> Iterator[Open]:
    opened: list[Store] = []

    def make() -> Store:
        namespace = Namespace.from_identity({"engine": "test", "model": "ladder"})
        opened.append(open_block_store(LiveConfig(load_config()), namespace))
        assert opened[-1].wait_recovered(60)
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def configure(home: Path, *tiers: str, mode: str = "first", fallback: bool = False) -> None:
    """Tiers as ``name`` or ``name:rung``, each in a directory of that name."""
    lines = []
    for tier in tiers:
        name, _, rung = tier.partition(":")
        more = f", rung: {rung}" if rung else ""
        path = home.parent / name
        lines.append(f"{{name: {name}, type: filesystem, path: {path}, min_free_gb: 0{more}}}")
    new = home / "new"
    new.write_text(
        f"storage: {{tiers: [{', '.join(lines)}], write_mode: {mode},"
        f" fallback_local: {{enabled: {str(fallback).lower()}, min_free_gb: 0}}}}\n"
        "agent: {autostart: false}\n"
    )
    os.replace(new, home / "lifeboat.yaml")


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def names(store: Store) -> list[str]:
    return [one.name for one in store.targets()]


def metrics(home: Path) -> dict[str, dict[tuple[str, ...], float]]:
    found = snapshot(home)
    assert found is not None
    return {
        sample.name: {
            tuple(one.labels.values()): one.value
            for one in family.samples
            if one.name == sample.name
        }
        for family in families(found)
        for sample in family.samples
    }


def test_the_ladder_follows_the_file(home: Path, open_store: Open) -> None:
    configure(home, "a", "b:shared")
    store = open_store()
    driver = StoreDriver(store)
    assert driver.store(range(3)) == [OK] * 3
    assert [one.rung for one in store.targets()] == ["local", "shared"]
    configure(home, "b:shared", "a")
    until(lambda: names(store) == ["b", "a"], "the order")
    assert driver.store(range(3, 5)) == [OK] * 2
    assert [one.blocks for one in store.targets()] == [2, 3]
    configure(home, "b:shared")
    until(lambda: names(store) == ["b"], "the end of a tier")
    assert [bool(hit) for hit in driver.lookup(range(5))] == [False] * 3 + [True] * 2
    configure(home, "c:archive", "b:shared", "a", mode="all")
    until(lambda: len(names(store)) == 3 and driver.lookup([0]) == [1], "new tiers")
    until(lambda: all(one.writing for one in store.targets()), "the mode")
    assert driver.store(range(5, 6)) == [OK]
    assert [one.blocks for one in store.targets()] == [1, 3, 4]
    assert driver.load(range(6)) == [OK] * 6


def test_status_and_metrics_show_each_target(
    home: Path, open_store: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home, "fast", "slow:shared", mode="local_first", fallback=True)
    (home.parent / "fast").write_text("not a directory")
    store = open_store()
    driver = StoreDriver(store)
    assert driver.store(range(4)) == [OK] * 4
    assert driver.load(range(5)) == [OK] * 4 + [Outcome.MISSING]

    def document() -> Any:
        capsys.readouterr()
        main(["status", "--json"])
        return json.loads(capsys.readouterr().out)

    def targets() -> dict[str, Any]:
        (engine,) = document()["processes"]
        return {one["name"]: one for one in engine["targets"]}

    until(lambda: targets()["slow"]["loaded_blocks"] == 4, "the counts")
    shown = targets()
    assert list(shown) == ["fast", "slow", "fallback_local"]
    assert (shown["fast"]["state"], shown["slow"]["state"]) == ("disabled", "ready")
    assert shown["fallback_local"]["state"] == "closed"
    assert "fast" in shown["fast"]["reason"]
    assert [one["writing"] for one in shown.values()] == [False, True, False]
    assert shown["slow"]["stored_blocks"] == shown["slow"]["blocks"] == 4
    assert shown["slow"]["store_mean_s"] > 0
    assert any("does without target fast: " in text for text in document()["problems"])
    found = metrics(home)
    assert found["lifeboat_node_tier_usable"] == {("fast",): 0, ("slow",): 1}
    assert found["lifeboat_node_tier_writing"] == {
        ("fast",): 0, ("slow",): 1, ("fallback_local",): 0
    }  # fmt: skip
    assert found["lifeboat_node_tier_stored_blocks_total"] == {("slow",): 4}
    assert found["lifeboat_node_tier_load_outcomes_total"] == {
        ("slow", "ok"): 4,
        ("slow", "missing"): 1,
    }
    main(["status"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " slow " in line[:20]]
    assert line.split()[1:6] == ["slow", "shared", "ready", "yes", "4"]

    (home.parent / "fast").unlink()
    until(lambda: targets()["fast"]["state"] == "ready", "its return")
    assert store.state is State.READY
    assert driver.load(range(4)) == [OK] * 4
    until(lambda: targets()["fast"]["copied_blocks"] == 4, "the promotion")
    assert driver.store(range(4, 6)) == [OK] * 2
    until(lambda: targets()["slow"]["copied_blocks"] == 2, "the copies")
    found = metrics(home)
    assert found["lifeboat_node_tier_usable"] == {("fast",): 1, ("slow",): 1}
    assert found["lifeboat_node_tier_copied_blocks_total"] == {("fast",): 4, ("slow",): 2}
    assert document()["healthy"]


def test_doctor_says_where_new_blocks_go(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> dict[str, str]:
        capsys.readouterr()
        main(["doctor", "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        (found,) = [one for one in checks if one["name"] == "write order"]
        return {"status": found["status"], "summary": found["summary"]}

    configure(home, "far:shared", "near")
    assert check()["summary"] == "new blocks go to far (write_mode is first)"
    configure(home, "far:shared", "near", mode="local_first")
    assert check()["summary"] == "new blocks go to near (write_mode is local_first)"
    configure(home, "far:shared", "near", mode="all")
    assert check()["summary"] == "new blocks go to far, near (write_mode is all)"
    (home.parent / "far").write_text("not a directory")
    configure(home, "far:shared", "near")
    assert check() == {"status": "ok", "summary": "new blocks go to near (write_mode is first)"}
    configure(home, "far:shared", fallback=True)
    assert check()["status"] == "warn"
    assert "go to fallback_local until one is" in check()["summary"]

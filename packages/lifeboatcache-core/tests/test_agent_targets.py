"""What the agent looks after: whose targets, with which limits, and a dead disk among them."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Start, agent_home, engines, running, until
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache import janitor
from lifeboat_cache.agent import agent_status, caretaker, kernel_build
from lifeboat_cache.agent.caretaker import Caretaker, pause_after
from lifeboat_cache.agent.exits import Exit
from lifeboat_cache.agent.wanted import WantedTarget, merged, of_document
from lifeboat_cache.codecs import speed
from lifeboat_cache.codecs.names import CODEC_NAMES
from lifeboat_cache.codecs.rates import CodecRate
from lifeboat_cache.janitor import JanitorReport
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.registry import processes
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

MIB = 1 << 20


def target(path: str, capacity: int | None, reserve: int = 0, direct_io: Any = "auto") -> Any:
    return WantedTarget(Path(path), "t", capacity, reserve, direct_io)


# --- merging -----------------------------------------------------------------------------------


def test_smallest_capacity_and_largest_reserve_count() -> None:
    chosen, disagreements = merged(
        [target("/a", 100, 5), target("/b", None, 7), target("/a", 50, 9), target("/a", None, 1)]
    )
    assert chosen == {
        Path("/a"): target("/a", 50, 9),
        Path("/b"): target("/b", None, 7),
    }
    (text,) = disagreements
    assert "/a" in text
    assert "50 bytes" in text


def test_agreement_is_nothing_to_tell() -> None:
    assert merged([target("/a", 100, 5)] * 3) == ({Path("/a"): target("/a", 100, 5)}, [])


@given(st.permutations([("on", 3), ("auto", 1), ("off", 2), ("auto", None)]))
def test_order_does_not_matter(items: list[tuple[str, int | None]]) -> None:
    chosen, _ = merged(target("/a", capacity, 0, mode) for mode, capacity in items)
    assert chosen == {Path("/a"): target("/a", 1, 0, "off")}


@given(
    st.dictionaries(
        st.sampled_from(["name", "location", "capacity_bytes", "reserve_bytes", "direct_io"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.sampled_from(["auto", "on", "/x", "x", "/x\0", ""]),
            st.lists(st.none()),
        ),
    )
)
def test_whatever_is_published_is_read_without_an_error(facts: dict[str, Any]) -> None:
    for document in ({"target": facts}, {"targets": [facts, None]}, {"targets": facts}):
        for found in of_document(document):
            assert found.path.is_absolute()
    for found in of_document({"target": facts}):
        assert found.path.is_absolute()
        assert found.reserve >= 0
        assert found.capacity is None or found.capacity >= 0


def test_links_lead_to_one_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    facts = {"name": "t", "capacity_bytes": 1, "reserve_bytes": 0, "direct_io": "auto"}
    found = [
        *of_document({"target": {**facts, "location": str(tmp_path / "real")}}),
        *of_document({"targets": [{**facts, "location": str(tmp_path / "link")}]}),
    ]
    assert len(found) == 2
    assert len(merged(found)[0]) == 1


def test_targets_that_a_store_does_not_use_are_not_looked_after(tmp_path: Path) -> None:
    def facts(name: str, state: str) -> dict[str, Any]:
        return {
            "name": name,
            "location": str(tmp_path / name),
            "capacity_bytes": None,
            "reserve_bytes": 0,
            "direct_io": "auto",
            "state": state,
        }

    listed = [facts("a", "ready"), facts("b", "disabled"), facts("c", "recovering")]
    found = of_document({"target": facts("a", "ready"), "targets": listed})
    assert [one.name for one in found] == ["a", "c"]


# --- the rhythm --------------------------------------------------------------------------------


def test_passes_are_frequent_where_writers_are_filling_the_target() -> None:
    idle = JanitorReport(capacity=100, used_before=10, used_after=10, free=1000)
    busy = JanitorReport(capacity=100, used_before=10, used_after=10, free=1000, alive=1)
    full = JanitorReport(capacity=100, used_before=90, used_after=90, free=1000, alive=1)
    assert pause_after(idle, 10, 5, 0.95) == 20
    assert pause_after(busy, 10, 5, 0.95) == 5
    assert pause_after(full, 80, 5, 0.95) == 1
    # The disk fills, whatever the capacity.
    narrow = JanitorReport(used_before=90, used_after=90, free=20, reserve=10, alive=1)
    assert pause_after(narrow, 80, 5, 0.95) == 1
    # A pass that takes long leaves time for the engines.
    slow = JanitorReport(capacity=100, used_before=90, used_after=90, free=1000, alive=1, seconds=1)
    assert pause_after(slow, 80, 5, 0.95) == 10


# --- one target that hangs ---------------------------------------------------------------------


def test_dead_disk_holds_up_only_its_own_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, other = tmp_path / "dead", tmp_path / "other"
    for root in (dead, other):
        FilesystemTarget(root).probe()
    answer = threading.Event()
    run_once = janitor.Janitor.run_once

    def run(self: janitor.Janitor) -> JanitorReport:
        if self.estate.root == dead:
            answer.wait()
        return run_once(self)

    monkeypatch.setattr(janitor.Janitor, "run_once", run)
    monkeypatch.setattr(caretaker, "HUNG_AFTER_S", 0.5)
    monkeypatch.setattr(caretaker, "_QUIET_S", 0.01)
    monkeypatch.setattr(caretaker, "_BUSY_S", 0.01)
    stuck, well = Caretaker(target(str(dead), 1)), Caretaker(target(str(other), 1))
    try:
        until(lambda: stuck.describe()["stuck"], "notice")
        before = well.facts().counters["janitor_passes"]
        until(lambda: well.facts().counters["janitor_passes"] > before + 3, "passes")
        assert not well.describe()["stuck"]
        assert "has not answered" in stuck.facts().problem
    finally:
        answer.set()
        until(lambda: stuck.facts().counters.get("janitor_passes"), "the pass")
        for item in (stuck, well):
            item.stop()
            assert item.join(60)
    assert not stuck.describe()["stuck"]


def test_pass_that_fails_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FilesystemTarget(tmp_path / "kv").probe()
    monkeypatch.setattr(caretaker, "_QUIET_S", 0.01)
    run_once = janitor.Janitor.run_once
    failures = iter(range(3))

    def run(self: janitor.Janitor) -> JanitorReport:
        if next(failures, None) is not None:
            raise RuntimeError("no such thing")
        return run_once(self)

    monkeypatch.setattr(janitor.Janitor, "run_once", run)
    item = Caretaker(target(str(tmp_path / "kv"), 1))
    until(lambda: item.facts().counters.get("janitor_passes"), "a pass")
    item.stop()
    assert item.join(60)
    assert item.facts().problem == ""
    assert caplog.text.count("no such thing") == 1


def test_the_speed_of_a_target_is_measured_from_time_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, home = tmp_path / "kv", tmp_path / "home"
    FilesystemTarget(root).probe()
    found: list[float | OSError | None] = [None, 3e9, OSError(5, "broken"), 1e9, 1e9]

    def probe(path: Path, *, direct: bool) -> float | None:
        assert path == root
        answer = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(speed, "probe_target", probe)
    for name in ("_QUIET_S", "_BUSY_S", "_PROBE_SOON_S"):
        monkeypatch.setattr(caretaker, name, 0.01)
    item = Caretaker(target(str(root), None), home)
    try:
        assert item.facts().read in (None, 3e9, 2e9, 1e9)
        until(lambda: item.facts().read == 1e9, "the median of several")
        assert speed.read_target_rate(home, str(root)) == 1e9
        assert item.facts().problem == ""
        until(lambda: item._probed == 5, "the last of the first few")
        probed = item.facts().counters["janitor_passes"]
        until(lambda: item.facts().counters["janitor_passes"] > probed + 3, "passes")
        assert item._probed == 5, "from now on every few hours"
    finally:
        item.stop()
        assert item.join(60)


def test_codecs_are_measured_after_the_compiler(
    kernels_on: None, kernel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").symlink_to(kernel_home / "kernels")
    measured: list[int] = []

    def measure() -> dict[tuple[str, int], CodecRate]:
        measured.append(1)
        return rates

    rates: dict[tuple[str, int], CodecRate] = {
        (dtype, codec): CodecRate(1e9, 1.0)
        for dtype in speed.MEASURED_DTYPES
        for codec in range(len(CODEC_NAMES))
    }
    monkeypatch.setattr(speed, "measure_codecs", measure)
    monkeypatch.setattr(kernel_build, "step_back", lambda: None)
    for _ in range(2):
        assert kernel_build.compile_here(tmp_path) == Exit.OK
    assert measured == [1], "once"
    assert dict(speed.read_codec_rates(tmp_path)) == rates


def test_kernels_are_used_that_could_not_be_measured(
    kernels_on: None,
    kernel_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "kernels").symlink_to(kernel_home / "kernels")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(speed, "write_codec_rates", full)
    monkeypatch.setattr(kernel_build, "step_back", lambda: None)
    assert kernel_build.compile_here(tmp_path) == Exit.OK
    assert "the codecs could not be measured" in caplog.text


# --- a real agent ------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path) -> Iterator[Path]:
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        yield home


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    with engines(home) as start:
        yield start


def configure(home: Path, capacity: str, port: int = 0) -> None:
    temporary = home / "new.yaml"
    temporary.write_text(
        f"storage:\n  fallback_local: {{capacity_gb: {capacity}, min_free_gb: 0}}\n"
        f"telemetry: {{prometheus: {{port: {port}}}}}\n"
    )
    os.replace(temporary, home / "lifeboat.yaml")


def published(home: Path) -> dict[str, Any]:
    """The document of the agent in the registry."""
    for entry in processes(home):
        if entry.role == "agent" and entry.alive:
            return dict(entry.document)
    return {}


def looked_after(home: Path) -> dict[str, int | None]:
    return {item["location"]: item["capacity_bytes"] for item in published(home).get("targets", [])}


def test_it_follows_configuration_and_engines(home: Path, start: Start, tmp_path: Path) -> None:
    configure(home, "16MiB")
    first, second = start(), start()
    first.ask("ensure")
    running(home)
    kv, other = str(home / "kv"), str(tmp_path / "other")
    until(lambda: looked_after(home) == {kv: 16 * MIB}, "the configured target")
    facts = {"name": "o", "location": other, "capacity_bytes": 7, "reserve_bytes": 0}
    assert second.ask(f"target {json.dumps({**facts, 'direct_io': 'auto'})}")
    until(lambda: looked_after(home) == {kv: 16 * MIB, other: 7}, "an engine's target")
    # It makes no directory: that is for whoever stores.
    assert not Path(other).exists()
    configure(home, "8MiB")
    until(lambda: looked_after(home) == {kv: 8 * MIB, other: 7}, "the new configuration")
    # One that cannot be used changes nothing, and is told.
    (home / "lifeboat.yaml").write_text("storage: {fallback_local: {capacity: 3}}\n")
    until(lambda: "capacity" in published(home).get("reason", ""), "the problem")
    assert looked_after(home) == {kv: 8 * MIB, other: 7}
    assert any("capacity" in text for text in agent_status(home).document["problems"])
    configure(home, "4MiB")
    until(lambda: published(home).get("reason") == "", "the end of the problem")
    second.end()
    until(lambda: looked_after(home) == {kv: 4 * MIB}, "the end of the engine's target")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def metrics(port: int) -> str:
    """What is served; nothing if nobody serves."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_it_serves_metrics_where_the_configuration_says(home: Path, start: Start) -> None:
    first, second = free_port(), free_port()
    configure(home, "1GiB", first)
    start().ask("ensure")
    running(home)
    until(lambda: 'role="engine"' in metrics(first), "metrics")
    configure(home, "1GiB", second)
    until(lambda: 'role="agent"' in metrics(second), "metrics at the other port")
    assert metrics(first) == ""
    # A taken port stops nothing, and is told.
    with socket.create_server(("127.0.0.1", first)):
        configure(home, "2GiB", first)
        until(lambda: "cannot be listened on" in published(home)["reason"], "the problem")
        assert looked_after(home) == {str(home / "kv"): 2 << 30}


def fill(root: Path, blocks: int, age: float, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Store blocks of 1 MiB some time ago."""
    namespace = Namespace.from_identity({"engine": "test", "model": "small"})
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() - age)
        store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
        try:
            assert store.wait_recovered(60)
            stored = StoreDriver(store, size=MIB).store(range(blocks))
            assert stored == [Outcome.OK] * blocks
        finally:
            store.close()
    return namespace


@pytest.mark.parametrize("reclaimed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_it_evicts_what_is_beyond_the_capacity(
    home: Path, start: Start, monkeypatch: pytest.MonkeyPatch, reclaimed: bool
) -> None:
    configure(home, "16MiB")
    root = home / "kv"
    namespace = fill(root, 40, 3600, monkeypatch)
    assert FilesystemTarget(root).usage().used > 40 * MIB
    start().ask("ensure")
    running(home)

    def evicted() -> float:
        return sum(
            float(group["values"].get("evicted_blocks", 0))
            for group in published(home).get("counters", [])
        )

    until(lambda: evicted() >= 24, "eviction")
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    try:
        assert store.wait_recovered(60)
        driver = StoreDriver(store, size=MIB)
        left = [number for number in range(40) if driver.lookup([number])[0].name == "HIT"]
        assert 0 < len(left) <= 16
        # What is said to be there is there, and right.
        assert driver.load(left) == [Outcome.OK] * len(left)
    finally:
        store.close()
    if reclaimed:
        # Readers have had their time: the space is given back.
        until(lambda: FilesystemTarget(root).usage().used <= 16 * MIB, "space")

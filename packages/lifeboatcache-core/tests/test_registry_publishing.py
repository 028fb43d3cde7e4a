"""What stores and the agent publish."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.config import load_config
from lifeboat_cache.job import Job
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.registry import (
    StorePublisher,
    TargetFacts,
    agent_document,
    attach,
    processes,
    snapshot,
)
from lifeboat_cache.registry.extra import facts_of
from lifeboat_cache.registry.publisher import RECENT_S
from lifeboat_cache.store.counters import Counters
from lifeboat_cache.store.protocol import State, TargetStatus
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver
from lifeboat_cache.testing.blocks import sample_keys


class Store:
    """Only what is published of a store."""

    def __init__(self) -> None:
        self.state = State.OPENING
        self.reason = ""
        self.namespace: Namespace | None = None
        self.target: FilesystemTarget | None = None
        self.counted = Counters()

    def targets(self) -> list[TargetStatus]:
        if self.target is None:
            return []
        where = self.target.location
        return [TargetStatus(self.target.name, "filesystem", "local", where, self.state)]

    def __len__(self) -> int:
        return 12

    def counters(self) -> Any:
        return self.counted.snapshot()

    def open(self, namespace: Namespace, target: FilesystemTarget) -> None:
        self.state, self.namespace, self.target = State.READY, namespace, target


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def publish(home: Path) -> Iterator[Callable[..., StorePublisher]]:
    made: list[StorePublisher] = []

    def make(store: Any, **options: Any) -> StorePublisher:
        made.append(StorePublisher(store, home, **options))
        assert made[-1].publish()
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def document(home: Path) -> Any:
    (entry,) = processes(home)
    return entry.document


def groups(home: Path) -> dict[tuple[tuple[str, str], ...], dict[str, float]]:
    found = snapshot(home)
    assert found is not None
    return dict(found.counts.groups())


def test_a_store_is_published_as_it_is(
    home: Path, open_driver: Callable[..., StoreDriver], namespace: Namespace, root: Path
) -> None:
    target = FilesystemTarget(root, name="nvme", capacity=10**9, reserve=5)
    driver = open_driver(target=target)
    store = driver.block_store
    publisher = StorePublisher(
        store,
        home,
        extra=lambda: {"model": "a model"},
        queue=lambda: {"jobs": 2, "pending_bytes": 300, "limit_bytes": 1000, "more": "text"},
    )
    driver.store(range(5))
    driver.load(range(6))
    driver.lookup(range(7))
    publisher.publish()
    found = document(home)
    assert found["kind"] == "store"
    assert found["state"] == "ready"
    assert found["namespace"] == {"name": namespace.hex[:12], "model": "a model"}
    assert found["engine"]["name"] == "test", "from the namespace's identity"
    assert found["target"] == {
        "name": "nvme",
        "location": str(root),
        "capacity_bytes": 10**9,
        "reserve_bytes": 5,
        "direct_io": "auto",
    }
    (target_shown,) = found["targets"]
    means = [target_shown.pop(name) for name in ("store_mean_s", "load_mean_s")]
    assert all(mean > 0 for mean in means)
    assert target_shown == {
        **found["target"],
        "type": "filesystem",
        "rung": "local",
        "state": "ready",
        "reason": "",
        "writing": True,
        "blocks": 5,
        "queue": {"jobs": 0, "pending_bytes": 0, "limit_bytes": 2 << 30},
        "stored_blocks": 5,
        "stored_bytes": store.counters().bytes_stored,
        "written_bytes": store.counters().bytes_written,
        "loaded_blocks": 5,
        "loaded_bytes": store.counters().bytes_loaded,
        "read_bytes": store.counters().bytes_read,
        "store_dropped": {},
        "load_failed": {"missing": 1},
    }
    assert found["index"] == {"blocks": 5}
    assert found["queue"] == {"jobs": 2, "pending_bytes": 300, "limit_bytes": 1000}
    assert found["recovery"]["done"] is True
    assert found["recent"]["load_failed"] == {"missing": 1}
    found_groups = groups(home)
    tier = found_groups.pop((("tier", "nvme"),))
    assert tier["tier_stored_blocks"] == tier["tier_loaded_blocks"] == 5
    assert tier["tier_load_outcome:missing"] == 1
    looked_up = found_groups.pop((("engine", "test"),))
    assert looked_up["lookup_seconds"] > 0
    ((labels, values),) = found_groups.items()
    assert dict(labels) == {"namespace": namespace.hex[:12], "engine": "test", "target": "nvme"}
    counters = store.counters()
    assert values["stored_blocks"] == values["loaded_blocks"] == 5
    assert values["stored_bytes"] == counters.bytes_stored > 0
    assert values["load_outcome:ok"] == 5
    assert values["load_outcome:missing"] == 1
    assert values["lookups"] == 7
    assert values["lookup_hits"] == 5
    publisher.close()
    publisher.close()
    assert processes(home) == [], "its counts are in the totals"
    assert groups(home) == {
        labels: values,
        (("tier", "nvme"),): tier,
        (("engine", "test"),): looked_up,
    }


def test_counts_stay_where_they_were_shown_as_labels_become_known(
    home: Path, publish: Callable[..., StorePublisher], namespace: Namespace
) -> None:
    store = Store()
    publisher = publish(store)
    assert groups(home) == {}, "nothing is known, and nothing was counted"
    store.counted.add(lookups=3)
    publisher.publish()
    unknown = (("engine", "unknown"), ("namespace", "unknown"), ("target", "none"))
    assert groups(home) == {unknown: {"lookups": 3}}
    store.open(namespace, FilesystemTarget(home / "kv", name="nvme"))
    store.counted.add(lookups=4)
    publisher.publish()
    known = (("engine", "test"), ("namespace", namespace.hex[:12]), ("target", "nvme"))
    assert {labels: values["lookups"] for labels, values in groups(home).items()} == {
        unknown: 3,
        known: 4,
    }


def test_namespaces_that_end_with_their_process_share_a_name(
    home: Path, publish: Callable[..., StorePublisher]
) -> None:
    store = Store()
    store.open(
        Namespace.from_identity({"engine": "vllm", "epoch": "1"}, {"temporary": True}),
        FilesystemTarget(home / "kv"),
    )
    publish(store)
    assert document(home)["namespace"]["name"] == "temporary"


def stored(*outcomes: int) -> Job:
    """A finished store job."""
    keys = sample_keys(range(len(outcomes)))
    job = Job("store", BlockBatch(keys, BlockBuffers.from_buffers([[b"x"] for _ in keys])))
    job.outcomes[:] = outcomes
    job.finish_part()
    return job


def test_what_was_lost_is_recent_for_ten_minutes(
    home: Path, publish: Callable[..., StorePublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    now = start
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = Store()
    publisher = publish(store)
    store.counted.job(stored(1, 6, 6, 8, 9))  # ok, full twice, busy, cancelled
    publisher.publish()
    assert document(home)["recent"]["store_dropped"] == {"full": 2, "busy": 1}
    for step in range(60):
        now = start + 10 * (step + 1)
        publisher.publish()
        if now - start < RECENT_S:
            assert document(home)["recent"]["store_dropped"] == {"full": 2, "busy": 1}
    store.counted.job(stored(6))
    now = start + RECENT_S + 30
    publisher.publish()
    assert document(home)["recent"]["store_dropped"] == {"full": 1}
    assert len(publisher._samples) < 60


def test_an_adapter_adds_its_facts(
    home: Path, publish: Callable[..., StorePublisher], namespace: Namespace
) -> None:
    store = Store()
    store.open(namespace, FilesystemTarget(home / "kv"))
    publisher = publish(store)
    served = 100
    attach(
        store,
        lambda: {"engine": "vllm", "version": "0.32", "model": "m", "served_tokens": served},
    )
    publisher.publish()
    served = 150
    publisher.publish()
    found = document(home)
    assert found["engine"] == {"name": "vllm", "version": "0.32", "model": "m"}
    values = groups(home)[
        ("engine", "vllm"), ("namespace", namespace.hex[:12]), ("target", "local")
    ]
    assert values["served_tokens"] == 150


def test_an_adapter_that_fails_does_not_matter(
    home: Path, publish: Callable[..., StorePublisher]
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError

    store = Store()
    attach(store, broken)
    publisher = publish(store)
    publisher.publish()
    assert publisher.reason == ""
    assert document(home)["state"] == "opening"


def test_facts_do_not_keep_a_store() -> None:
    store = Store()
    attach(store, dict)
    assert facts_of(store) == {}
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


def test_where_nothing_can_be_written_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    publisher = StorePublisher(Store(), tmp_path / "file")
    for _ in range(3):
        publisher.publish()
    publisher.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("LifeboatCache: `lifeboat-cache status` cannot see this: ")


def test_names_are_cleaned_before_they_are_labels(
    home: Path, publish: Callable[..., StorePublisher], namespace: Namespace
) -> None:
    store = Store()
    store.open(namespace, FilesystemTarget(home / "kv"))
    attach(store, lambda: {"engine": 'v"llm\n' + "x" * 100})
    publish(store).publish()
    ((labels, _),) = groups(home).items()
    assert dict(labels)["engine"] == "v_llm_" + "x" * 58


def test_the_agent_publishes_its_targets() -> None:
    found = agent_document(
        [
            TargetFacts("nvme", "/kv", 5, 10, 20, 3, 4, counters={"evicted_blocks": 2}),
            TargetFacts("new", "/new", capacity_bytes=10),
        ],
        reason="x" * 1000,
    )
    assert json.loads(json.dumps(found)) == found
    assert found["targets"][0]["used_bytes"] == 5
    assert found["targets"][1]["used_bytes"] is None, "nothing has been measured yet"
    assert found["counters"][0] == {
        "labels": {"target": "nvme"},
        "values": {"evicted_blocks": 2},
    }
    assert len(found["reason"]) < 1000


def test_a_home_that_does_not_answer_holds_nothing_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, hung = threading.Event(), threading.Event()
    original = os.replace

    def hang(*args: Any) -> None:
        hung.set()
        release.wait(60)
        original(*args)

    monkeypatch.setattr(os, "replace", hang)
    publisher = StorePublisher(Store(), home)
    assert hung.wait(60)
    for _ in range(3):
        publisher.tick()
    publisher.close(timeout=0.01)
    release.set()
    publisher.close()
    assert processes(home) == []


def test_ticks_are_published(home: Path, publish: Callable[..., StorePublisher]) -> None:
    store = Store()
    publisher = publish(store)
    store.state = State.DISABLED
    publisher.tick()
    give_up = time.monotonic() + 60
    while document(home)["state"] != "disabled":
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_store_that_cannot_be_described_goes_on(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = StorePublisher(object(), home)  # type: ignore[arg-type]
    assert not publisher.publish()
    assert publisher.reason.startswith("internal error: ")
    publisher.close()
    assert len(caplog.records) == 1


def test_codecs_are_published_and_told_to_look(home: Path, tmp_path: Path) -> None:
    class Watched(CodecPolicy):
        looks = 0

        def look(self) -> None:
            self.looks += 1
            super().look()

    policy = Watched(load_config(environ={"HOME": str(tmp_path)}).config)
    policy.choose(KVLayout.opaque(64))
    policy.counts.stored(3, 1, 200, 100)
    publisher = StorePublisher(Store(), home, codecs=policy)
    assert publisher.publish()
    assert policy.looks >= 1
    document = publisher.document()
    assert document["codecs"]["mode"] == "ladder"
    assert document["codecs"]["choices"][0]["codec"] == "raw"
    assert document["config"] == {}
    (group,) = document["counters"]
    assert group["values"]["encoded_raw_bytes:fp8"] == 200
    looks = policy.looks
    give_up = time.monotonic() + 60
    while policy.looks == looks:
        assert time.monotonic() < give_up
        publisher.tick()
        time.sleep(0.01)
    publisher.close()


def test_a_fault_while_looking_ends_neither_the_store_nor_publishing(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(CodecPolicy):
        def look(self) -> None:
            raise RuntimeError("broken")

    publisher = StorePublisher(Store(), home, codecs=Broken.fixed("raw"))
    assert publisher.publish()
    assert "changes are not followed any more" in caplog.text
    publisher.close()

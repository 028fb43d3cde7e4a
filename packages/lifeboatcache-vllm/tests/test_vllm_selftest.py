"""``lifeboat-cache selftest vllm`` passes on a good vLLM and notices planted faults."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from lifeboat_cache.config import Config, load_config
from lifeboat_cache.integrations import vllm_namespace, vllm_selftest, vllm_selftest_engine
from lifeboat_cache.integrations.vllm_selftest_interface import hook_problems, interface_problems
from lifeboat_cache.integrations.vllm_tier import LifeboatTier
from lifeboat_cache.interface import Namespace
from lifeboat_cache.selftest import Report, Step
from lifeboat_cache.selftest.place import scratch_parent

CODE = "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"
AFTER_STORE = ("restore in another process", "another identity", "flipped byte", "failed load")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    # Another test of this process may have loaded vLLM's plugins, as an engine does.
    monkeypatch.setattr(vllm_namespace, "_inside_engine", lambda: False)
    return tmp_path / "home"


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the second process where the fault is in this one."""

    def start(self: Any) -> None:
        self._child_problem = "not started"

    monkeypatch.setattr(vllm_selftest._SelfTest, "_start_child", start)


def selftest(*, keep: bool = False) -> Report:
    return vllm_selftest.run(argparse.Namespace(config=None, keep=keep))


def step(report: Report, name: str) -> Step:
    return next(step for step in report.steps if step.name == name)


def leftovers(directory: str) -> list[str]:
    """What the run in ``directory``, as its report calls it, left in shared memory."""
    mark = Path(directory.partition(" (")[0]).name.lstrip(".")
    assert mark.startswith("lifeboat-selftest-")
    return [name for name in os.listdir("/dev/shm") if mark in name]


def test_it_passes_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    document = json.loads(command("--json").stdout)
    assert [s["name"] for s in document["steps"] if s["status"] != "ok"] == []
    assert {*AFTER_STORE, "hooks: installed", "positions"} <= {s["name"] for s in document["steps"]}
    assert document["status"] == "ok"
    assert document["facts"]["vllm"] == vllm.__version__
    assert document["facts"]["tested"]
    assert os.listdir(tmp_path) == []  # neither the store nor a directory of its own
    assert not leftovers(document["facts"]["directory"])


def command(*arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    search = [*map(str, path), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", CODE, "selftest", "vllm", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_entry_point_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="lifeboat_cache.selftest", name="vllm")
    assert entry.load() is vllm_selftest.run


def test_kept_files_are_beside_the_store_and_private(home: Path, no_child: None) -> None:
    report = selftest(keep=True)
    (kept,) = home.parent.iterdir()
    assert str(kept) in report.facts["directory"]
    assert kept.stat().st_mode & 0o777 == 0o700
    assert (kept / "lifeboat.yaml").stat().st_mode & 0o777 == 0o600
    assert list((kept / "kv").rglob("*.segment"))


def test_no_agent_is_started_and_the_kernels_are_those_of_the_engines(
    home: Path, no_child: None
) -> None:
    compiled = home / "kernels" / "a-set" / "io.so"
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"machine code")
    selftest()
    assert compiled.exists()
    selftest(keep=True)
    (kept,) = home.glob(".lifeboat-selftest-*")
    assert not load_config(kept / "lifeboat.yaml").config.agent.autostart
    assert (kept / "home" / "kernels" / "a-set" / "io.so").read_bytes() == b"machine code"
    assert not list((kept / "home").glob("agent*"))
    assert os.listdir(home / "kernels") == ["a-set"]


def test_a_store_that_is_there_is_not_touched(home: Path, no_child: None) -> None:
    (home / "kv").mkdir(parents=True)
    selftest(keep=True)
    assert list((home / "kv").iterdir()) == []
    assert [path.name for path in home.iterdir() if path.name.startswith(".lifeboat-selftest-")]


def test_without_vllm_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = selftest()
    assert report.exit_code == 2
    assert "vLLM is not installed" in report.unable


def test_an_untested_version_is_said_and_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, no_child: None
) -> None:
    monkeypatch.setattr(vllm, "__version__", "9.1.0")
    report = selftest()
    assert step(report, "vLLM").status == "ok"
    assert "9.1.0 has not been tested" in step(report, "vLLM").summary
    assert report.facts["tested"] is False


def places(tmp_path: Path, *tiers: str) -> Config:
    file = tmp_path / "some.yaml"
    document = [
        {"name": f"t{number}", "type": "filesystem", "path": path}
        for number, path in enumerate(tiers)
    ]
    file.write_text(json.dumps({"storage": {"tiers": document}}))
    file.chmod(0o600)
    return load_config(file).config


def test_it_works_beside_the_target(tmp_path: Path) -> None:
    store = tmp_path / "disk" / "store"
    config = places(tmp_path, str(store))
    # Not there yet: in what is there of its path.
    assert scratch_parent(config.storage.places[0], config) == (tmp_path, True)
    store.mkdir(parents=True)
    assert scratch_parent(config.storage.places[0], config) == (store.parent, True)


def test_it_keeps_out_of_every_store(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    config = places(tmp_path, str(inner), str(inner.parent))
    temporary = Path(tempfile.gettempdir())
    assert scratch_parent(config.storage.places[0], config) == (temporary, False)
    # The root of a file system: what is beside it is on another one.
    config = places(tmp_path, "/dev/shm")
    assert scratch_parent(config.storage.places[0], config) == (temporary, False)


def test_no_room_for_a_directory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    report = selftest()
    assert report.exit_code == 2
    assert "No space left on device" in report.unable


# --- planted faults ---------------------------------------------------------------------------


def test_wrong_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LifeboatTier.submit_store

    def scribble(self: Any, job_metadata: Any) -> None:
        # Before the checksum is made: only a comparison of bytes can notice.
        memory = self._primary_kv_view.cast("B")
        memory[int(job_metadata.chunk_ids[3]) * self._primary_kv_view.strides[0] + 77] ^= 1
        memory.release()
        store(self, job_metadata)

    monkeypatch.setattr(LifeboatTier, "submit_store", scribble)
    report = selftest()
    assert report.exit_code == 1
    restored = step(report, "restore in another process")
    assert (restored.status, restored.summary) == (
        "failed",
        "wrong bytes in 1 chunks, the first is chunk 3",
    )
    assert "Do not use the cache" in restored.remedy
    assert not leftovers(report.facts["directory"])


def report_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    report = LifeboatTier.get_finished_jobs

    def twice(self: Any) -> list[JobResult]:
        return [result for result in report(self) for _ in range(2)]

    monkeypatch.setattr(LifeboatTier, "get_finished_jobs", twice)


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Namespace.from_identity({"engine": "any"}, {"model": "any"})
    monkeypatch.setattr("lifeboat_cache.integrations.vllm_tier.find_namespace", lambda *_: one)


def leave_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    cleanup = SharedOffloadRegion.cleanup

    def forget(self: Any) -> None:
        cleanup(self)
        Path(self.mmap_path).touch()

    monkeypatch.setattr(SharedOffloadRegion, "cleanup", forget)


def forget_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.ReqContext, "set_offload_key_position", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "name", "words"),
    [
        (report_twice, "job reports", "reported 2 times"),
        (share_everything, "another identity", "found 32 chunks"),
        (leave_shared_memory, "shared memory", "engines left /dev/shm/"),
        (forget_positions, "positions", "0 of a prompt's 32 keys"),
    ],
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    no_child: None,
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    words: str,
) -> None:
    plant(monkeypatch)
    report = selftest()
    assert report.exit_code == 1
    assert step(report, name).status == "failed", report.steps
    assert words in step(report, name).summary
    assert step(report, name).remedy
    assert not leftovers(report.facts["directory"])


def test_a_load_that_is_asked_for_again_and_again_is_noticed(
    monkeypatch: pytest.MonkeyPatch, no_child: None
) -> None:
    monkeypatch.setattr(vllm_selftest_engine, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(LifeboatTier, "lookup", lambda *_: base.LookupResult.HIT)
    report = selftest()
    assert step(report, "flipped byte").summary.startswith("TimeoutError")
    failed = step(report, "failed load")
    assert failed.status == "failed"
    assert "times in one request, instead of once" in failed.summary


def test_a_store_that_cannot_be_used_is_noticed(
    monkeypatch: pytest.MonkeyPatch, no_child: None
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LifeboatTier, "_identify", broken)
    report = selftest()
    stored = step(report, "store")
    assert stored.status == "failed"
    assert "not everything was stored" in stored.summary
    assert "doctor" in stored.remedy
    assert {step(report, name).status for name in AFTER_STORE} == {"skipped"}


def test_a_renamed_attribute_is_noticed(monkeypatch: pytest.MonkeyPatch, no_child: None) -> None:
    assert interface_problems() == []
    monkeypatch.delattr(base.ReqContext, "get_state")
    assert interface_problems() == ["vllm.v1.kv_offload.base has no ReqContext.get_state"]
    report = selftest()
    assert report.exit_code == 1
    assert step(report, "interface").status == "failed"


def test_a_changed_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def drain_jobs(self: Any, deadline: float) -> None: ...

    monkeypatch.setattr(SecondaryTierManager, "drain_jobs", drain_jobs)
    monkeypatch.delattr(SecondaryTierManager, "touch")
    problems = "\n".join(interface_problems())
    assert "calls a tier's drain_jobs with self, deadline" in problems
    assert "has no touch any more" in problems


def test_a_missing_hook_is_noticed(monkeypatch: pytest.MonkeyPatch, no_child: None) -> None:
    assert hook_problems() == []
    monkeypatch.delattr(scheduler, "_create_req_context")
    monkeypatch.delattr(EngineCore, "collective_rpc")
    problems = "\n".join(hook_problems())
    assert "has no _create_req_context" in problems
    assert "has no EngineCore.collective_rpc" in problems
    report = selftest()
    assert step(report, "hooks: found").status == "failed"
    assert step(report, "positions").status == "failed"


def test_a_hook_that_does_not_take_is_noticed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    # Imported by every Python process that finds it: a vLLM with other names.
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('vllm_selftest_child' in word for word in sys.orig_argv):\n"
        "    from vllm.v1.engine.core import EngineCore\n"
        "    EngineCore.say = EngineCore.set_weight_version\n"
        "    del EngineCore.set_weight_version\n"
    )
    done = command("--json", path=(site,))
    assert done.returncode == 1, done.stderr
    steps = {s["name"]: s for s in json.loads(done.stdout)["steps"]}
    assert steps["hooks: found"]["status"] == "ok"
    assert steps["hooks: installed"]["summary"] == "EngineCore.set_weight_version is not watched"
    assert steps["restore in another process"]["status"] == "ok"

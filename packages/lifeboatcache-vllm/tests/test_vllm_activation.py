"""Activation by one variable, on vLLM's real configuration of a launch."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny_llama
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from lifeboat_cache.config import load_config
from lifeboat_cache.engines.places import places_reason
from lifeboat_cache.engines.switch import is_enabled
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrations import (
    vllm_activation,
    vllm_memory,
    vllm_plugin,
)
from lifeboat_cache.registry import processes
from lifeboat_cache.targets.filesystem import FilesystemTarget

Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_llama.write(directory)
    return directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "lifeboat.yaml").write_text("engine: {native_cpu_gb: 0.5}\n")
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return home


@pytest.fixture
def launch(
    checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Launch:
    """Configure a launch with the plugin's hook in place; returns vLLM's configuration."""
    load_general_plugins()  # or the first launch does, and sets the logger up again
    # Whatever other plugins put around it is left out, and is back afterwards.
    plain = EngineArgs.create_engine_config
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    monkeypatch.setattr(EngineArgs, "create_engine_config", plain)
    monkeypatch.setattr(logging.getLogger("lifeboat_cache"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("lifeboat_cache"), "parent", logging.getLogger())
    caplog.set_level(logging.INFO, "lifeboat_cache")

    def start(*, offloads: bool = True, **arguments: Any) -> Any:
        vllm_activation.install(lambda: offloads)
        return EngineArgs(model=str(checkpoint), **arguments).create_engine_config()

    return start


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lifeboat_cache"]


def test_nothing_configured_gives_native_offloading_with_our_tier(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = launch().kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.engine_id
    assert transfer.kv_connector_extra_config == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 500_000_000,
        "lifeboat_chunk_tokens": 256,
        "secondary_tiers": [
            {"type": "LifeboatTier", "module_path": "lifeboat_cache.integrations.vllm_tier"}
        ],
    }
    (line,) = said(caplog)
    assert line.startswith("LifeboatCache is on: ")


def test_an_engine_without_the_cache_is_in_the_status(launch: Launch, home: Path) -> None:
    assert launch(offloads=False).kv_transfer_config is None
    give_up = time.monotonic() + 60
    while not (found := [entry for entry in processes(home) if entry.document]):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    (entry,) = found
    assert entry.alive
    assert entry.document["state"] == "disabled"
    assert entry.document["engine"]["name"] == "vllm"
    assert "offloads KV only on" in entry.document["reason"]


def test_a_transfer_configuration_of_the_launch_wins(launch: Launch) -> None:
    own = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config = launch(kv_transfer_config=own)
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"
    assert config.kv_transfer_config.kv_connector_extra_config == {}


def test_an_offloading_size_of_the_launch_wins(launch: Launch) -> None:
    transfer = launch(kv_offloading_size=1.0).kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_connector_extra_config == {"cpu_bytes_to_use": 1 << 30}


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ({"offloads": False}, {}, "only on CUDA, ROCm and XPU"),
        ({"enable_prefix_caching": False}, {}, "prefix caching is off"),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments"),
        ({"prefix_caching_hash_algo": "xxhash"}, {}, "PYTHONHASHSEED"),
        ({"runner": "pooling"}, {}, "run for pooling"),
    ],
    ids=["platform", "prefix-caching-off", "expandable-segments", "random-hashes", "pooling"],
)
def test_what_cannot_work_stands_down_with_one_line(
    launch: Launch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    environment: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch(**arguments).kv_transfer_config is None
    (line,) = said(caplog)
    assert line.startswith("LifeboatCache stands down")
    assert reason in line


def test_a_broken_configuration_file_stands_down(
    launch: Launch, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "lifeboat.yaml").write_text("engin: {}\n")
    assert launch().kv_transfer_config is None
    (line,) = said(caplog)
    assert "engin" in line
    assert "engine" in line


def test_too_little_memory_stands_down(
    launch: Launch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        vllm_activation, "available_memory", lambda: {"free space in /dev/shm": 64 << 20}
    )
    assert launch().kv_transfer_config is None
    (line,) = said(caplog)
    assert "/dev/shm" in line


@pytest.mark.parametrize(("memory", "later"), [(64 << 20, 100 << 30), (100 << 30, 64 << 20)])
def test_api_servers_decide_as_their_launcher_did(
    launch: Launch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    memory: int,
    later: int,
) -> None:
    # Another decision ends an API server at the engine's first statistics.
    monkeypatch.setenv(vllm_activation._DECIDED, "previous")
    monkeypatch.setattr(vllm_activation, "available_memory", lambda: {"memory": memory})
    launcher = launch(_api_process_count=2, _api_process_rank=-1).kv_transfer_config
    caplog.clear()
    # The engines have taken or freed it meanwhile.
    monkeypatch.setattr(vllm_activation, "available_memory", lambda: {"memory": later})
    for rank in range(2):
        server = launch(_api_process_count=2, _api_process_rank=rank).kv_transfer_config
        if launcher is None:
            assert server is None
        else:
            ours, theirs = launcher.kv_connector_extra_config, server.kv_connector_extra_config
            assert ours["cpu_bytes_to_use"] == theirs["cpu_bytes_to_use"]
            assert ours["secondary_tiers"] == theirs["secondary_tiers"]
    assert said(caplog) == []


def test_a_launch_does_not_follow_what_another_decided(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm_activation._DECIDED, "0")
    assert launch().kv_transfer_config is not None


def test_an_api_server_of_several_hosts_stands_down(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    config = launch(
        data_parallel_size=4, data_parallel_size_local=2, data_parallel_address="127.0.0.1"
    )
    assert config.kv_transfer_config is None
    assert "several hosts" in said(caplog)[-1]


@pytest.mark.parametrize(
    ("fields", "spread"),
    [
        ({}, False),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, False),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, True),
        ({"data_parallel_size": 4, "data_parallel_size_local": 0}, True),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "local_engines_only": True},
            False,
        ),
        (  # offline: each process has an engine of its own, and no API server
            {"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_rank_local": 0},
            False,
        ),
    ],
)
def test_who_reports_to_an_api_server_elsewhere(fields: dict[str, Any], spread: bool) -> None:
    assert vllm_activation._spread(SimpleNamespace(**fields)) is spread


def test_launches_side_by_side_share_what_is_there() -> None:
    limits = {"available memory": 100_000_000_000}
    assert vllm_memory.size_cpu_tier(20_000_000_000, 1, limits).bytes == 20_000_000_000
    each = vllm_memory.size_cpu_tier(20_000_000_000, 1, limits, launches=8).bytes
    assert 8 * each <= 60_000_000_000


def test_a_home_that_cannot_be_written_takes_no_memory(
    launch: Launch, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "kv").write_text("in the way")
    assert launch().kv_transfer_config is None
    (line,) = said(caplog)
    assert "stands down" in line
    assert str(home / "kv") in line


def test_a_tier_that_cannot_be_imported_does_not_stop_the_engines(
    launch: Launch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with distributions that do not fit together.
    monkeypatch.setitem(sys.modules, vllm_activation.TIER_MODULE, None)
    assert launch().kv_transfer_config is None
    (line,) = said(caplog)
    assert "stands down" in line


def test_another_place_is_used_where_the_first_cannot_be(
    launch: Launch, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    (home / "lifeboat.yaml").write_text(
        "engine: {native_cpu_gb: 0.5}\nstorage: {tiers: [{name: own, type: filesystem, "
        f"path: {tmp_path / 'file'}, min_free_gb: 0}}]}}\n"
    )
    assert launch().kv_transfer_config is not None


def test_a_place_that_hangs_does_not_hold_the_launch(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(FilesystemTarget, "probe", lambda _self: released.wait(60))
    reason = places_reason(load_config().config, patience_s=0.01)
    released.set()
    assert reason is not None
    assert "has not answered" in reason


def test_a_place_that_can_hang_is_not_asked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(FilesystemTarget, "probe", lambda self: asked.append(self.name))
    tier = "{{name: share, type: nfs, path: {}, min_free_gb: 0}}".format(tmp_path / "share")
    for fallback in ("true", "false"):
        (home / "lifeboat.yaml").write_text(
            f"storage: {{tiers: [{tier}], fallback_local: {{enabled: {fallback}}}}}\n"
        )
        assert places_reason(load_config().config) is None
    assert asked == ["fallback_local"]


def test_a_fault_of_ours_does_not_stop_the_launch(
    launch: Launch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, int]:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(vllm_activation, "available_memory", fail)
    assert launch().kv_transfer_config is None
    assert "a fault" in said(caplog)[0]


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("true", True), (" ON ", True), ("0", False), ("", False), ("no", False)],
)
def test_the_variable(value: str, on: bool) -> None:
    assert is_enabled({"LIFEBOAT_CACHE": value}) is on
    assert not is_enabled({})


def test_without_the_variable_launches_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LIFEBOAT_CACHE", raising=False)
    monkeypatch.setattr(
        vllm_activation, "install", lambda _: pytest.fail("a launch would be changed")
    )
    vllm_plugin.register()
    assert vllm_plugin.registered()


@pytest.mark.parametrize(("value", "lines"), [("enable", 1), ("0", 0), ("", 0)])
def test_a_misspelled_variable_is_said_once(
    value: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIFEBOAT_CACHE", value)
    monkeypatch.setattr(vllm_plugin, "_registered", False)
    vllm_plugin.register()
    found = [record.getMessage() for record in caplog.records]
    assert sum("LIFEBOAT_CACHE=enable is neither on nor off" in line for line in found) == lines
    monkeypatch.setattr(vllm_plugin, "_registered", False)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    caplog.clear()
    vllm_plugin.register()
    assert not caplog.records


def test_ranks_of_a_host_share_the_memory() -> None:
    tier = vllm_memory.size_cpu_tier(8 << 30, 4, {"available memory": 100 << 30})
    assert tier.bytes == 2 << 30
    assert tier.reason == "engine.native_cpu_gb"


def test_the_scarcest_memory_decides_and_some_is_left() -> None:
    tier = vllm_memory.size_cpu_tier(
        20_000_000_000,
        1,
        {"available memory": 100 << 30, "memory left in this cgroup": 10 << 30},
    )
    assert 5 << 30 < tier.bytes < 8 << 30
    assert "cgroup" in tier.reason
    assert vllm_memory.size_cpu_tier(20 << 30, 1, {"available memory": 2 << 30}).bytes == 0


@pytest.mark.parametrize(
    ("free", "tier"),
    [(64 << 20, 0), (512 << 20, 384 << 20), (2 << 30, 1536 << 20), (32 << 30, 30 << 30)],
)
def test_a_container_with_little_shared_memory_gets_most_of_it(free: int, tier: int) -> None:
    # `docker run --shm-size=2g` is what many people write.
    limits = {"free space in /dev/shm": free, "available memory": 1 << 40}
    assert vllm_memory.size_cpu_tier(100 << 30, 1, limits).bytes == tier


def _cgroup(root: Path, path: str, limit: str, used: int, files: dict[str, str]) -> None:
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / files["limit"]).write_text(f"{limit}\n")
    (directory / files["usage"]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{files['cache']} {1 << 20}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_cgroups_are_seen(tmp_path: Path, version: int) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50000000 kB\n")
    if version == 2:
        (proc / "self" / "cgroup").write_text("0::/pod/container\n")
        files = {
            "limit": "memory.max",
            "usage": "memory.current",
            "cache": "inactive_file",
        }
        base, none = groups, "max"
    else:
        (proc / "self" / "cgroup").write_text("5:cpu,memory:/pod/container\n0::/\n")
        files = {
            "limit": "memory.limit_in_bytes",
            "usage": "memory.usage_in_bytes",
            "cache": "total_inactive_file",
        }
        base, none = groups / "memory", str((1 << 63) - 4096)
    _cgroup(base, "pod/container", none, 5 << 20, files)
    _cgroup(base, "pod", str(64 << 20), 10 << 20, files)
    limits = vllm_memory.available_memory(shm=tmp_path, proc=proc, cgroups=groups)
    # 64 MiB less 10 MiB in use, of which 1 MiB is page cache.
    assert limits["memory left in this cgroup"] == 55 << 20
    assert limits["available memory"] == 50_000_000 * 1024
    assert limits["free space in /dev/shm"] > 0


def _mode_lmcache(
    home: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None] | None
) -> None:
    """Choose the mode `lmcache`, with a connector whose ``prepare`` is this, or with none."""
    (home / "lifeboat.yaml").write_text("engine: {vllm_mode: lmcache}\n")
    name = vllm_activation._CONNECTOR_MODULE
    if prepare is None:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda wanted, *rest: None if wanted == name else found(wanted, *rest),
        )
    else:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.prepare = prepare  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


def test_the_mode_lmcache_takes_our_connector_on_any_platform(
    launch: Launch, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = []
    _mode_lmcache(home, monkeypatch, lambda config, loaded: prepared.append(config))
    config = launch(offloads=False)
    assert config.kv_transfer_config.kv_connector == "LifeboatConnector"
    assert config.kv_transfer_config.kv_connector_module_path == vllm_activation._CONNECTOR_MODULE
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert prepared == [config]
    assert any("LMCache with a server on port 6555" in line for line in said(caplog))


def test_the_mode_lmcache_stands_down_without_lmcache(
    launch: Launch, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _mode_lmcache(home, monkeypatch, None)
    assert launch().kv_transfer_config is None
    assert any("lifeboatcache-lmcache is not installed" in line for line in said(caplog))


def test_the_mode_lmcache_stands_down_where_its_server_does_not_start(
    launch: Launch, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(config: Any, loaded: Any) -> None:
        raise LifeboatError("the LMCache server did not start: see its log")

    _mode_lmcache(home, monkeypatch, fail)
    assert launch().kv_transfer_config is None
    assert any("did not start: see its log" in line for line in said(caplog))


def test_an_explicit_choice_wins_over_the_mode_lmcache(
    launch: Launch, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mode_lmcache(home, monkeypatch, lambda config, loaded: pytest.fail("it was prepared"))
    chosen = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config = launch(kv_transfer_config=chosen)
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"

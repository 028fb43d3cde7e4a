"""Activation by one variable, on SGLang's real resolution of a launch's arguments."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang
import tiny_llama
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from lifeboat_cache import kernels
from lifeboat_cache.integrations import (
    sglang_activation,
    sglang_memory,
    sglang_plugin,
    sglang_standdown,
)
from lifeboat_cache.integrations.sglang_activation import BACKEND_MODULE, DECISION
from lifeboat_cache.integrations.sglang_memory import HostPool, size_host_pool
from lifeboat_cache.integrations.sglang_settings import SettingsError, read_settings
from lifeboat_cache.registry import processes

Launch = Callable[..., Any]

GB = 1_000_000_000
CPU = {"device": "cpu", "attention_backend": "torch_native"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny_llama.write(directory)
    return directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("LIFEBOAT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return home


@pytest.fixture(scope="module")
def hooked() -> Iterator[None]:
    """The plugin's hook is in place; launches of other modules' tests go without it."""
    load_plugins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerArgs, "resolve_once", ServerArgs.resolve_once)
        sglang_activation.install(sglang_plugin._can_offload)
        yield


@pytest.fixture
def launch(
    hooked: None,
    checkpoint: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Launch:
    """Resolve the arguments of a launch with the plugin's hook in place."""
    monkeypatch.setattr(sglang_plugin, "_platform_check", lambda _launch: True)
    ample = {"available memory": 100 * GB}
    monkeypatch.setattr(sglang_activation, "available_ram", lambda: ample)
    caplog.set_level(logging.INFO, "lifeboat_cache")

    def start(*, command: str = "", **arguments: Any) -> Any:
        server_args = ServerArgs(**{"model_path": str(checkpoint), **CPU, **arguments})
        server_args._launch_command = command
        server_args.resolve_once()
        return server_args

    return start


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lifeboat_cache"]


def stands_down(caplog: pytest.LogCaptureFixture, word: str) -> bool:
    (line,) = said(caplog)
    return line.startswith("LifeboatCache stands down, SGLang runs without it: ") and word in line


def resolved(server_args: Any) -> dict[str, Any]:
    """What SGLang goes by, but for the seed, which is drawn."""
    found: dict[str, Any] = server_args.resolved_dict()
    return {name: value for name, value in found.items() if name != "random_seed"}


def plain(checkpoint: Path, **arguments: Any) -> Any:
    """The same launch without LifeboatCache."""
    server_args = ServerArgs(**{"model_path": str(checkpoint), **CPU, **arguments})
    server_args._launch_command = ""
    original = ServerArgs.resolve_once.__wrapped__
    original(server_args)
    return server_args


def outcome(start: Launch, *given: Any, **arguments: Any) -> tuple[dict[str, Any], str | None]:
    """What SGLang goes by, or why it refuses."""
    try:
        return resolved(start(*given, **arguments)), None
    except Exception as error:
        return {}, repr(error)


def test_nothing_chosen_gives_the_hierarchical_cache_with_our_backend(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    view = resolving_view(launch())
    assert view.enable_hierarchical_cache
    assert view.hicache_storage_backend == "dynamic"
    assert json.loads(view.hicache_storage_backend_extra_config) == {
        "backend_name": "lifeboat",
        "module_path": "lifeboat_cache.integrations.sglang_backend",
        "class_name": "LifeboatHiCacheStorage",
        "interface_v1": 1,
    }
    assert view.page_size == 64
    assert view.hicache_size == 10
    assert view.hicache_host_memory_fraction is None
    assert view.hicache_write_policy == "write_through"
    (line,) = said(caplog)
    assert line.startswith("LifeboatCache is on: hierarchical cache, host pool of 10 GB per rank")
    assert "pages of 64 tokens, write_through, zero copy" in line


def test_the_decision_reaches_the_schedulers(launch: Launch) -> None:
    import pickle  # as multiprocessing does

    received = pickle.loads(pickle.dumps(launch()))  # noqa: S301
    decision = sglang_activation.decision_of(received)
    assert decision is not None
    assert decision["staging_pages"] == 16
    received.resolve_once()
    assert resolving_view(received).page_size == 64


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"page_size": 32}, {"page_size": 32, "hicache_size": 10}),
        ({"page_size": 1}, {"page_size": 1}),
        ({"hicache_size": 3}, {"hicache_size": 3, "page_size": 64}),
        ({"hicache_ratio": 1.5}, {"hicache_size": 0, "hicache_ratio": 1.5}),
        (
            {"hicache_host_memory_fraction": 0.2},
            {"hicache_size": 0, "hicache_host_memory_fraction": 0.2},
        ),
        (
            {"enable_hierarchical_cache": True},
            {"hicache_size": 0, "hicache_ratio": 2.0, "hicache_host_memory_fraction": 0.8},
        ),
        ({"hicache_mem_layout": "layer_first"}, {"hicache_mem_layout": "layer_first"}),
        ({"hicache_write_policy": "write_back"}, {"hicache_write_policy": "write_back"}),
        (
            {"hicache_storage_prefetch_policy": "wait_complete"},
            {"hicache_storage_prefetch_policy": "wait_complete"},
        ),
    ],
)
def test_what_the_launch_says_wins(
    launch: Launch, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    view = resolving_view(launch(**arguments))
    assert view.hicache_storage_backend == "dynamic"
    assert {name: getattr(view, name) for name in fields} == fields


def test_a_storage_backend_of_the_launch_wins(
    launch: Launch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
    assert resolved(launch(**own)) == resolved(plain(checkpoint, **own))
    (line,) = said(caplog)
    assert "chooses a storage backend itself" in line


def test_thresholds_of_the_launch_are_kept(launch: Launch) -> None:
    given = '{"prefetch_threshold": 64, "prefetch_timeout_base": 3}'
    view = resolving_view(launch(hicache_storage_backend_extra_config=given))
    config = json.loads(view.hicache_storage_backend_extra_config)
    assert config["prefetch_threshold"] == 64
    assert config["prefetch_timeout_base"] == 3
    assert config["module_path"] == BACKEND_MODULE
    assert config["interface_v1"] == 1


def test_the_variables(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HOST_GB": "4.5",
        "PAGE_SIZE": "128",
        "STAGING_TOKENS": "256",
        "WRITE_POLICY": "write_through_selective",
        "ZERO_COPY": "0",
    }.items():
        monkeypatch.setenv(f"LIFEBOAT_SGLANG_{name}", value)
    server_args = launch()
    view = resolving_view(server_args)
    assert view.hicache_size == 4.5
    assert view.page_size == 128
    assert view.hicache_write_policy == "write_through_selective"
    assert json.loads(view.hicache_storage_backend_extra_config)["interface_v1"] == 0
    assert getattr(server_args, DECISION)["staging_pages"] == 2


@pytest.mark.parametrize(
    "command",
    [
        "--model-path m --hicache-write-policy write_through",
        "--hicache-write-policy=write_through",
        "Engine(model_path='m', hicache_write_policy='write_through')",
    ],
)
def test_a_write_policy_of_the_launch_wins(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("LIFEBOAT_SGLANG_WRITE_POLICY", "write_back")
    assert resolving_view(launch(command=command)).hicache_write_policy == "write_through"
    assert resolving_view(launch()).hicache_write_policy == "write_back"


def test_the_pool_is_for_every_rank_of_the_host(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def size(wanted: Any, ranks: int, *_: Any, **__: Any) -> HostPool:
        seen.append(ranks)
        return HostPool(2 * GB, "so")

    monkeypatch.setattr(sglang_activation, "size_host_pool", size)
    launch(tp_size=2)
    launch(tp_size=4, dp_size=2, enable_dp_attention=True)
    launch(tp_size=2, dp_size=2)
    assert seen == [2, 4, 4]


def test_sglang_has_the_default_that_is_taken_for_no_choice() -> None:
    launch = ServerArgs(model_path="m")
    assert launch.hicache_host_memory_fraction == sglang_activation._DEFAULT_FRACTION
    assert launch.hicache_write_policy == "write_through"
    assert launch.page_size is None
    assert launch.hicache_size == 0
    assert launch.hicache_ratio is None


def test_sglang_keeps_the_reserve_that_the_doctor_counts_with() -> None:
    source = Path(str(base.__file__)).read_text()
    assert "HICACHE_HOST_MEMORY_RESERVE_BYTES: int = 10 * (1024**3)" in source
    assert sglang_memory.RESERVE_BYTES == 10 << 30


# --- standing down ---------------------------------------------------------------------------

#: Launches for each entry of the table, with a word of what is said. The first resolve here as
#: they are; a machine without an accelerator refuses the others with and without us.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"disable_radix_cache": True}, "--disable-radix-cache"),
    ({"radix_cache_backend": "somebodys"}, "--radix-cache-backend"),
    ({"enable_lmcache": True}, "--enable-lmcache"),
    ({"enable_flexkv": True}, "--enable-flexkv"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ({"enable_int8_mamba_checkpoint": True}, "--enable-int8-mamba-checkpoint"),
    ({"disaggregation_mode": "prefill"}, "prefill or decode role"),
    ({"disaggregation_mode": "decode"}, "prefill or decode role"),
    ({"encoder_only": True}, "encoder"),
    ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
    ({"dcp_size": 2, "tp_size": 2}, "--dcp-size"),
    ({"dllm_algorithm": "LowConfidence"}, "diffusion"),
    ({"is_embedding": True}, "embedding"),
    ({"prefill_only_disable_kv_cache": True}, "--prefill-only-disable-kv-cache"),
    ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "localhost:1"}, "hosts"),
    ({"use_ray": True}, "Ray"),
    ({"load_format": "remote_instance"}, "--load-format"),
]


@pytest.mark.parametrize(("arguments", "word"), REFUSED, ids=[str(a) for a, _ in REFUSED])
def test_a_launch_that_excludes_the_cache_goes_as_without_it(
    launch: Launch,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    word: str,
) -> None:
    expected, refusal = outcome(plain, checkpoint, **arguments)
    caplog.clear()
    assert outcome(launch, **arguments) == (expected, refusal)
    assert stands_down(caplog, word) if refusal is None else not said(caplog)
    # What would be said where SGLang takes the launch.
    reason = sglang_standdown.standdown_reason(SimpleNamespace(**arguments), {})
    assert reason is not None
    assert word in reason


def test_every_entry_of_the_table_is_tested() -> None:
    for applies, reason in sglang_standdown.TABLE:
        assert any(applies(SimpleNamespace(**arguments)) for arguments, _ in REFUSED), reason
    assert sglang_standdown.standdown_reason(SimpleNamespace(), {}) is None


def test_every_reason_ends_in_a_remedy() -> None:
    for _, reason in (*sglang_standdown.TABLE, *sglang_standdown.MLX_TABLE):
        assert ": " in reason
        assert not reason.endswith(".")


#: The same of the table for the MLX backend.
REFUSED_WITH_MLX: list[tuple[dict[str, Any], str]] = [
    ({"enable_lora": True}, "adapters"),
    ({"lora_paths": ["somewhere"]}, "adapters"),
    ({"speculative_algorithm": "NGRAM"}, "speculative"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
]


@pytest.fixture
def with_mlx(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """As ``launch``, on SGLang's MLX backend, whose own checks of the machine are passed."""
    monkeypatch.setenv("SGLANG_USE_MLX", "1")
    return launch


def test_the_mlx_backend_gets_our_prefix_cache(
    with_mlx: Launch, caplog: pytest.LogCaptureFixture, checkpoint: Path
) -> None:
    server_args = with_mlx()
    view = resolving_view(server_args)
    assert view.radix_cache_backend == "lifeboat"
    assert not view.enable_hierarchical_cache
    assert view.page_size == 1
    (line,) = said(caplog)
    assert line.startswith("LifeboatCache is on: prefix cache of SGLang's MLX backend, config")
    expected = {**resolved(plain(checkpoint)), "radix_cache_backend": "lifeboat"}
    assert resolved(server_args) == expected


def test_a_prefix_cache_that_an_mlx_launch_names_is_kept(
    with_mlx: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("lifeboat", "somebodys"):
        caplog.clear()
        assert resolving_view(with_mlx(radix_cache_backend=name)).radix_cache_backend == name
        if name == "lifeboat":
            assert said(caplog) == []
        else:
            assert stands_down(caplog, "--radix-cache-backend")


@pytest.mark.parametrize(("arguments", "word"), REFUSED_WITH_MLX)
def test_an_mlx_launch_that_excludes_the_cache(arguments: dict[str, Any], word: str) -> None:
    reason = sglang_standdown.standdown_reason(
        SimpleNamespace(**arguments), {"SGLANG_USE_MLX": "1"}
    )
    assert reason is not None
    assert word in reason


def test_every_entry_of_the_table_for_mlx_is_tested() -> None:
    for applies, reason in sglang_standdown.MLX_TABLE:
        assert any(applies(SimpleNamespace(**one)) for one, _ in REFUSED_WITH_MLX), reason


def test_a_platform_without_host_pools(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang_plugin, "_platform_check", sglang_plugin._offloads_here)
    view = resolving_view(launch())
    assert not view.enable_hierarchical_cache
    assert view.page_size == 1
    assert stands_down(caplog, "CUDA, ROCm and XPU only")


def test_what_sglang_refuses_goes_as_without_it(
    launch: Launch,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # As a combination that is in no table: SGLang itself says no.
    monkeypatch.setattr(sglang_standdown, "TABLE", ())
    expected = resolved(plain(checkpoint, disable_radix_cache=True))
    caplog.clear()
    environ = dict(os.environ)
    server_args = launch(disable_radix_cache=True)
    assert resolved(server_args) == expected
    assert dict(os.environ) == environ
    assert sglang_activation.decision_of(server_args) is None
    assert stands_down(caplog, "mutually exclusive")


def test_what_a_refused_resolution_left_is_gone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(server_args: Any) -> None:
        if sglang_activation.decision_of(server_args) is not None:
            os.environ["LIFEBOAT_LEFT_OVER"] = "1"
            os.environ["SGLANG_USE_CPU_ENGINE"] = "0"
            raise RuntimeError("no")

    monkeypatch.setattr(sglang_activation, "_check", refuse)
    server_args = launch()
    assert "LIFEBOAT_LEFT_OVER" not in os.environ
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert not resolving_view(server_args).enable_hierarchical_cache


def test_pages_that_do_not_fit_are_left_to_sglang(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    view = resolving_view(launch(chunked_prefill_size=1000))
    assert view.hicache_storage_backend == "dynamic"
    assert view.page_size == 1
    assert "pages of 1 tokens" in said(caplog)[-1]


def test_a_launch_that_is_wrong_fails_as_without_it(
    launch: Launch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="fraction") as expected:
        plain(checkpoint, hicache_host_memory_fraction=7.0)
    with pytest.raises(ValueError, match="fraction") as raised:
        launch(hicache_host_memory_fraction=7.0)
    assert str(raised.value) == str(expected.value)
    assert said(caplog) == []


def test_too_little_memory(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang_activation, "available_ram", lambda: {"available memory": GB})
    assert not resolving_view(launch()).enable_hierarchical_cache
    assert stands_down(caplog, "too little memory")


def test_a_home_that_cannot_be_written(
    launch: Launch, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "kv").write_text("in the way")
    assert not resolving_view(launch()).enable_hierarchical_cache
    assert stands_down(caplog, str(home / "kv"))


def test_a_configuration_that_is_wrong(
    launch: Launch, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "lifeboat.yaml").write_text("storage: {tears: []}\n")
    assert not resolving_view(launch()).enable_hierarchical_cache
    assert stands_down(caplog, "tears")


def test_a_variable_that_is_wrong(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIFEBOAT_SGLANG_PAGE_SIZE", "many")
    assert not resolving_view(launch()).enable_hierarchical_cache
    assert stands_down(caplog, "LIFEBOAT_SGLANG_PAGE_SIZE")


def test_a_backend_that_cannot_be_imported(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As with distributions that do not fit together.
    monkeypatch.setitem(sys.modules, BACKEND_MODULE, None)
    assert not resolving_view(launch()).enable_hierarchical_cache
    assert stands_down(caplog, BACKEND_MODULE)


def test_a_fault_of_ours_does_not_stop_the_launch(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, int]:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(sglang_activation, "available_ram", fail)
    assert not resolving_view(launch()).enable_hierarchical_cache
    assert stands_down(caplog, "a fault")


def test_an_engine_without_the_cache_is_in_the_status(launch: Launch, home: Path) -> None:
    launch(disable_radix_cache=True)
    give_up = time.monotonic() + 60
    while not (found := [entry for entry in processes(home) if entry.document]):
        assert time.monotonic() < give_up
        time.sleep(0.01)
    (entry,) = found
    assert entry.document["state"] == "disabled"
    assert entry.document["engine"]["name"] == "sglang"
    assert entry.document["engine"]["version"] == sglang.__version__
    assert "--disable-radix-cache" in entry.document["reason"]


# --- the sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "ranks", "available", "device", "size"),
    [
        (None, 1, 30, None, 3),
        (None, 1, 1000, None, 16),  # no more than 16 GB
        (None, 1, 18, None, 2),  # no less than 2 GB
        (None, 4, 200, None, 16),
        (None, 8, 100, None, None),  # not so much for each of them
        (5 * GB, 1, 100, None, 5),
        (500 * GB, 1, 100, None, None),
        ("auto", 1, 1000, 80, 160),
        ("auto", 8, 1000, 80, (1000 - 10.737) / 16),
        ("auto", 1, 30, None, 3),  # an accelerator of unknown memory
    ],
)
def test_the_size_of_the_host_pool(
    wanted: int | str | None, ranks: int, available: int, device: int | None, size: float | None
) -> None:
    limits = {"available memory": available * GB, "memory left in this cgroup": 5000 * GB}
    pool = size_host_pool(
        wanted, ranks, limits, device_bytes=None if device is None else device * GB
    )
    if size is None:
        # As much as leaves SGLang its reserve, and each rank room for its processes.
        assert 0 < ranks * pool.bytes < (available - 10.7) * GB - ranks * 3 * GB
        assert "available memory" in pool.reason
    else:
        assert pool.bytes == pytest.approx(size * GB, rel=0.001)
    assert pool.gigabytes * GB <= pool.bytes


def test_the_scarcest_memory_decides() -> None:
    limits = {"available memory": 500 * GB, "memory left in this cgroup": 16 * GB}
    pool = size_host_pool(None, 1, limits)
    assert 1 * GB < pool.bytes < 3 * GB
    assert size_host_pool(None, 1, {"available memory": 13 * GB}).bytes == 0
    assert size_host_pool(None, 1, {}).bytes == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOST_GB", "much"),
        ("HOST_GB", "0"),
        ("HOST_GB", "-3"),
        ("HOST_GB", "nan"),
        ("PAGE_SIZE", "0"),
        ("PAGE_SIZE", "6.5"),
        ("STAGING_TOKENS", "-1"),
        ("WRITE_POLICY", "sometimes"),
        ("ZERO_COPY", "perhaps"),
    ],
)
def test_a_variable_says_what_it_takes(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"LIFEBOAT_SGLANG_{name}=.*: set it to"):
        read_settings({f"LIFEBOAT_SGLANG_{name}": value})


def test_variables_that_are_empty_say_nothing() -> None:
    names = ("HOST_GB", "PAGE_SIZE", "STAGING_TOKENS", "WRITE_POLICY", "ZERO_COPY")
    assert read_settings({f"LIFEBOAT_SGLANG_{name}": " " for name in names}) == read_settings({})


# --- without the variable --------------------------------------------------------------------


def test_without_the_variable_launches_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIFEBOAT_CACHE", raising=False)
    monkeypatch.setattr(sglang_plugin, "_registered", False)
    monkeypatch.setattr(
        sglang_activation, "install", lambda _: pytest.fail("a launch would be changed")
    )
    sglang_plugin.register()
    assert sglang_plugin.registered()


@pytest.mark.parametrize(("value", "lines"), [("enable", 1), ("0", 0), ("", 0)])
def test_a_misspelled_variable_is_said_once(
    value: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIFEBOAT_CACHE", value)
    monkeypatch.setattr(sglang_plugin, "_registered", False)
    sglang_plugin.register()
    found = [record.getMessage() for record in caplog.records]
    assert sum("LIFEBOAT_CACHE=enable is neither on nor off" in line for line in found) == lines
    monkeypatch.setattr(sglang_plugin, "_registered", False)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    caplog.clear()
    sglang_plugin.register()
    assert not caplog.records


# --- in the scheduler ------------------------------------------------------------------------


class Cache:
    """A tree cache that notes what is done to it."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def release_host_resources(self) -> None:
        self.ended.append("release")


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, home: Path) -> Any:
    from lifeboat_cache.integrations import sglang_fallback

    switched: list[Any] = []
    monkeypatch.setattr(sglang_fallback, "_switch_off", switched.append)
    return SimpleNamespace(server_args=SimpleNamespace(**{DECISION: {}}), switched=switched)


@pytest.mark.parametrize("on", [True, False])
def test_a_scheduler_that_uses_us_loads_kernels_while_it_loads_its_model(
    monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from lifeboat_cache.integrations import sglang_kernels

    loaded = threading.Event()

    def init_model_worker(self: Any) -> bool:
        # The model is not waited for.
        return loaded.wait(60) if on else not loaded.is_set()

    monkeypatch.setattr(Scheduler, "init_model_worker", init_model_worker)
    monkeypatch.setattr(kernels, "load", loaded.set)
    sglang_kernels.install()
    wrapped = Scheduler.init_model_worker
    sglang_kernels.install()
    assert Scheduler.init_model_worker is wrapped
    args = SimpleNamespace(**({DECISION: {}} if on else {}))
    assert wrapped(SimpleNamespace(server_args=args))
    assert loaded.is_set() == on


def test_a_scheduler_that_cannot_build_the_cache_goes_on_without(
    scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from lifeboat_cache.integrations.sglang_fallback import _build

    asked: list[Any] = []

    def build(**options: Any) -> str:
        asked.append(options["enable_hierarchical_cache"])
        if options["enable_hierarchical_cache"]:
            raise ValueError("Not enough host memory available.\nmore")
        return "a cache"

    answer = _build(scheduler, build, (), {"enable_hierarchical_cache": True})
    assert answer == "a cache"
    assert asked == [True, False]
    assert scheduler.switched == [scheduler]
    assert stands_down(caplog, "(Not enough host memory available)")


def test_ranks_go_without_the_cache_together(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lifeboat_cache.integrations import sglang_fallback

    told: list[bool] = []

    def another_fails(good: bool) -> bool:
        told.append(good)
        return False

    monkeypatch.setattr(sglang_fallback, "_all_ranks", another_fails)
    built: list[Any] = []

    def build(**options: Any) -> Any:
        built.append(SimpleNamespace(tree_cache=Cache()))
        return built[-1]

    answer = sglang_fallback._build(scheduler, build, (), {"enable_hierarchical_cache": True})
    assert told == [True]
    assert answer is built[1]
    assert built[0].tree_cache.ended == ["shutdown", "release"]
    assert built[1].tree_cache.ended == []
    assert stands_down(caplog, "another rank")


def test_a_failure_without_the_cache_is_a_failure(scheduler: Any) -> None:
    from lifeboat_cache.integrations.sglang_fallback import _build

    def build(**options: Any) -> None:
        raise ValueError(f"no memory, {options['enable_hierarchical_cache']}")

    with pytest.raises(ValueError, match="no memory, False"):
        _build(scheduler, build, (), {"enable_hierarchical_cache": True})


def test_the_staging_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.mem_cache.pool_host import mha

    from lifeboat_cache.integrations.sglang_staging import bound

    name = "_WRITE_BACK_STAGING_PAGE_CHUNK"
    modules: tuple[ModuleType, ...] = (base, mha, kv_cache_builder)
    before = [
        (module, getattr(module, name))
        for key, module in list(sys.modules.items())
        if key.startswith("sglang.srt.mem_cache.") and hasattr(module, name)
    ]
    assert {module for module, _ in before} >= set(modules)
    assert {value for _, value in before} == {64}
    for module, value in before:
        monkeypatch.setattr(module, name, value)  # put back afterwards
    bound(16)
    assert {getattr(module, name) for module, _ in before} == {16}
    bound(1000)  # never more than SGLang itself
    assert {getattr(module, name) for module, _ in before} == {16}

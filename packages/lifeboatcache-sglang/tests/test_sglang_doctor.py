from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lifeboat_cache.config import load_config
from lifeboat_cache.doctor import DoctorContext
from lifeboat_cache.integrations import sglang_doctor
from lifeboat_cache.integrations.sglang_doctor import (
    check_activation,
    check_engine,
    check_filter,
    check_host_pool,
    check_platform,
    check_plugin,
    check_settings,
    checks,
)

ENVIRON = {"HOME": "/home/somebody"}
GB = 1_000_000_000


@pytest.mark.parametrize(
    ("version", "importable", "status", "word"),
    [
        ("0.5.23", True, "ok", "sglang 0.5.23"),
        ("0.5.23.post1", True, "ok", "0.5.23"),
        ("0.5.23+cu129", True, "ok", "0.5.23"),
        ("0.5.22", True, "warn", "sglang 0.5.22"),
        ("0.5.24", True, "warn", "sglang 0.5.24"),
        ("0.5.230", True, "warn", "sglang 0.5.230"),
        ("0.5.23rc1", True, "warn", "0.5.23rc1"),
        (None, True, "warn", "unknown version"),
        (None, False, "skip", "not installed"),
    ],
)
def test_the_version(version: str | None, importable: bool, status: str, word: str) -> None:
    check = check_engine(version, importable)
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status != "ok")


def test_without_sglang_nothing_else_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_doctor, "engine_version", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = list(checks(DoctorContext(ENVIRON, load_config(None, ENVIRON))))
    assert [check.status for check in found] == ["skip"]


def test_with_sglang_everything_is_checked() -> None:
    found = list(checks(DoctorContext(ENVIRON, load_config(None, ENVIRON))))
    assert [check.name for check in found] == [
        "SGLang: version",
        "SGLang: plugin",
        "SGLang: SGLANG_PLUGINS",
        "SGLang: LIFEBOAT_CACHE",
        "SGLang: platform",
        "SGLang: a launch gets",
        "SGLang: host pool",
    ]


def test_sglang_itself_is_not_imported() -> None:
    code = (
        "import os, sys; from lifeboat_cache.config import load_config; "
        "from lifeboat_cache.doctor import DoctorContext; "
        "from lifeboat_cache.integrations.sglang_doctor import checks; "
        "list(checks(DoctorContext(os.environ, load_config(environ={'HOME': '/h'})))); "
        "print(sorted({'sglang', 'torch'} & set(sys.modules)))"
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


@pytest.mark.parametrize(
    ("registered", "status", "word"),
    [
        ([("lifeboat_cache", "lifeboat_sglang_entry:register")], "ok", "is registered"),
        ([("other", "other:register")], "fail", "not installed here"),
        ([], "fail", "not installed here"),
        ([("lifeboat_cache", "other:register")], "fail", "something else: other:register"),
    ],
)
def test_the_plugin(
    monkeypatch: pytest.MonkeyPatch, registered: list[tuple[str, str]], status: str, word: str
) -> None:
    asked = []

    def entry_points(*, group: str) -> importlib.metadata.EntryPoints:
        asked.append(group)
        return importlib.metadata.EntryPoints(
            importlib.metadata.EntryPoint(name, value, group) for name, value in registered
        )

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    check = check_plugin()
    assert asked == ["sglang.srt.plugins"]
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status != "ok")


def test_the_entry_is_the_one_that_this_distribution_declares() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    assert points["sglang.srt.plugins"] == {sglang_doctor.PLUGIN: sglang_doctor._ENTRY}
    assert points["lifeboat_cache.doctor"]["sglang"] == f"{sglang_doctor.__name__}:checks"


@pytest.mark.parametrize(
    ("value", "status", "remedy"),
    [
        (None, "ok", ""),
        ("", "ok", ""),  # as SGLang takes it
        ("lifeboat_cache", "ok", ""),
        ("a, lifeboat_cache ,b", "ok", ""),
        ("a,b", "fail", "export SGLANG_PLUGINS=a,b,lifeboat_cache"),
    ],
)
def test_the_filter(value: str | None, status: str, remedy: str) -> None:
    check = check_filter({} if value is None else {"SGLANG_PLUGINS": value})
    assert (check.status, check.remedy) == (status, remedy)


@pytest.mark.parametrize(
    ("value", "status", "word"),
    [
        (None, "ok", "not set"),
        ("1", "ok", "on, unless"),
        ("0", "ok", "off"),
        ("maybe", "warn", "neither on nor off"),
    ],
)
def test_the_switch(value: str | None, status: str, word: str) -> None:
    check = check_activation({} if value is None else {"LIFEBOAT_CACHE": value})
    assert check.status == status
    assert word in check.summary


@pytest.mark.parametrize(("device", "status"), [("kfd", "ok"), ("shm", "warn")])
def test_a_machine_without_an_accelerator_is_said(device: str, status: str, tmp_path: Path) -> None:
    (tmp_path / device).touch()
    check = check_platform(tmp_path)
    assert check.status == status
    assert bool(check.remedy) == (status == "warn")


def test_what_a_launch_gets() -> None:
    check = check_settings({})
    assert check.status == "ok"
    assert "pages of 64 tokens, the write policy of the launch" in check.summary
    assert "zero copy" in check.summary
    check = check_settings(
        {
            "LIFEBOAT_SGLANG_PAGE_SIZE": "32",
            "LIFEBOAT_SGLANG_WRITE_POLICY": "write_back",
            "LIFEBOAT_SGLANG_STAGING_TOKENS": "0",
            "LIFEBOAT_SGLANG_ZERO_COPY": "0",
        }
    )
    assert "pages of 32 tokens, write_back, the staging buffer that SGLang has, copying" in (
        check.summary
    )
    check = check_settings({"LIFEBOAT_SGLANG_PAGE_SIZE": "many"})
    assert check.status == "warn"
    assert "LIFEBOAT_SGLANG_PAGE_SIZE" in check.summary


@pytest.mark.parametrize(
    ("wanted", "available", "status", "word"),
    [
        ("", 100, "ok", "gets 10.0 GB: 10%"),
        ("5", 100, "ok", "gets 5.0 GB: as configured"),
        ("90", 100, "warn", "instead of 90.0 GB"),
        ("auto", 100, "ok", "by the accelerator's memory"),
        ("", 11, "warn", "too little memory"),
        ("much", 100, "skip", "not valid"),
    ],
)
def test_memory_for_the_host_pool(wanted: str, available: int, status: str, word: str) -> None:
    environ = {"LIFEBOAT_SGLANG_HOST_GB": wanted}
    check = check_host_pool(environ, {"available memory": available * GB})
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status == "warn")


def test_a_launch_of_the_mlx_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**ENVIRON, "SGLANG_USE_MLX": "1"}
    found = list(checks(DoctorContext(environ, load_config(None, ENVIRON))))
    assert found[-1].name == "SGLang: MLX backend"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert sglang_doctor.check_mlx().status == "ok"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check = sglang_doctor.check_mlx()
    assert check.status == "fail"
    assert "mlx and mlx_lm" in check.summary


@pytest.mark.parametrize("more", [{}, {"SGLANG_USE_MLX": "1"}])
def test_every_check_is_in_the_troubleshooting_page(more: dict[str, str]) -> None:
    page = (Path(__file__).parents[3] / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for check in checks(DoctorContext({**ENVIRON, **more}, load_config(None, ENVIRON))):
        assert f"doctor: `{check.name.removeprefix('SGLang: ')}`" in page, check.name

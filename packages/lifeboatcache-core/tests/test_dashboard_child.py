"""The agent and its dashboard: what is said when it is missing, and whose exit codes mean what."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from lifeboat_cache.agent import dashboard_child
from lifeboat_cache.agent.dashboard_child import CANNOT_LISTEN, REFUSED, DashboardChild
from lifeboat_cache.config import Dashboard

SETTINGS = Dashboard(port=9999)


def look_until_it_ends(child: DashboardChild) -> None:
    give_up = time.monotonic() + 60
    while not child.problem:
        assert time.monotonic() < give_up
        child.look(SETTINGS)
        time.sleep(0.02)


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dashboard_child, "_main_file", lambda: None)
    child = DashboardChild(tmp_path, None)
    with caplog.at_level(logging.INFO, logger="lifeboat_cache"):
        for _ in range(3):
            child._next = 0.0
            child.look(SETTINGS)
    (record,) = caplog.records
    assert "lifeboatcache-dashboard is not installed: install it" in record.getMessage()
    assert child.problem
    child.look(SETTINGS.model_copy(update={"enabled": False}))
    assert child.problem == ""


@pytest.mark.parametrize("code", [CANNOT_LISTEN, REFUSED, 1])
def test_what_stands_in_its_way_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    main = tmp_path / "main.py"
    main.write_text(f"import sys; print('the port is taken: take another'); sys.exit({code})")
    monkeypatch.setattr(dashboard_child, "_main_file", lambda: main)
    child = DashboardChild(tmp_path, None)
    look_until_it_ends(child)
    wanted = "see the lines above" if code == 1 else "the port is taken: take another"
    assert wanted in child.problem
    assert child.url == ""
    # Not again at once.
    child.look(SETTINGS)
    assert child._child is None


def test_one_that_listens_is_said_and_ends_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = tmp_path / "main.py"
    main.write_text("import sys; print('listening', flush=True); sys.stdin.read()")
    monkeypatch.setattr(dashboard_child, "_main_file", lambda: main)
    child = DashboardChild(tmp_path, None)
    give_up = time.monotonic() + 60
    while not child.url:
        assert time.monotonic() < give_up
        child.look(SETTINGS)
        time.sleep(0.02)
    assert child.url == "http://127.0.0.1:9999"
    process = child._child
    assert process is not None
    # Whether it may edit concerns only itself.
    child.look(SETTINGS.model_copy(update={"allow_config_edit": False}))
    assert child._child is process
    child.look(SETTINGS.model_copy(update={"enabled": False}))
    assert child.url == ""
    assert process.poll() is not None
    child.stop()


def test_a_fault_of_ours_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Path:
        raise RuntimeError("a fault")

    monkeypatch.setattr(dashboard_child, "_main_file", fail)
    child = DashboardChild(tmp_path, None)
    child.look(SETTINGS)
    assert "a fault" in child.problem

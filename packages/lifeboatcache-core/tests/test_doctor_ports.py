"""What ``lifeboat-cache doctor`` says of the ports that the agent listens on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifeboat_cache.agent import AgentState, AgentStatus
from lifeboat_cache.config import load_config
from lifeboat_cache.doctor import Check, DoctorContext, ports


@pytest.fixture(autouse=True)
def dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, whatever else is."""
    monkeypatch.setattr(ports, "_has_dashboard", lambda: True)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def check(tmp_path: Path, pages: str, metrics: str) -> Check:
    file = tmp_path / "x.yaml"
    file.write_text(f"dashboard: {{{pages}}}\ntelemetry: {{prometheus: {{{metrics}}}}}\n")
    return ports.check_ports(DoctorContext({}, load_config(file, {"HOME": str(tmp_path)})))


def test_free_ports_are_fine(tmp_path: Path, free: int) -> None:
    found = check(tmp_path, f"port: {free}", "port: 0")
    assert found.status == "ok"
    assert f"127.0.0.1:{free} (dashboard)" in found.summary


def test_a_taken_port_is_said_with_its_key(tmp_path: Path, taken: int, free: int) -> None:
    found = check(tmp_path, f"port: {taken}", f"port: {free}")
    assert found.status == "warn"
    assert f"127.0.0.1:{taken}, where the dashboard would be, is taken" in found.summary
    assert str(free) not in found.summary
    assert "change dashboard.port, or" in found.remedy
    found = check(tmp_path, f"port: {free}", f"port: {taken}")
    assert f"127.0.0.1:{taken}, where the metrics would be, is taken" in found.summary
    assert "change telemetry.prometheus.port, or" in found.remedy
    found = check(tmp_path, f"host: localhost, port: {taken}", "port: 0")
    assert found.status == "warn"


def test_an_address_of_another_machine_is_said(tmp_path: Path, free: int) -> None:
    found = check(tmp_path, "enabled: false", f"host: 192.0.2.1, port: {free}")
    assert found.status == "warn"
    assert "cannot be listened on" in found.summary


def test_the_agent_of_this_home_may_listen(
    tmp_path: Path, taken: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"dashboard": {"url": f"http://127.0.0.1:{taken}"}, "problems": ["a full disk"]}
    running = AgentStatus(AgentState.RUNNING, document=said)
    monkeypatch.setattr(ports, "agent_status", lambda home: running)
    assert check(tmp_path, f"port: {taken}", "port: 0").status == "ok"
    assert check(tmp_path, "enabled: false", f"port: {taken}").status == "ok"
    said["problems"] = [f"127.0.0.1:{taken}: choose another telemetry.prometheus.port"]
    said["dashboard"] = {"url": ""}
    assert check(tmp_path, f"port: {taken}", "port: 0").status == "warn"
    assert check(tmp_path, "enabled: false", f"port: {taken}").status == "warn"


def test_what_is_not_served_needs_no_port(tmp_path: Path) -> None:
    found = check(tmp_path, "enabled: false", "port: 0")
    assert (found.status, found.remedy) == ("ok", "")
    assert ports.check_ports(DoctorContext({}, None, "broken")).status == "skip"

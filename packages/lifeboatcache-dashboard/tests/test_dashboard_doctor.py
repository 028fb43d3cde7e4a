"""What ``lifeboat-cache doctor`` says of the dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifeboat_cache.config import load_config
from lifeboat_cache.dashboard.doctor import checks
from lifeboat_cache.doctor import Check, DoctorContext


def check(tmp_path: Path, keys: str) -> Check:
    file = tmp_path / "x.yaml"
    file.write_text(f"dashboard: {{{keys}}}\n")
    (found,) = checks(DoctorContext({}, load_config(file, {"HOME": str(tmp_path)})))
    return found


@pytest.mark.parametrize(
    ("keys", "summary", "remedy"),
    [
        ("host: 0.0.0.0", "host is 0.0.0.0, which other machines can reach", "Make one with"),
        ("host: '::'", "host is ::, which other machines can reach", "Make one with"),
        ("auth_token: short", "has 5 characters", "Take 16 or more"),
    ],
)
def test_what_would_not_be_served_is_said_before(
    keys: str, summary: str, remedy: str, tmp_path: Path
) -> None:
    found = check(tmp_path, keys)
    assert found.status == "warn"
    assert summary in found.summary
    assert remedy in found.remedy
    assert "short" not in found.summary + found.remedy


@pytest.mark.parametrize(
    ("keys", "summary"),
    [
        ("", "http://127.0.0.1:9400"),
        ("host: '::', port: 9500, auth_token: 0123456789abcdef", "http://[::]:9500"),
        ("enabled: false, host: 0.0.0.0", "enabled is false"),
    ],
)
def test_what_is_fine_is_said(keys: str, summary: str, tmp_path: Path) -> None:
    found = check(tmp_path, keys)
    assert found.status == "ok"
    assert summary in found.summary


def test_without_a_valid_configuration_nothing_is_checked() -> None:
    (found,) = checks(DoctorContext({}, None, "broken"))
    assert found.status == "skip"

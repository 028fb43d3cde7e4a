"""A configuration that changes while its process runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from lifeboat_cache.config import Tier, load_config
from lifeboat_cache.config.describe import entries
from lifeboat_cache.config.live import LiveConfig


def local_of(live: LiveConfig) -> str:
    """The codec of the rung `local` that is in effect now."""
    return live.config.compression.ladder.local


def restart_of(live: LiveConfig) -> tuple[str, ...]:
    """Keys that wait for a restart now."""
    return live.restart


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


def write(path: Path, text: str) -> None:
    """Replace a file as editors do: another inode, whatever the clock says."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_live_keys_follow_the_file_and_the_others_stay(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = home / "lifeboat.yaml"
    write(file, "engine: {io_workers: 3}\ncompression: {ladder: {local: fp8}}\n")
    live = LiveConfig(load_config())
    assert not live.look(), "nothing has changed"
    with caplog.at_level(logging.WARNING, "lifeboat_cache"):
        write(
            file,
            "engine: {io_workers: 5, native_codec: ladder}\n"
            "compression: {ladder: {local: lbq4}, lossless_8bit: on}\n"
            "storage: {tiers: [{name: a, type: filesystem, path: /a}], shared_lookup: false}\n",
        )
        before = live.config
        assert live.look()
        assert not live.look(), "it is applied once"
    assert local_of(live) == "lbq4"
    assert live.config.compression.lossless_8bit == "on"
    assert live.config.engine.native_codec == "exact"
    assert live.config.engine.io_workers == 3
    assert [tier.name for tier in live.config.storage.tiers] == ["a"]
    assert live.config.storage.shared_lookup
    changed = ("storage.shared_lookup", "engine.native_codec", "engine.io_workers")
    assert restart_of(live) == changed
    assert before.compression.ladder.local == "fp8", "who has it keeps it as it was"
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.endswith(
        "restart the engine to apply storage.shared_lookup, engine.native_codec, engine.io_workers"
    )
    write(file, "engine: {io_workers: 3}\n")
    assert live.look()
    assert restart_of(live) == ()
    assert local_of(live) == "fp8"


def test_a_broken_file_leaves_everything_as_it_was_and_is_said_once(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = home / "lifeboat.yaml"
    write(file, "compression: {ladder: {local: lbq4}}\n")
    live = LiveConfig(load_config())
    live.look()
    with caplog.at_level(logging.WARNING, "lifeboat_cache"):
        write(file, "compression: {ladder: {local: lbq9}}\n")
        for _ in range(3):
            assert not live.look()
        os.utime(file, (1, 1))
        live.look()
    assert local_of(live) == "lbq4"
    assert "there is no codec 'lbq9'; did you mean 'lbq" in live.problem
    assert "Until then the values from before stay in effect." in live.problem
    assert len(caplog.records) == 1
    write(file, "compression: {ladder: {local: lossless}}\n")
    assert live.look()
    assert live.problem == ""
    assert local_of(live) == "lossless"


def test_a_file_that_appears_and_goes_again(home: Path) -> None:
    live = LiveConfig(load_config())
    assert not live.look()
    write(home / "lifeboat.yaml", "compression: {ladder: {local: dense}}\n")
    assert live.look()
    assert local_of(live) == "dense"
    (home / "lifeboat.yaml").unlink()
    assert live.look()
    assert local_of(live) == "fp8"


def test_a_file_that_was_named_and_one_that_it_extends(home: Path, tmp_path: Path) -> None:
    base, named = tmp_path / "base.yaml", tmp_path / "named.yaml"
    write(home / "lifeboat.yaml", "compression: {ladder: {local: lbq2}}\n")
    write(base, "compression: {ladder: {local: lbq3}}\n")
    write(named, "extends: base.yaml\n")
    live = LiveConfig(load_config(named))
    live.look()
    assert local_of(live) == "lbq3"
    write(base, "compression: {ladder: {local: lbq4}}\n")
    assert live.look()
    assert local_of(live) == "lbq4"
    write(home / "lifeboat.yaml", "compression: {ladder: {local: raw}}\n")
    assert not live.look(), "not the file of this process"


def test_live_keys_are_those_that_the_reference_calls_live(home: Path) -> None:
    live = {".".join(e.path) for _, _, own in entries() for e in own if not e.key.restart}
    # Tiers come and go and change as wholes.
    assert live == {f"storage.tiers[].{name}" for name in Tier.model_fields} | {
        "storage.tiers",
        "storage.write_mode",
        "compression.ladder.local",
        "compression.ladder.shared",
        "compression.ladder.archive",
        "compression.lossless_8bit",
        "dashboard.allow_config_edit",
        "dashboard.auth_token",
        "dashboard.enabled",
        "dashboard.host",
        "dashboard.port",
        "eviction.max_age",
        "eviction.policy",
        "telemetry.prometheus.host",
        "telemetry.prometheus.port",
    }

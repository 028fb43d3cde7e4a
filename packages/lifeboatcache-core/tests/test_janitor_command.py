"""``lifeboat-cache gc`` and the policy that the configuration sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from janitors import Clock, chain, leave, names, verified

from lifeboat_cache.agent.wanted import WantedTarget, merged, of_config
from lifeboat_cache.cli import gc_command
from lifeboat_cache.cli.main import main
from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Outcome
from lifeboat_cache.janitor import Janitor, JanitorPolicy
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

SIZE = 1 << 20


@pytest.fixture
def config(tmp_path: Path, root: Path) -> Path:
    path = tmp_path / "lifeboat.yaml"
    path.write_text(
        f"storage:\n  fallback_local:\n    path: {root}\n    capacity_gb: 8Mi\n    min_free_gb: 0\n"
    )
    return path


def test_a_dry_run_says_what_would_go(
    root: Path, namespace: Namespace, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    assert main(["gc", "--config", str(config), "--dry-run"]) == 0
    assert "would evict 1 blocks" in capsys.readouterr().out
    assert not names(root, "dead")


def test_it_runs_until_the_space_is_back(
    root: Path,
    namespace: Namespace,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave(root, chain(0, 8), namespace, SIZE)
    clock = Clock()
    monkeypatch.setattr("time.sleep", clock.tick)
    monkeypatch.setattr(
        gc_command, "Janitor", lambda target, **rest: Janitor(target, clock=clock.both, **rest)
    )
    assert main(["gc", "--config", str(config), "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["report"]["evicted_blocks"] == 1
    assert target["report"]["punched_bytes"] == SIZE
    assert target["report"]["used_after"] < 8 * SIZE
    assert verified(root) == 7


def test_the_policy_none_is_kept(
    root: Path, namespace: Namespace, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text() + "eviction:\n  policy: none\n")
    leave(root, chain(0, 8), namespace, SIZE)
    assert main(["gc", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert "evicted 0 blocks" in text
    assert "(eviction.policy is none)" in text
    (wanted,) = of_config(load_config(config).config)
    assert wanted.eviction == "none"
    # What an engine says of the same target does not change that.
    said = WantedTarget(wanted.path, "x", wanted.capacity, wanted.reserve, "auto")
    assert merged([said, wanted])[0][wanted.path].eviction == "none"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_young_blocks_above_the_capacity_are_explained(
    root: Path, config: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    namespace = Namespace.from_identity({"engine": "test", "model": "young"})
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2)
    assert store.wait_recovered(60)
    assert StoreDriver(store, size=SIZE).store(range(9)) == [Outcome.OK] * 9
    assert store.close()
    assert main(["gc", "--config", str(config), *options]) == 0
    text = capsys.readouterr().out
    assert "evict" in text
    assert "(blocks stored in the last 30 s stay: run it again)" in text


def test_a_foreign_directory_is_an_error(
    root: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.mkdir()
    (root / "thesis.txt").write_text("mine")
    assert main(["gc", "--config", str(config)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in root.iterdir()] == ["thesis.txt"]


def test_another_janitor_is_waited_for_by_nobody(root: Path, namespace: Namespace) -> None:
    leave(root, chain(0, 2), namespace, SIZE)
    one = Janitor(FilesystemTarget(root), policy=JanitorPolicy())
    one._take_lock = lambda: False  # type: ignore[method-assign]
    assert gc_command.run_to_the_end(one, 1.0, lambda _: None).busy

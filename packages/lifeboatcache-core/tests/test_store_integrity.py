"""A store with an integrity key trusts nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifeboat_cache.config import load_config
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Namespace,
    State,
    open_block_store,
)
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, payload_of, sample_keys

OK = Outcome.OK
KEY, OTHER = bytes(range(32)), bytes(32)


def opened(root: Path, namespace: Namespace, key: bytes | None) -> StoreDriver:
    store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=2, integrity_key=key)
    assert store.wait_recovered(60)
    return StoreDriver(store)


@pytest.mark.usefixtures("both_kernels")
def test_only_keyed_records_are_trusted(root: Path, namespace: Namespace) -> None:
    # As somebody would who can write to the directory and does not know the key.
    forger = opened(root, namespace, None)
    assert forger.store(range(3)) == [OK] * 3
    owner = opened(root, namespace, KEY)
    assert owner.lookup(range(3)) == [Lookup.MISS] * 3
    assert owner.store(range(2, 5)) == [OK] * 3
    assert owner.block_store.close()
    again = opened(root, namespace, KEY)
    assert again.load(range(5)) == [Outcome.MISSING] * 2 + [OK] * 3
    plain = opened(root, namespace, None)
    assert plain.load(range(5)) == [OK] * 3 + [Outcome.MISSING] * 2
    wrong = opened(root, namespace, OTHER)
    assert wrong.load(range(5)) == [Outcome.MISSING] * 2 + [Outcome.CORRUPT] * 3
    for driver in (forger, again, plain, wrong):
        assert driver.block_store.close()


def test_the_configured_key(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    config = tmp_path / "lifeboat.yaml"
    config.write_text(
        f"storage: {{fallback_local: {{min_free_gb: 0}}}}\nsecurity: {{integrity_key: {key}}}\n"
    )
    store = open_block_store(load_config(config).config, namespace)
    assert store.wait_recovered(60)
    assert store.namespace != namespace
    keys = sample_keys(range(2))
    batch = BlockBatch(keys, BlockBuffers.from_buffers([payload_of(one, 8192) for one in keys]))
    job = store.store(batch)
    assert job.wait(60)
    assert job.ok
    assert store.close()
    key.chmod(0o644)  # anybody may read it now
    down = open_block_store(load_config(config).config, namespace)
    assert down.wait_recovered(60)
    assert down.state is State.DISABLED
    assert str(key) in down.reason
    assert down.close()

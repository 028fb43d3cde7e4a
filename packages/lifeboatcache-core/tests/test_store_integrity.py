"""A store with an integrity key trusts nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lifeboat_cache.check import check_targets
from lifeboat_cache.config import load_config
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.format.journal import parse_entries, seal_entries
from lifeboat_cache.integrity import IntegrityKey, namespace_with_integrity
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Namespace,
    State,
    open_block_store,
)
from lifeboat_cache.janitor.bitmaps import Bitmap
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, flip_byte, payload_of, sample_keys

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


def test_the_key_in_the_environment(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    config = tmp_path / "lifeboat.yaml"
    config.write_text("storage: {fallback_local: {min_free_gb: 0}}\n")
    names = []
    for value in ("5a" * 32, "5b" * 32, ""):
        monkeypatch.setenv("LIFEBOAT_CACHE_INTEGRITY_KEY", value)
        store = open_block_store(load_config(config).config, namespace)
        assert store.wait_recovered(60)
        names.append(store.namespace)
        assert store.close()
    assert len({n.hex for n in names if n is not None}) == 3
    assert names[2] == namespace
    monkeypatch.setenv("LIFEBOAT_CACHE_INTEGRITY_KEY", "5a5a")
    down = open_block_store(load_config(config).config, namespace)
    assert down.wait_recovered(60)
    assert down.state is State.DISABLED
    assert "LIFEBOAT_CACHE_INTEGRITY_KEY" in down.reason
    assert "5a5a" not in down.reason
    assert down.close()


@pytest.fixture
def guarded(root: Path, namespace: Namespace) -> tuple[Namespace, IntegrityKey]:
    """Three blocks of an owner who has a key."""
    key = IntegrityKey.from_content(KEY)
    keyed = namespace_with_integrity(namespace, key)
    owner = opened(root, keyed, key.secret)
    assert owner.store(range(3)) == [OK] * 3
    assert owner.block_store.close()
    return keyed, key


def checked(root: Path, key: IntegrityKey | None, *, repair: bool = False) -> dict[str, int]:
    tier = Tier.model_construct(name="t", type="filesystem", path=root, direct_io="auto")
    report = check_targets([tier], key=key, repair=repair)
    return {finding.kind: finding.count for finding in report.faults}


def test_planted_records_are_refused_counted_and_reported(
    root: Path, guarded: tuple[Namespace, IntegrityKey]
) -> None:
    keyed, key = guarded
    # Everything about it is right, for whoever does not ask for the key.
    forger = opened(root, keyed, None)
    assert forger.store([7, 8]) == [OK] * 2
    assert forger.block_store.close()
    owner = opened(root, keyed, key.secret)
    assert owner.lookup([7, 8]) == [Lookup.MISS] * 2
    assert owner.load([0, 1, 2, 7]) == [OK] * 3 + [Outcome.MISSING]
    assert owner.block_store.counters().bad_entries == 2
    assert owner.block_store.close()
    assert checked(root, key) == {"record-untrusted": 2}
    assert checked(root, key, repair=True) == {"record-untrusted": 2}
    assert checked(root, key) == {}


def test_a_payload_with_a_checksum_of_another_key_is_corrupt(
    root: Path, guarded: tuple[Namespace, IntegrityKey]
) -> None:
    keyed, key = guarded
    forger = opened(root, keyed, OTHER)
    assert forger.store([7]) == [OK]
    assert forger.block_store.close()
    assert checked(root, key) == {"record-corrupt": 1}
    owner = opened(root, keyed, key.secret)
    assert owner.load([0, 7]) == [OK, Outcome.CORRUPT]
    assert owner.block_store.counters().load_outcomes == {"ok": 1, "corrupt": 1}
    assert owner.block_store.close()


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("kind", ["segment", "journal"])
def test_tampered_files_cost_blocks_and_nothing_else(
    root: Path, guarded: tuple[Namespace, IntegrityKey], kind: str
) -> None:
    keyed, key = guarded
    (path,) = root.glob(f"*/*.{kind}")
    flip_byte(path, 4096 + 40)  # in a payload; in an entry, the payload's checksum
    assert (
        checked(root, key)
        == {"segment": {"record-corrupt": 1}, "journal": {"journal-entry": 1}}[kind]
    )
    owner = opened(root, keyed, key.secret)
    outcomes = owner.load(range(3))
    assert outcomes.count(OK) == 2
    assert set(outcomes) <= {OK, Outcome.CORRUPT, Outcome.MISSING}
    assert owner.block_store.close()


def test_an_entry_whose_own_checksum_was_made_anew_does_not_help(
    root: Path, guarded: tuple[Namespace, IntegrityKey]
) -> None:
    keyed, key = guarded
    (journal,) = root.glob("*/*.journal")
    data = bytearray(journal.read_bytes())
    writer = bytes.fromhex(journal.name.split(".")[0])
    entries, bad = parse_entries(bytes(data[4096:]), writer, 0, keyed.digest)
    assert not bad
    # Block 0 is said to be what block 1 is: checksums of entries need no key.
    forged = entries.copy()
    for name in ("offset", "slot", "payload_checksum"):
        forged[name][0] = entries[name][1]
    data[4096:] = seal_entries(forged, writer, 0, keyed.digest)
    journal.write_bytes(data)
    assert checked(root, key) == {"record-corrupt": 1}
    owner = opened(root, keyed, key.secret)
    assert owner.load(range(3)) == [Outcome.CORRUPT, OK, OK]
    assert owner.block_store.close()


def test_a_tampered_bitmap_makes_misses(
    root: Path, guarded: tuple[Namespace, IntegrityKey]
) -> None:
    keyed, key = guarded
    (segment,) = root.glob("*/*.segment")
    writer = bytes.fromhex(segment.name.split(".")[0])
    bitmap = Bitmap(segment.parent, keyed.digest, writer, 0)
    bitmap.mark(np.array([1], dtype=np.int64), 0)
    owner = opened(root, keyed, key.secret)
    outcomes = owner.load(range(3))
    assert sorted(outcomes) == sorted([OK, OK, Outcome.MISSING])
    assert owner.block_store.close()
    assert checked(root, key) == {}

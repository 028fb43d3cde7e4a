"""Every algorithm of payload checksums, as committed files have it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash
from blake3 import blake3

from lifeboat_cache.check import CheckReport, check_targets
from lifeboat_cache.config import Tier
from lifeboat_cache.format.header import HEADER_BYTES
from lifeboat_cache.format.journal import parse_entries
from lifeboat_cache.integrity import IntegrityKey
from lifeboat_cache.testing import GoldenTree, flip_byte, payload_of

GOLDEN = Path(__file__).parent / "golden" / "format-1-checksums"

DIGEST = bytes.fromhex("07412ce77dd5ae8213974d549c443cc838cd13329c3bc9e4d671d3d65fb6833b")
HOME = DIGEST.hex()[:32]
OWNER = bytes(range(16))
KEY = IntegrityKey.from_content(b"5a" * 32)
OTHER_KEY = IntegrityKey.from_content(b"5b" * 32)
SIZES = [4096, 1, 5000, 300, 8192, 64]
CHECKSUMS = [
    "719f52bbfa8b5a26ba94050a946ff120",
    "79673adf3c36bbed85dba71528a18824",
    "edef3f3a643dad3ab19e6c443e6dc0fc",
    "340cc18799ad84e8468d5ad7f3d334aa",
    "5c3e15d2f2fe4ed7fb27dae53dc05d89",
    "0fc016a470369df9f252e0d8e5b3437e",
]


def golden(name: str) -> bytes:
    return (GOLDEN / HOME / name).read_bytes()


def test_the_code_makes_the_same_bytes(both_kernels: bool) -> None:
    made = GoldenTree.checksums().files
    committed = {
        str(path.relative_to(GOLDEN)): path.read_bytes()
        for path in GOLDEN.rglob("*")
        if path.is_file()
    }
    assert made == committed


def test_checksums_are_what_the_format_says() -> None:
    secret = blake3(b"\x5a" * 32, derive_key_context="lifeboatcache 2026 integrity key v1").digest()
    assert secret == KEY.secret
    body = golden(f"{OWNER.hex()}.journal")[HEADER_BYTES:]
    segment = golden(f"{OWNER.hex()}.00000000.segment")
    entries, bad = parse_entries(body, OWNER, 0, DIGEST)
    assert bad == 0
    assert entries["algorithm"].tolist() == [1, 2, 3, 1, 2, 3]
    assert entries["stored_length"].tolist() == SIZES
    for number, entry in enumerate(entries):
        key, size, offset = entry["key"].tobytes(), SIZES[number], int(entry["offset"])
        payload = segment[offset : offset + size]
        assert payload == payload_of(key, size)
        bound = key + DIGEST + struct.pack("<QIIHB13x", 7, size, size, 0, number % 3 + 1)
        expected = (
            blake3(bound + payload).digest(length=16),
            xxhash.xxh3_128_digest(bound + bytes(160) + payload),
            blake3(bound + payload, key=secret).digest(length=16),
        )[number % 3]
        assert entry["payload_checksum"].tobytes() == expected
        assert expected.hex() == CHECKSUMS[number]


def check(root: Path, key: IntegrityKey | None, *, repair: bool = False) -> CheckReport:
    tier = Tier.model_construct(name="disk", type="filesystem", path=root, direct_io="auto")
    return check_targets([tier], key=key, repair=repair)


def test_a_check_with_the_key_verifies_what_it_protects(root: Path, both_kernels: bool) -> None:
    GoldenTree.checksums().write(root)
    report = check(root, KEY)
    assert report.status == "faulty"
    (namespace,) = report.targets[0].namespaces
    assert (namespace.records.verified, namespace.records.keyed) == (2, 0)
    # An engine with the key would not have written the others.
    (finding,) = namespace.findings
    assert (finding.kind, finding.count) == ("record-untrusted", 4)


@pytest.mark.parametrize("number", range(6))
def test_a_check_finds_a_flipped_bit(root: Path, both_kernels: bool, number: int) -> None:
    tree = GoldenTree.checksums()
    tree.write(root)
    entries, _ = parse_entries(golden(f"{OWNER.hex()}.journal")[HEADER_BYTES:], OWNER, 0, DIGEST)
    at = int(entries["offset"][number]) + SIZES[number] // 2
    flip_byte(root / HOME / f"{OWNER.hex()}.00000000.segment", at, 1)
    keyed = number % 3 == 2
    records = check(root, KEY if keyed else None).targets[0].namespaces[0].records
    assert (records.verified, records.bad) == ((1, 5) if keyed else (3, 1))


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["no key", "another key"])
def test_without_the_key_its_records_are_said_and_left(
    root: Path, key: IntegrityKey | None
) -> None:
    tree = GoldenTree.checksums()
    tree.write(root)
    journal = root / HOME / f"{OWNER.hex()}.journal"
    for repair in (False, True):
        report = check(root, key, repair=repair)
        assert report.status == "ok"
        (namespace,) = report.targets[0].namespaces
        assert (namespace.records.verified, namespace.records.keyed) == (4, 2)
        (finding,) = namespace.findings
        assert (finding.kind, finding.level, finding.count) == ("integrity-key", "skipped", 2)
        assert "security.integrity_key" in finding.remedy
    assert journal.read_bytes() == tree.files[f"{HOME}/{journal.name}"]
    assert check(root, KEY).targets[0].namespaces[0].records.verified == 2


def test_without_the_document_nobody_knows_whose_key_it_was(root: Path) -> None:
    GoldenTree.checksums().write(root)
    (root / HOME / "namespace.json").unlink()
    records = check(root, KEY, repair=True).targets[0].namespaces[0].records
    assert (records.verified, records.keyed, records.bad) == (4, 2, 0)


def test_a_damaged_segment_with_records_that_cannot_be_verified_is_kept(root: Path) -> None:
    tree = GoldenTree.checksums()
    tree.write(root)
    segment = root / HOME / f"{OWNER.hex()}.00000000.segment"
    data = bytearray(segment.read_bytes())
    entries, _ = parse_entries(golden(f"{OWNER.hex()}.journal")[HEADER_BYTES:], OWNER, 0, DIGEST)
    for number in (0, 1, 3, 4):
        data[int(entries["offset"][number])] ^= 1
    data[100] ^= 1
    segment.write_bytes(data)
    check(root, None, repair=True)
    assert segment.exists()
    records = check(root, KEY).targets[0].namespaces[0].records
    assert (records.verified, records.bad) == (2, 0)

"""Format 1 is what the committed files are: they are read to known values and written alike."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.format.access import ACCESS, parse_accesses
from lifeboat_cache.format.bitmap import dead_slots
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import ENTRY, KIND_TOMBSTONE, parse_entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.targets import segment_writer
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import GoldenTree, StoreDriver, payload_of, sample_keys, sample_records

GOLDEN = Path(__file__).parent / "golden" / "format-1"

DIGEST = bytes.fromhex("b017f11150bd000809d0669d249e4924fea33ce801d377a8f55e0c0d4c0dcf97")
HOME = DIGEST.hex()[:32]
OWNER = bytes.fromhex("000102030405060708090a0b0c0d0e0f")
READER = bytes.fromhex("101112131415161718191a1b1c1d1e1f")
CREATED = 1_700_000_000

#: Fields of the owner's journal: what differs from record to record, then the rest.
FIELDS = ("payload_checksum", "offset", "segment", "stored_length", "slot", "checksum")
RECORDS = [
    ("2f219e5eb9d969e57db0351052b28c5f", 4096, 0, 4096, 0, "e003b73df11d67cd"),
    ("07c0d910a5337b3d82e919241addc2a6", 8192, 0, 100, 1, "fa14fe88a6cce133"),
    ("1523aab8630a9f0c5b9e21850f615767", 12_288, 0, 5000, 2, "8dc6625b1733b5ed"),
    ("9f38331efe3faafaeded17e0e96d5146", 4096, 1, 300, 0, "e92756159c4ae7bc"),
    ("86c3644932cef1925241986e2d8fb43a", 8192, 1, 40, 1, "1a758cf8539c4336"),
]
KEYS = [
    "a048713bbc79aea2cc5e9e2ff75b65aaccb22e9f71ccae60643bf4109f411698",
    "cd8f4e2c24c9072739d1b0128c0d9ec60637f55315a476c02dbd09637c9bd56c",
    "a95abb1ece2d194a681cc4dc8efc97565e536abf3c9146d4fe010c3aea555f77",
    "331ad3c974a3bb62bae563165995370d4e54c7d79186f1a6094bb3dc3a2d21e2",
    "427b4c79d735f2aca0131606c48008446980cf3d76c87eb371ce7e55ca3990fd",
]


def golden(name: str) -> bytes:
    return (GOLDEN / HOME / name).read_bytes()


def headed(name: str, magic: bytes, writer: bytes, segment: int = 0) -> bytes:
    """Check a file's header and return what follows it."""
    data = golden(name)
    assert FileHeader.unpack(data, magic) == FileHeader(magic, DIGEST, writer, segment, CREATED)
    return data[HEADER_BYTES:]


def plain(value: np.generic) -> object:
    return value.tobytes().hex() if isinstance(value, np.void) else int(value)


def test_marker_and_document() -> None:
    assert json.loads((GOLDEN / "lifeboat-cache.json").read_bytes()) == {"format": 1}
    namespace = Namespace.from_json(golden("namespace.json"))
    assert namespace.digest == DIGEST
    assert namespace.identity == {
        "engine": "golden",
        "model": {"layers": 2, "rope_theta": 10000.0, "tied": True},
    }
    assert namespace.display == {"name": "golden/model"}


def test_header_byte_by_byte() -> None:
    data = golden(f"{OWNER.hex()}.00000001.segment")[:HEADER_BYTES]
    assert data[:8] == b"LBSEGMNT"
    assert struct.unpack_from("<II", data, 8) == (1, 4096)
    assert data[16:48] == DIGEST
    assert data[48:64] == OWNER
    assert struct.unpack_from("<IIQ", data, 64) == (1, 0, CREATED)
    assert not any(data[80:4088])
    assert data[4088:] == blake3(data[:4088]).digest(length=8)


def test_journal() -> None:
    body = headed(f"{OWNER.hex()}.journal", MAGIC_JOURNAL, OWNER)
    entries, bad = parse_entries(body, OWNER, 0, DIGEST)
    assert bad == 0
    assert [tuple(plain(entry[name]) for name in FIELDS) for entry in entries] == RECORDS
    assert [plain(entry["key"]) for entry in entries] == KEYS
    assert entries["raw_length"].tolist() == entries["stored_length"].tolist()
    assert entries["layout"].tolist() == [7] * 5
    assert entries["time"].tolist() == [CREATED] * 5
    for name, value in (
        ("salt", 0x5A17_0000_0000_0001),
        ("family", 0xFA31_0000_0000_0002),
        ("parent", 0x9A4E_0000_0000_0003),
        ("position", 512),
        ("group", 3),
    ):
        assert entries[name].tolist() == [0, value, 0, 0, 0]
    for name, value in (("codec", 0), ("algorithm", 1), ("kind", 1), ("flags", 0)):
        assert entries[name].tolist() == [value] * 5


def test_entry_byte_by_byte() -> None:
    entry = golden(f"{OWNER.hex()}.journal")[HEADER_BYTES + 128 : HEADER_BYTES + 256]
    assert entry[:32].hex() == KEYS[1]
    assert entry[32:48].hex() == RECORDS[1][0]
    assert struct.unpack_from("<QQQQQ", entry, 48) == (
        8192,
        7,
        0x5A17_0000_0000_0001,
        0xFA31_0000_0000_0002,
        0x9A4E_0000_0000_0003,
    )
    assert struct.unpack_from("<IIIII", entry, 88) == (0, 100, 100, 512, CREATED)
    assert struct.unpack_from("<HHBBHI", entry, 108) == (3, 0, 1, 1, 0, 1)
    # Writer, segment, index of the entry, namespace, then the entry up to here.
    context = OWNER + struct.pack("<IQ", 0, 1) + DIGEST
    assert entry[120:] == blake3(context + entry[:120]).digest(length=8)


def test_payloads() -> None:
    for number, (checksum, offset, segment, size, _, _) in enumerate(RECORDS):
        body = headed(f"{OWNER.hex()}.{segment:08d}.segment", MAGIC_SEGMENT, OWNER, segment)
        payload = body[offset - HEADER_BYTES : offset - HEADER_BYTES + size]
        key = bytes.fromhex(KEYS[number])
        assert payload == payload_of(key, size)
        # Key, namespace, layout, raw and stored length, codec, algorithm, zeros.
        bound = key + DIGEST + struct.pack("<QIIHB13x", 7, size, size, 0, 1)
        assert blake3(bound + payload).digest(length=16).hex() == checksum


def test_tombstone() -> None:
    body = headed(f"{READER.hex()}.journal", MAGIC_JOURNAL, READER)
    ((entry,), bad) = parse_entries(body, READER, 0, DIGEST)
    assert bad == 0
    assert entry["kind"] == KIND_TOMBSTONE == 2
    assert plain(entry["key"]) == KEYS[4]
    assert entry["payload_checksum"].tobytes() == OWNER
    assert (entry["segment"], entry["slot"], entry["time"]) == (1, 1, CREATED)
    for name in set(ENTRY.names or ()) - {
        "key",
        "payload_checksum",
        "segment",
        "slot",
        "time",
        "kind",
        "checksum",
    }:
        assert entry[name] == 0, name


def test_dead_bitmap() -> None:
    body = headed(f"{OWNER.hex()}.00000000.dead", MAGIC_DEAD, OWNER)
    assert body == b"\x04"
    assert dead_slots(body).tolist() == [False, False, True] + [False] * 5


def test_access_log() -> None:
    body = headed(f"{READER.hex()}.access", MAGIC_ACCESS, READER)
    accesses = parse_accesses(body)
    assert [a["writer"].tobytes() for a in accesses] == [OWNER] * 2
    assert [(int(a["segment"]), int(a["slot"]), int(a["time"])) for a in accesses] == [
        (0, 1, CREATED + 60),
        (1, 0, CREATED + 90),
    ]
    assert struct.unpack_from("<III", body, 16) == (0, 1, CREATED + 60)
    assert body[28:32] == blake3(body[:28]).digest(length=4)


def test_the_code_makes_the_same_bytes() -> None:
    made = GoldenTree.format_1().files
    committed = {
        str(path.relative_to(GOLDEN)): path.read_bytes()
        for path in GOLDEN.rglob("*")
        if path.is_file()
    }
    assert sorted(made) == sorted(committed)
    for name, data in committed.items():
        assert made[name] == data, name


def test_a_writer_writes_the_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: float(CREATED))
    writers = iter([OWNER, READER])
    monkeypatch.setattr(segment_writer, "new_writer_id", lambda: next(writers))
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 20_480)
    golden_tree = GoldenTree.format_1()
    target = FilesystemTarget(root, direct_io="off")
    target.probe()
    owner = target.writer(golden_tree.namespace)
    keys = sample_keys(range(5))
    buffers = BlockBuffers.from_buffers(
        [payload_of(key, size) for key, size in zip(keys, golden_tree.sizes, strict=True)]
    )
    entries = sample_records(golden_tree.namespace, keys, buffers, layout=7, time=CREATED)
    for name, value in (
        ("salt", 0x5A17_0000_0000_0001),
        ("family", 0xFA31_0000_0000_0002),
        ("parent", 0x9A4E_0000_0000_0003),
        ("position", 512),
        ("group", 3),
    ):
        entries[name][1] = value
    for first, last in itertools.pairwise((0, 3, 5)):
        assert owner.append(entries[first:last], buffers, range(first, last)) == [1] * (
            last - first
        )
    reader = target.writer(golden_tree.namespace)
    tombstone = np.zeros(1, dtype=ENTRY)
    tombstone["kind"], tombstone["time"] = KIND_TOMBSTONE, CREATED
    tombstone["payload_checksum"][0] = np.void(OWNER)
    for name in ("key", "segment", "slot"):
        tombstone[name] = entries[name][4:]
    reader.bury(tombstone)
    accesses = np.zeros(2, dtype=ACCESS)
    accesses["writer"] = np.void(OWNER)
    for name in ("segment", "slot"):
        accesses[name] = entries[name][[1, 3]]
    accesses["time"] = CREATED + 60, CREATED + 90
    reader.log_access(accesses)
    owner.close()
    reader.close()
    written = {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }
    # Only a janitor writes dead bitmaps.
    expected = {
        name: data for name, data in golden_tree.files.items() if not name.endswith(".dead")
    }
    document = f"{HOME}/namespace.json"
    assert json.loads(written.pop(document)) == json.loads(expected.pop(document))
    assert written == expected


def test_a_store_serves_them(root: Path, open_driver: Callable[..., StoreDriver]) -> None:
    tree = GoldenTree.format_1()
    tree.write(root)
    store = open_driver(of=tree.namespace).block_store
    assert store.counters().bad_entries == 0
    keys = list(tree.keys)
    hit, miss = Lookup.HIT, Lookup.MISS
    assert store.lookup(keys).tolist() == [hit, hit, miss, hit, miss]
    assert store.sizes(keys).tolist() == [4096, 100, -1, 300, -1]
    assert store.layouts(keys).tolist() == [7, 7, 0, 7, 0]
    assert [store._index.last_used(key) for key in keys] == [
        CREATED,
        CREATED + 60,
        None,
        CREATED + 90,
        None,
    ]
    for number, size in enumerate(tree.sizes):
        (outcome,) = StoreDriver(store, size=size, layout=7).load([number])
        expected = Outcome.OK if number in (0, 1, 3) else Outcome.MISSING
        assert outcome == expected

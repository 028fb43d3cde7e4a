"""Segments in a bucket, put there and read back without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lifeboat_cache.checksum import ALGORITHM_BLAKE3, Binding, payload_checksum
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_SEGMENT, FileHeader
from lifeboat_cache.format.journal import ENTRY, KIND_RECORD, KIND_TOMBSTONE, Entries
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.names import FeedName, Names, parse_feed
from lifeboat_cache.s3.slices import pack_slice, unpack_slice
from lifeboat_cache.targets.layout import new_writer_id
from lifeboat_cache.testing import payload_of, sample_keys

__all__ = ["Shelf"]


class Shelf:
    """One namespace of a bucket.

    Parameters
    ----------
    client
        The bucket.
    prefix
        As configured.
    namespace
        The namespace; its document is put.
    size
        Bytes of a block.
    """

    def __init__(
        self, client: S3Client, prefix: str, namespace: Namespace, *, size: int = 65_536
    ) -> None:
        self.client = client
        self.names = Names.of(prefix)
        self.namespace = namespace
        self.folder = namespace.directory
        self.size = size
        client.put(self.names.document(self.folder), namespace.to_json().encode())

    def segment(
        self,
        numbers: Sequence[int],
        *,
        age_s: float = 3600.0,
        salt: int = 0,
        chain: bool = False,
        spoiled: Sequence[int] = (),
        named: bool = True,
    ) -> FeedName:
        """Put a segment and its slice.

        Parameters
        ----------
        numbers
            Of its blocks.
        age_s
            How long ago they were stored.
        salt
            Their salt tag.
        chain
            Whether each block has the one before it as its parent.
        spoiled
            Blocks whose bytes do not match.
        named
            Whether to put the slice.
        """
        writer = new_writer_id()
        digest = self.namespace.digest
        then = int(self.client.now() - age_s)
        data = bytearray(FileHeader(MAGIC_SEGMENT, digest, writer, 0, then).pack())
        entries = np.zeros(len(numbers), dtype=ENTRY)
        for slot, (number, key) in enumerate(zip(numbers, sample_keys(numbers), strict=True)):
            payload = payload_of(key, self.size)
            bound = Binding(digest).pack(key, 0, self.size, self.size, 0, ALGORITHM_BLAKE3)
            entry = entries[slot]
            entry["key"] = np.void(key)
            entry["payload_checksum"] = np.void(payload_checksum(bound, [memoryview(payload)]))
            entry["offset"], entry["slot"] = len(data), slot
            entry["stored_length"] = entry["raw_length"] = self.size
            entry["time"], entry["salt"] = then, salt
            entry["family"] = number + 1
            entry["parent"] = number if chain and slot else 0
            entry["position"] = 16 * (slot + 1)
            entry["algorithm"], entry["kind"] = ALGORITHM_BLAKE3, KIND_RECORD
            at = len(data)
            data += payload
            if number in spoiled:
                data[at + 7] ^= 1
            data += bytes(-len(data) % 4096)
        self.client.put(self.names.segment(self.folder, writer, 0), bytes(data))
        name = FeedName(then, writer, 0, len(data))
        if named:
            self.put_slice(name, entries)
        return name

    def put_slice(self, name: FeedName, entries: Entries) -> None:
        """Put an object of the feed."""
        data = pack_slice(self.namespace.digest, name.writer, name.number, entries)
        self.client.put(self.names.in_feed(self.folder, name), data)

    def bury(self, of: FeedName, slots: Sequence[int]) -> FeedName:
        """Declare records dead, as another node does."""
        dead = np.zeros(len(slots), dtype=ENTRY)
        dead["kind"] = KIND_TOMBSTONE
        dead["payload_checksum"] = np.void(of.writer)
        dead["segment"] = of.number
        dead["slot"] = slots
        name = FeedName(int(self.client.now()), new_writer_id(), 1, 0, "dead")
        self.put_slice(name, dead)
        return name

    def feed(self) -> list[FeedName]:
        """What is in the feed."""
        prefix = self.names.feed(self.folder)
        found = [parse_feed(one.key[len(prefix) :]) for one in self.client.objects(prefix)]
        return [name for name in found if name is not None]

    def held(self) -> list[int]:
        """Numbers of all blocks that a new node finds and can restore, byte for byte.

        What is found and cannot be restored, but for what is spoiled, fails the test.
        """
        digest = self.namespace.digest
        records: list[tuple[FeedName, Any]] = []
        dead: set[tuple[bytes, int, int]] = set()
        for name in self.feed():
            if name.kind == "gone":
                continue
            entries, bad = unpack_slice(
                self.client.get(self.names.in_feed(self.folder, name)), digest, name
            )
            assert not bad
            for entry in entries:
                if entry["kind"] == KIND_TOMBSTONE:
                    owner = entry["payload_checksum"].tobytes()
                    dead.add((owner, int(entry["segment"]), int(entry["slot"])))
                else:
                    records.append((name, entry))
        known = {key: number for number, key in enumerate(sample_keys(range(4096)))}
        found: set[int] = set()
        for name, entry in records:
            if (name.writer, name.number, int(entry["slot"])) in dead:
                continue
            key = entry["key"].tobytes()
            into = memoryview(bytearray(int(entry["stored_length"])))
            self.client.read(
                self.names.segment(self.folder, name.writer, name.number),
                int(entry["offset"]),
                into,
            )
            if bytes(into) == payload_of(key, self.size):
                found.add(known[key])
        return sorted(found)

    def segments(self) -> int:
        """How many segments lie there, named or not."""
        return sum(1 for _ in self.client.objects(self.names.segments(self.folder)))

    def header_bytes(self) -> int:
        """What a segment has in front of its first block."""
        return HEADER_BYTES

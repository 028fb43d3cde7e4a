"""Small targets of format 1 whose every byte is known."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.checksum import ALGORITHM_BLAKE3, ALGORITHM_KEYED_BLAKE3, ALGORITHM_XXH3
from lifeboat_cache.format.access import ACCESS, pack_accesses
from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import ENTRY, KIND_TOMBSTONE, seal_entries
from lifeboat_cache.integrity import IntegrityKey, namespace_with_integrity
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.layout import ROOT_MARKER
from lifeboat_cache.testing.blocks import payload_of, sample_keys, sample_records

__all__ = ["GoldenTree"]

#: Segment and payload bytes of each record.
_PLACES = ((0, 4096), (0, 100), (0, 5000), (1, 300), (1, 40))


@dataclass(frozen=True)
class GoldenTree:
    """Files of one format, complete enough to be opened as a target.

    :meth:`format_1` has all kinds of files, of two writers: the first stored five
    records in two segments; the second used the second and the fourth of them and
    buried the fifth. The janitor declared the third dead. So the first, the second
    and the fourth can be loaded. :meth:`checksums` has all kinds of checksums.

    Attributes
    ----------
    namespace
        Whose records they are.
    keys
        Of the records.
    sizes
        Their payload bytes; the payloads are ``payload_of(key, size)``.
    writers
        The 16-byte identities of the writers.
    created
        Time in every header and entry, in seconds since 1970.
    files
        Content by path relative to the target's directory.
    """

    #: What the key file of :meth:`checksums` holds.
    INTEGRITY_KEY_CONTENT: ClassVar[bytes] = b"%s\n" % (b"5a" * 32)

    namespace: Namespace
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]
    writers: tuple[bytes, ...]
    created: int
    files: dict[str, bytes]

    def write(self, root: Path) -> None:
        """Write the files below ``root``, with the modes that a target gives them."""
        for name, data in self.files.items():
            path = root / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(data)
            os.chmod(path, 0o600)

    @classmethod
    def format_1(cls) -> GoldenTree:
        """The tree in format 1, made with the code of this release."""
        namespace = Namespace.from_identity(
            {"engine": "golden", "model": {"layers": 2, "rope_theta": 10000.0, "tied": True}},
            display={"name": "golden/model"},
        )
        owner, reader = bytes(range(16)), bytes(range(16, 32))
        created = 1_700_000_000
        numbers = range(len(_PLACES))
        keys = sample_keys(numbers)
        sizes = tuple(size for _, size in _PLACES)
        payloads = [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]

        entries = sample_records(
            namespace, keys, BlockBuffers.from_buffers(payloads), layout=7, time=created
        )
        segments: dict[int, bytearray] = {}
        slots: Counter[int] = Counter()
        for number, (segment, _) in enumerate(_PLACES):
            header = FileHeader(MAGIC_SEGMENT, namespace.digest, owner, segment, created)
            data = segments.setdefault(segment, bytearray(header.pack()))
            data += bytes(-len(data) % HEADER_BYTES)
            entries["segment"][number] = segment
            entries["slot"][number] = slots[segment]
            entries["offset"][number] = len(data)
            data += payloads[number]
            slots[segment] += 1
        # Every field of one entry differs from zero and from every other field.
        for name, value in (
            ("salt", 0x5A17_0000_0000_0001),
            ("family", 0xFA31_0000_0000_0002),
            ("parent", 0x9A4E_0000_0000_0003),
            ("position", 512),
            ("group", 3),
        ):
            entries[name][1] = value

        tombstone = np.zeros(1, dtype=ENTRY)
        tombstone["kind"] = KIND_TOMBSTONE
        tombstone["time"] = created
        tombstone["key"][0] = np.void(keys[4])
        tombstone["payload_checksum"][0] = np.void(owner)
        tombstone["segment"] = tombstone["slot"] = 1

        accesses = np.zeros(2, dtype=ACCESS)
        accesses["writer"] = np.void(owner)
        accesses["segment"] = (0, 1)
        accesses["slot"] = (1, 0)
        accesses["time"] = (created + 60, created + 90)

        def journal(writer: bytes, sealed: bytes) -> bytes:
            header = FileHeader(MAGIC_JOURNAL, namespace.digest, writer, 0, created)
            return header.pack() + sealed

        dead = FileHeader(MAGIC_DEAD, namespace.digest, owner, 0, created)
        access = FileHeader(MAGIC_ACCESS, namespace.digest, reader, 0, created)
        home = namespace.directory
        return cls(
            namespace=namespace,
            keys=tuple(keys),
            sizes=sizes,
            writers=(owner, reader),
            created=created,
            files={
                ROOT_MARKER: b'{"format": 1}\n',
                f"{home}/namespace.json": namespace.to_json().encode() + b"\n",
                f"{home}/{owner.hex()}.journal": journal(
                    owner, seal_entries(entries, owner, 0, namespace.digest)
                ),
                f"{home}/{owner.hex()}.00000000.segment": bytes(segments[0]),
                f"{home}/{owner.hex()}.00000001.segment": bytes(segments[1]),
                f"{home}/{owner.hex()}.00000000.dead": dead.pack() + set_dead(b"", [2]),
                f"{home}/{reader.hex()}.journal": journal(
                    reader, seal_entries(tombstone, reader, 0, namespace.digest)
                ),
                f"{home}/{reader.hex()}.access": access.pack() + pack_accesses(accesses),
            },
        )

    @classmethod
    def checksums(cls) -> GoldenTree:
        """A tree in format 1 with every algorithm of payload checksums.

        One writer stored six records, of the algorithms 1, 2 and 3 in turns, in one
        segment, in a namespace of the integrity key :attr:`INTEGRITY_KEY_CONTENT`.
        """
        integrity = IntegrityKey.from_content(cls.INTEGRITY_KEY_CONTENT)
        identity = {"engine": "golden", "checksums": "all"}
        namespace = namespace_with_integrity(Namespace.from_identity(identity), integrity)
        owner = bytes(range(16))
        created = 1_700_000_000
        sizes = (4096, 1, 5000, 300, 8192, 64)
        keys = sample_keys(range(len(sizes)))
        payloads = [payload_of(key, size) for key, size in zip(keys, sizes, strict=True)]
        entries = sample_records(
            namespace,
            keys,
            BlockBuffers.from_buffers(payloads),
            layout=7,
            time=created,
            algorithms=(ALGORITHM_BLAKE3, ALGORITHM_XXH3, ALGORITHM_KEYED_BLAKE3),
            integrity_key=integrity.secret,
        )
        data = bytearray(FileHeader(MAGIC_SEGMENT, namespace.digest, owner, 0, created).pack())
        for number, payload in enumerate(payloads):
            data += bytes(-len(data) % HEADER_BYTES)
            entries["slot"][number] = number
            entries["offset"][number] = len(data)
            data += payload
        header = FileHeader(MAGIC_JOURNAL, namespace.digest, owner, 0, created)
        journal = header.pack() + seal_entries(entries, owner, 0, namespace.digest)
        home = namespace.directory
        return cls(
            namespace=namespace,
            keys=tuple(keys),
            sizes=sizes,
            writers=(owner,),
            created=created,
            files={
                ROOT_MARKER: b'{"format": 1}\n',
                f"{home}/namespace.json": namespace.to_json().encode() + b"\n",
                f"{home}/{owner.hex()}.journal": journal,
                f"{home}/{owner.hex()}.00000000.segment": bytes(data),
            },
        )

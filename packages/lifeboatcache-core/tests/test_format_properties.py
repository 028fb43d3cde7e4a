"""The parsers of format 1 against anything that a disk may hand them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifeboat_cache.errors import ForeignDataError, FormatError, NewerFormatError
from lifeboat_cache.format.access import ACCESS, pack_accesses, parse_accesses
from lifeboat_cache.format.bitmap import dead_slots, set_dead
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.format.journal import ENTRY, ENTRY_BYTES, parse_entries, seal_entries
from lifeboat_cache.targets.layout import parse_name, segment_name

MAGICS = (MAGIC_SEGMENT, MAGIC_JOURNAL, MAGIC_DEAD, MAGIC_ACCESS)

headers = st.builds(
    FileHeader,
    magic=st.sampled_from(MAGICS),
    namespace=st.binary(min_size=32, max_size=32),
    writer=st.binary(min_size=16, max_size=16),
    segment=st.integers(0, 2**32 - 1),
    created=st.integers(0, 2**64 - 1),
)

writers = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=32, max_size=32)


def unsigned(kind: Any) -> st.SearchStrategy[int]:
    return st.integers(0, 2 ** (8 * kind.itemsize) - 1)


@st.composite
def entry_arrays(draw: st.DrawFn, dtype: np.dtype[Any] = ENTRY, most: int = 5) -> Any:
    """Entries with any value in any field."""
    entries = np.zeros(draw(st.integers(0, most)), dtype=dtype)
    for at in range(entries.shape[0]):
        for name in dtype.names or ():
            kind = dtype[name]
            if kind.kind == "V":
                size = kind.itemsize
                entries[name][at] = np.void(draw(st.binary(min_size=size, max_size=size)))
            else:
                entries[name][at] = draw(unsigned(kind))
    return entries


def equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        one[name][at] == other[name][at]
        for name in one.dtype.names
        if name != "checksum"
        for at in range(len(one))
    )


# Headers ------------------------------------------------------------------------


@given(headers)
def test_header_round_trip(header: FileHeader) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert FileHeader.unpack(data, header.magic) == header
    assert FileHeader.unpack(data + b"more", header.magic) == header
    for other in MAGICS:
        if other != header.magic:
            with pytest.raises(FormatError):
                FileHeader.unpack(data, other)


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    data = FileHeader(MAGIC_JOURNAL, bytes(range(32)), bytes(range(16)), 5, 1).pack()
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            FileHeader.unpack(bytes(damaged), MAGIC_JOURNAL)


@given(headers, st.integers(0, HEADER_BYTES - 1))
def test_cut_headers_are_refused(header: FileHeader, length: int) -> None:
    with pytest.raises(FormatError):
        FileHeader.unpack(header.pack()[:length], header.magic)


@given(st.binary(max_size=64), st.booleans(), st.sampled_from(MAGICS))
def test_any_bytes_are_refused(start: bytes, padded: bool, magic: bytes) -> None:
    for data in (start, magic + start):
        full = data.ljust(HEADER_BYTES, b"\0") if padded else data
        with pytest.raises(FormatError):
            FileHeader.unpack(full, magic)


@given(headers, st.integers(2, 2**32 - 1), st.binary(max_size=200))
def test_newer_headers_are_told_from_damage(header: FileHeader, version: int, rest: bytes) -> None:
    # Only the first twelve bytes are promised for all formats to come.
    data = (header.magic + version.to_bytes(4, "little") + rest).ljust(HEADER_BYTES, b"\xaa")
    for magic in MAGICS:
        with pytest.raises(NewerFormatError, match="upgrade"):
            FileHeader.unpack(data, magic)


def test_version_0_and_foreign_magics_are_refused() -> None:
    data = bytearray(FileHeader(MAGIC_JOURNAL, bytes(32), bytes(16), 0, 0).pack())
    data[8:12] = bytes(4)
    with pytest.raises(FormatError):
        FileHeader.unpack(bytes(data), MAGIC_JOURNAL)
    with pytest.raises(ForeignDataError, match="not a file of LifeboatCache"):
        FileHeader.unpack(b"\x7fELF" + bytes(HEADER_BYTES), MAGIC_JOURNAL)


# Entries ------------------------------------------------------------------------


@given(entry_arrays(), writers, digests, st.integers(0, 2**40))
def test_entries_round_trip(entries: Any, writer: bytes, digest: bytes, first: int) -> None:
    data = seal_entries(entries, writer, first, digest)
    assert len(data) == ENTRY_BYTES * len(entries)
    parsed, bad = parse_entries(data, writer, first, digest)
    assert bad == 0
    assert equal(parsed, entries)
    # An unfinished last entry is left out and not counted.
    parsed, bad = parse_entries(data + bytes(ENTRY_BYTES - 1), writer, first, digest)
    assert (len(parsed), bad) == (len(entries), 0)


@settings(max_examples=5)
@given(entry_arrays(most=3).filter(len), writers, digests)
def test_every_flipped_bit_of_an_entry_is_noticed(
    entries: Any, writer: bytes, digest: bytes
) -> None:
    data = seal_entries(entries, writer, 7, digest)
    for bit in range(8 * ENTRY_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        parsed, bad = parse_entries(bytes(damaged), writer, 7, digest)
        assert bad == 1
        assert equal(parsed, entries[1:])


@given(entry_arrays().filter(len), writers, digests, st.integers(0, 1000), st.data())
def test_entries_belong_to_one_place(
    entries: Any, writer: bytes, digest: bytes, first: int, data: st.DataObject
) -> None:
    sealed = seal_entries(entries, writer, first, digest)
    other_writer = data.draw(writers.filter(lambda value: value != writer))
    other_digest = data.draw(digests.filter(lambda value: value != digest))
    for arguments in (
        (other_writer, first, digest),
        (writer, first + 1, digest),
        (writer, first, other_digest),
    ):
        parsed, bad = parse_entries(sealed, *arguments)
        assert (len(parsed), bad) == (0, len(entries))


@given(st.binary(max_size=1000), writers, digests, st.integers(0, 2**63))
def test_no_bytes_make_an_entry(data: bytes, writer: bytes, digest: bytes, first: int) -> None:
    parsed, bad = parse_entries(data, writer, first, digest)
    assert (len(parsed), bad) == (0, len(data) // ENTRY_BYTES)


@given(entry_arrays(), st.lists(st.binary(max_size=300), max_size=3), writers, digests)
def test_rubbish_between_entries_costs_only_itself(
    entries: Any, rubbish: list[bytes], writer: bytes, digest: bytes
) -> None:
    """As after a disk lost some sectors: what is intact in its own place counts."""
    sealed = bytearray(seal_entries(entries, writer, 0, digest))
    hit = set()
    for number, piece in enumerate(rubbish):
        at = number * 200
        if at + len(piece) <= len(sealed):
            before = bytes(sealed)
            sealed[at : at + len(piece)] = piece
            hit |= {n // ENTRY_BYTES for n in range(len(sealed)) if sealed[n] != before[n]}
    parsed, bad = parse_entries(bytes(sealed), writer, 0, digest)
    assert bad == len(hit)
    assert equal(parsed, entries[[n for n in range(len(entries)) if n not in hit]])


# Access logs and bitmaps --------------------------------------------------------


@given(entry_arrays(ACCESS))
def test_accesses_round_trip(accesses: Any) -> None:
    data = pack_accesses(accesses)
    assert len(data) == 32 * len(accesses)
    assert equal(parse_accesses(data), accesses)
    assert equal(parse_accesses(data + bytes(31)), accesses)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        assert len(parse_accesses(bytes(damaged))) == len(accesses) - 1


@given(st.binary(max_size=500))
def test_no_bytes_make_an_access(data: bytes) -> None:
    # All-zero accesses carry no all-zero checksum.
    assert len(parse_accesses(data)) == 0


@given(st.binary(max_size=20), st.lists(st.integers(0, 300), max_size=10))
def test_bits_are_set_and_never_cleared(body: bytes, slots: list[int]) -> None:
    before = dead_slots(body)
    after = dead_slots(set_dead(body, slots))
    assert len(after) >= len(before)
    expected = {at for at in range(len(before)) if before[at]} | set(slots)
    assert {at for at in range(len(after)) if after[at]} == expected
    assert set_dead(set_dead(body, slots), slots) == set_dead(body, slots)


# Names ----------------------------------------------------------------------------


@given(writers, st.integers(0, 10**8 - 1), st.sampled_from(["segment", "dead"]))
def test_names_round_trip(writer: bytes, segment: int, kind: str) -> None:
    parsed = parse_name(segment_name(writer.hex(), segment, kind))
    assert parsed is not None
    assert (parsed.writer, parsed.segment, parsed.kind) == (writer.hex(), segment, kind)
    for plain in ("journal", "access", "lock"):
        parsed = parse_name(f"{writer.hex()}.{plain}")
        assert parsed is not None
        assert (parsed.writer, parsed.segment, parsed.kind) == (writer.hex(), -1, plain)
        assert parse_name(segment_name(writer.hex(), segment, plain)) is None
    assert parse_name(f"{writer.hex()}.{kind}") is None


@given(st.text(max_size=60))
def test_other_names_are_not_ours(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "namespace.json",
        "ABCDEF0123456789ABCDEF0123456789.journal",
        "0" * 31 + ".journal",
        "0" * 32 + ".journal.tmp",
        "0" * 32 + ".journal\n",
        "0" * 32 + ".1.segment",
        "0" * 32 + ".000000001.segment",
        "." + "0" * 32 + ".lock.tmp",
        "0" * 32 + "." + "\u0661" * 8 + ".segment",
    ],
)
def test_names_that_look_like_ours(name: str) -> None:
    assert parse_name(name) is None

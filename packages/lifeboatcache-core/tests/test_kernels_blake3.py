"""BLAKE3 of short inputs, and the checksums of journals and access logs made with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache import kernels
from lifeboat_cache.checksum import entry_checksum, header_checksum
from lifeboat_cache.format.access import ACCESS, pack_accesses, parse_accesses
from lifeboat_cache.format.journal import ENTRY, intact_entries, parse_entries, seal_entries

WRITER, DIGEST = bytes(range(16)), bytes(range(100, 132))


def random_bytes(seed: int, size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_every_length_of_a_chunk(kernels_on: None) -> None:
    from lifeboat_cache.kernels.blake3_short import CHUNK_BYTES, hash_short

    data, out = random_bytes(1, CHUNK_BYTES + 3), np.zeros(32, dtype=np.uint8)
    for length in range(CHUNK_BYTES + 1):
        start = length % 4
        hash_short(data.ctypes.data + start, length, out.ctypes.data)
        assert out.tobytes() == blake3(data[start : start + length].tobytes()).digest(), length


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("first", [0, 7, 2**32 - 3, 2**40])
def test_sealed_entries_have_the_checksum_of_the_format(
    both_kernels: bool, count: int, first: int
) -> None:
    assert kernels.ready() == both_kernels
    entries = random_bytes(count, 128 * count).view(ENTRY)
    sealed = seal_entries(entries, WRITER, first, DIGEST)
    assert len(sealed) == 128 * count
    for number in range(count):
        fields = sealed[128 * number : 128 * number + 120]
        assert fields == entries[number].tobytes()[:120]
        segment = int(entries["segment"][number])
        expected = entry_checksum(WRITER, segment, first + number, DIGEST, fields)
        assert sealed[128 * number + 120 : 128 * (number + 1)] == expected
    again, bad = parse_entries(sealed, WRITER, first, DIGEST)
    assert (again.tobytes(), bad) == (sealed, 0)


@given(
    count=st.integers(1, 40),
    flips=st.sets(st.tuples(st.integers(0, 39), st.integers(0, 128 * 8 - 1)), max_size=6),
)
def test_exactly_the_flipped_entries_are_bad(
    both_kernels: bool, count: int, flips: set[tuple[int, int]]
) -> None:
    entries = random_bytes(3, 128 * count).view(ENTRY)
    data = bytearray(seal_entries(entries, WRITER, 9, DIGEST))
    expected = [True] * count
    for number, bit in flips:
        if number < count:
            data[128 * number + bit // 8] ^= 1 << bit % 8
            expected[number] = False
    found = np.frombuffer(data, dtype=ENTRY)
    assert intact_entries(found, WRITER, 9, DIGEST).tolist() == expected
    kept, bad = parse_entries(bytes(data), WRITER, 9, DIGEST)
    assert bad == expected.count(False)
    assert kept.tobytes() == found[np.array(expected)].tobytes()


def test_entries_of_another_place_are_bad(both_kernels: bool) -> None:
    sealed = seal_entries(random_bytes(4, 128 * 20).view(ENTRY), WRITER, 5, DIGEST)
    for writer, first, digest in (
        (bytes(16), 5, DIGEST),
        (WRITER, 6, DIGEST),
        (WRITER, 5 + 2**32, DIGEST),
        (WRITER, 5, bytes(32)),
    ):
        kept, bad = parse_entries(sealed, writer, first, digest)
        assert (len(kept), bad) == (0, 20)


def test_entries_that_are_not_dense_in_memory(both_kernels: bool) -> None:
    sealed = seal_entries(random_bytes(5, 128 * 9).view(ENTRY), WRITER, 0, DIGEST)
    table = np.zeros((9, 2), dtype=ENTRY)
    table[:, 0] = np.frombuffer(sealed, dtype=ENTRY)
    assert intact_entries(table[:, 0], WRITER, 0, DIGEST).all()
    assert seal_entries(table[:, 0], WRITER, 0, DIGEST) == sealed


def test_an_incomplete_last_entry_is_ignored(both_kernels: bool) -> None:
    sealed = seal_entries(random_bytes(6, 128 * 3).view(ENTRY), WRITER, 0, DIGEST)
    for length, count in ((127, 0), (128, 1), (300, 2), (384, 3)):
        kept, bad = parse_entries(sealed[:length], WRITER, 0, DIGEST)
        assert (len(kept), bad) == (count, 0)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 50])
def test_accesses(both_kernels: bool, count: int) -> None:
    accesses = random_bytes(count + 50, 32 * count).view(ACCESS)
    data = bytearray(pack_accesses(accesses))
    for at in range(0, len(data), 32):
        assert data[at + 28 : at + 32] == header_checksum(bytes(data[at : at + 28]))[:4]
    assert parse_accesses(bytes(data) + b"torn").tobytes() == bytes(data)
    for number in range(0, count, 3):
        data[32 * number + number % 32] ^= 0x10
    kept = [bytes(data[32 * n : 32 * n + 32]) for n in range(count) if n % 3]
    assert parse_accesses(bytes(data)).tobytes() == b"".join(kept)

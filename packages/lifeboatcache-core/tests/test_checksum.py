"""Payload checksums: what each algorithm is, and what a checksum is bound to."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache import checksum
from lifeboat_cache.checksum import (
    ALGORITHM_BLAKE3,
    ALGORITHM_KEYED_BLAKE3,
    ALGORITHM_XXH3,
    Binding,
    payload_checksum,
    preferred_algorithm,
    usable_algorithms,
)

NAMESPACE, KEY, SECRET = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))


def bound(algorithm: int) -> bytes:
    return Binding(NAMESPACE).pack(KEY, 7, 5000, 4900, 3, algorithm)


def whole(algorithm: int, payload: bytes) -> bytes:
    """The checksum as docs/format.md says it."""
    fields = KEY + NAMESPACE + struct.pack("<QIIHB13x", 7, 5000, 4900, 3, algorithm)
    if algorithm == 1:
        return blake3(fields + payload).digest(length=16)
    if algorithm == 2:
        return xxhash.xxh3_128_digest(fields + bytes(160) + payload)
    return blake3(fields + payload, key=SECRET).digest(length=16)


@pytest.mark.parametrize("algorithm", sorted(checksum.KNOWN_ALGORITHMS))
@given(pieces=st.lists(st.binary(max_size=3000), max_size=5))
def test_each_algorithm_is_what_the_format_says(
    both_kernels: bool, algorithm: int, pieces: list[bytes]
) -> None:
    views = [memoryview(piece) for piece in pieces]
    expected = whole(algorithm, b"".join(pieces))
    assert payload_checksum(bound(algorithm), views, key=SECRET) == expected
    assert payload_checksum(bound(algorithm), iter(views), algorithm, SECRET) == expected


@pytest.mark.parametrize("algorithm", sorted(checksum.KNOWN_ALGORITHMS))
def test_memory_that_may_be_written_and_memory_that_may_not(
    both_kernels: bool, algorithm: int
) -> None:
    data = bytearray(range(256)) * 40
    expected = whole(algorithm, bytes(data))
    for view in (memoryview(data), memoryview(bytes(data)), np.frombuffer(data, np.uint8).data):
        assert payload_checksum(bound(algorithm), [view], key=SECRET) == expected


def test_a_keyed_checksum_without_the_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"security\.integrity_key"):
        payload_checksum(bound(ALGORITHM_KEYED_BLAKE3), [])
    assert payload_checksum(bound(3), [], key=SECRET) != payload_checksum(bound(3), [], key=KEY)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown checksum algorithm 200"):
        payload_checksum(bound(200), [])


def test_the_default_of_a_binding_is_blake3() -> None:
    assert Binding(NAMESPACE).pack(KEY, 7, 5000, 4900, 3) == bound(ALGORITHM_BLAKE3)


def test_preferred(both_kernels: bool) -> None:
    assert preferred_algorithm() == (ALGORITHM_XXH3 if both_kernels else ALGORITHM_BLAKE3)
    assert preferred_algorithm(SECRET) == ALGORITHM_KEYED_BLAKE3


def test_a_key_makes_only_keyed_checksums_trusted() -> None:
    assert usable_algorithms() == {1, 2}
    assert usable_algorithms(SECRET) == {3}
    for key in (None, SECRET):
        assert preferred_algorithm(key) in usable_algorithms(key)


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=32, max_size=32),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**16 - 1),
        ),
        max_size=20,
    ),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 3]),
)
def test_a_batch_of_bindings_is_what_single_ones_are(
    rows: list[tuple[bytes, int, int, int]], layout: int, algorithm: int
) -> None:
    keys, raw, stored, codec = zip(*rows, strict=True) if rows else ((), (), (), ())
    table = Binding(NAMESPACE).pack_batch(
        np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32),
        layout,
        np.array(raw, dtype=np.uint32),
        np.array(stored, dtype=np.uint32),
        np.array(codec, dtype=np.uint16),
        algorithm,
    )
    assert table.shape == (len(rows), 96)
    assert table.flags.c_contiguous
    binding = Binding(NAMESPACE)
    assert [row.tobytes() for row in table] == [
        binding.pack(key, layout, r, s, c, algorithm) for key, r, s, c in rows
    ]

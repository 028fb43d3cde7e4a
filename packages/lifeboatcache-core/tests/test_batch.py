from __future__ import annotations

import numpy as np
import pytest

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.errors import InterfaceError
from lifeboat_cache.interface import INTERFACE_VERSION, require_interface, salt_tag
from lifeboat_cache.store.records import record_entries
from lifeboat_cache.testing import aligned_memory, cut_at, sample_keys


def joined(buffers: BlockBuffers, block: int) -> bytes:
    return b"".join(buffers.pieces(block))


def test_rows_of_a_table() -> None:
    table = np.arange(100, dtype=np.uint8).reshape(10, 10)
    buffers = BlockBuffers.from_rows(table.ctypes.data, 10, [7, 2, 2], 4, table)
    assert len(buffers) == 3
    assert buffers.sizes().tolist() == [4, 4, 4]
    assert [joined(buffers, block) for block in range(3)] == [
        bytes(range(70, 74)),
        bytes(range(20, 24)),
        bytes(range(20, 24)),
    ]
    buffers.pieces(0)[0][0] = 255
    assert table[7, 0] == 255


def test_buffers_of_many_kinds_and_pieces() -> None:
    table = np.arange(8, dtype=np.uint16).reshape(2, 4)
    view = memoryview(bytearray(b"0123456789")).cast("b")
    buffers = BlockBuffers.from_buffers([table, [view[2:4], bytearray(b"xyz")], [], bytearray()])
    assert buffers.sizes().tolist() == [16, 5, 0, 0]
    assert joined(buffers, 0) == table.tobytes()
    assert joined(buffers, 1) == b"23xyz"
    assert joined(buffers, 2) == joined(buffers, 3) == b""
    assert buffers.writable


def test_some_blocks_of_a_batch() -> None:
    pieces = [[b"ab", b"c"], [], [b"defg"], [b"h", b"i", b"j"]]
    batch = BlockBatch(
        sample_keys(range(4)),
        BlockBuffers.from_buffers(pieces),
        layout=[1, 2, 3, 4],
        positions=[10, 20, 30, 40],
        families=[5, 6, 7, 8],
        salt=9,
        codecs=[0, 1, 2, 3],
    )
    some = batch.take(np.array([3, 1, 0], dtype=np.int64))
    assert [joined(some.buffers, block) for block in range(3)] == [b"hij", b"", b"abc"]
    assert some.buffers.sizes().tolist() == [3, 0, 3]
    assert some.buffers.owner is batch.buffers.owner
    assert not some.buffers.writable
    assert list(some.keys) == sample_keys([3, 1, 0])
    assert some.tags().tolist() == [4, 2, 1]
    assert (some.positions, some.families, some.codecs) == ([40, 20, 10], [8, 6, 5], [3, 1, 0])
    assert (some.groups, some.parents, some.salt) == (None, None, 9)
    assert batch.take(np.array([], dtype=np.int64)).buffers.sizes().tolist() == []
    assert batch.window(1, 3).codecs == [1, 2]


def test_one_frozen_piece_makes_a_batch_read_only() -> None:
    assert not BlockBuffers.from_buffers([bytearray(3), [bytearray(3), b"abc"]]).writable


def test_memory_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        BlockBuffers.from_buffers([np.zeros((4, 4), dtype=np.uint8)[:, ::2]])


@pytest.mark.parametrize(
    ("size", "cuts", "aligned"),
    [
        (8192, (), True),
        (8192, (4096,), True),
        (8192, (4096, 4096), True),
        (8192, (100,), False),
        (8000, (), False),
        (8000, (4096,), False),
    ],
)
def test_alignment(size: int, cuts: tuple[int, ...], aligned: bool) -> None:
    assert BlockBuffers.from_buffers([cut_at(bytes(size), cuts)]).aligned(4096) is aligned


def test_memory_off_a_page_boundary_is_not_aligned() -> None:
    memory = aligned_memory(12_288)
    assert not BlockBuffers.from_buffers([memory[1:8193]]).aligned(4096)
    assert BlockBuffers.from_buffers([memory[4096:8192]]).aligned(4096)


def test_batch_lengths_must_agree() -> None:
    buffers = BlockBuffers.from_buffers([b"x", b"y"])
    with pytest.raises(ValueError, match="a batch of 3 keys has 2 buffers"):
        BlockBatch(sample_keys(range(3)), buffers)
    for name in ("positions", "groups", "families", "parents", "salt", "codecs"):
        with pytest.raises(ValueError, match=f"{name} has 1 values for 2 keys"):
            BlockBatch(sample_keys(range(2)), buffers, **{name: [1]})


def test_empty_batch() -> None:
    batch = BlockBatch([], BlockBuffers.from_buffers([]))
    assert len(batch) == 0
    assert batch.buffers.sizes().tolist() == []
    assert batch.buffers.aligned(4096)


def test_interface_versions() -> None:
    major, minor = INTERFACE_VERSION
    require_interface(major, minor, "lifeboatcache-test")
    require_interface(major, 0, "lifeboatcache-test")
    with pytest.raises(InterfaceError, match="upgrade lifeboatcache-core"):
        require_interface(major, minor + 1, "lifeboatcache-test")
    with pytest.raises(InterfaceError, match="upgrade lifeboatcache-core"):
        require_interface(major + 1, 0, "lifeboatcache-test")
    with pytest.raises(InterfaceError, match="upgrade lifeboatcache-test"):
        require_interface(major - 1, 9, "lifeboatcache-test")


def test_a_salt_for_all_blocks_or_one_for_each() -> None:
    assert salt_tag("") == salt_tag(None) == 0
    assert 0 < salt_tag("tenant") != salt_tag("Tenant")
    keys = sample_keys(range(3))
    buffers = BlockBuffers.from_buffers([bytes(8)] * 3)
    table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(3, 32)
    big = 2**64 - 3  # numpy would choose a float for it
    batch = BlockBatch(keys, buffers, salt=[big, 0, 7])
    assert record_entries(batch, table, np.array([2, 0]), 2)["salt"].tolist() == [7, big]
    tail = batch.window(1, 3)
    assert record_entries(tail, table[1:], np.array([0, 1]), 2)["salt"].tolist() == [0, 7]
    one = BlockBatch(keys, buffers, salt=big).window(1, 3)
    assert record_entries(one, table[1:], np.array([0, 1]), 2)["salt"].tolist() == [big, big]
    with pytest.raises(ValueError, match="salt has 2 values for 3 keys"):
        BlockBatch(keys, buffers, salt=[1, 2])

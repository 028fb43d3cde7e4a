from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.interface import block_keys, tag


def test_keys_never_change() -> None:
    # Stored blocks are found by these: another value here orphans every store.
    assert [key.hex() for key in block_keys([b"", b"a"])] == [
        "15cf3ec14209516ebce7ef7c2a747cb223d9c13c81821d81bb6ed7c177939ac4",
        "5abf7967169419dd5aae9685a10898d0aa65497673027f3544a68fa7e49b0888",
    ]
    assert [key.hex() for key in block_keys([b"a"], space=b"pool")] == [
        "0463dacc1199612301c632f8a301f479dc16a07df0186fcbb29faf22c3b4b4bf"
    ]
    assert (tag(b""), tag(b"salt")) == (12007152915317330863, 16581312918520344178)


def test_keys_are_in_order_and_have_32_bytes() -> None:
    keys = block_keys(bytes([number]) * number for number in range(100))
    assert len(set(keys)) == 100
    assert {len(key) for key in keys} == {32}
    assert keys[7] == block_keys([bytes([7]) * 7])[0]
    assert block_keys([]) == []


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.binary())
def test_space_and_key_do_not_run_into_each_other(
    space: bytes, key: bytes, other_space: bytes, other_key: bytes
) -> None:
    same = (space, key) == (other_space, other_key)
    (one,) = block_keys([key], space=space)
    (other,) = block_keys([other_key], space=other_space)
    assert (one == other) is same
    (run_together,) = block_keys([space + key])
    assert (run_together == one) is (space == b"")


def test_tags_fit_8_bytes_and_0_means_unknown() -> None:
    assert tag(None) == 0
    tags = {tag(b"%d" % number) for number in range(1000)}
    assert len(tags) == 1000
    assert all(0 < value < 2**64 for value in tags)


@pytest.mark.parametrize("key", [b"", b"short", bytes(31), bytes(33)])
def test_keys_of_another_length_are_refused_with_the_remedy(key: bytes) -> None:
    with pytest.raises(ValueError, match="block_keys"):
        BlockBatch([bytes(32), key], BlockBuffers.from_buffers([b"x", b"y"]))

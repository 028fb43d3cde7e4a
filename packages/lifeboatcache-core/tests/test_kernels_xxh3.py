"""XXH3-128 of ours, in kernels and in numpy, against the reference implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from lifeboat_cache.kernels import xxh3_secret
from lifeboat_cache.kernels.xxh3_numpy import xxh3_128

Digest = Callable[[Sequence[memoryview]], bytes]

_POOL = np.random.default_rng(7).integers(0, 256, 1 << 17, dtype=np.uint8)


def by_kernel(pieces: Sequence[memoryview]) -> bytes:
    from lifeboat_cache.kernels.xxh3 import xxh3_of

    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces if len(piece)]
    out = np.zeros(16, dtype=np.uint8)
    xxh3_of(
        np.array([array.ctypes.data for array in arrays], dtype=np.uint64),
        np.array([array.nbytes for array in arrays], dtype=np.uint64),
        out,
    )
    return out.tobytes()


@pytest.fixture(params=["kernel", "numpy"])
def digest(request: pytest.FixtureRequest) -> Digest:
    if request.param == "numpy":
        return xxh3_128
    request.getfixturevalue("kernels_on")
    return by_kernel


def pool(start: int, length: int) -> memoryview:
    return _POOL.data[start : start + length]


def test_every_length_around_stripes_and_blocks(digest: Digest) -> None:
    lengths = [*range(241, 1400), *range(2000, 2100), *range(3000, 3200), 4096, 65_535, 65_537]
    for length in lengths:
        data = pool(length % 61, length)
        assert digest([data]) == xxhash.xxh3_128_digest(data), length


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.one_of(st.integers(0, 130), st.integers(0, 5000))),
        min_size=1,
        max_size=12,
    )
)
@example([(0, 64), (0, 64), (0, 64), (0, 64)])
@example([(1, 256), (3, 1024)])
@example([(1, 256), (3, 768), (5, 1)])
@example([(0, 1024), (0, 1)])
@example([(0, 63), (0, 1), (0, 960), (0, 1024), (0, 64)])
def test_any_pieces_at_any_alignment(digest: Digest, cuts: list[tuple[int, int]]) -> None:
    pieces = [pool(0, 241), *(pool(start, length) for start, length in cuts)]
    assert digest(pieces) == xxhash.xxh3_128_digest(b"".join(pieces))


def test_a_payload_of_many_megabytes(digest: Digest) -> None:
    data = np.tile(_POOL, 40)[: (5 << 20) - 3]
    view = data.data
    expected = xxhash.xxh3_128_digest(view)
    assert digest([view]) == expected
    assert digest([view[:7], view[7 : 1 << 20], view[1 << 20 :]]) == expected


def test_an_input_that_xxh3_treats_differently_is_refused() -> None:
    assert xxh3_128([bytes(241)]) == xxhash.xxh3_128_digest(bytes(241))
    with pytest.raises(ValueError, match="more than 240"):
        xxh3_128([bytes(200), bytes(40)])


def test_one_flipped_bit_changes_the_digest(digest: Digest) -> None:
    data: npt.NDArray[np.uint8] = _POOL[:3000].copy()
    seen = {digest([data.data])}
    for at in range(0, 3000, 37):
        data[at] ^= 1 << at % 8
        seen.add(digest([data.data]))
        data[at] ^= 1 << at % 8
    assert len(seen) == 1 + len(range(0, 3000, 37))


def test_blocks_in_one_call(kernels_on: None) -> None:
    from lifeboat_cache.kernels.xxh3 import xxh3_blocks

    bindings = _POOL[: 5 * 96].reshape(5, 96).copy()
    lengths = [[4096], [100, 5000, 3], [], [64, 64], [1]]
    pieces = [pool(31 * number, n) for number, n in enumerate(sum(lengths, []))]  # noqa: RUF017
    addresses = [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces]
    starts = np.cumsum([0, *(len(part) for part in lengths)], dtype=np.int64)
    out = np.zeros((5, 16), dtype=np.uint8)
    xxh3_blocks(
        bindings,
        np.array(addresses, dtype=np.uint64),
        np.array([len(piece) for piece in pieces], dtype=np.uint64),
        starts,
        out,
    )
    for number in range(5):
        mine = pieces[starts[number] : starts[number + 1]]
        bound = bindings[number].tobytes() + bytes(160)
        assert out[number].tobytes() == xxhash.xxh3_128_digest(bound + b"".join(mine))


def test_the_secret_has_the_words_it_names() -> None:
    assert len(xxh3_secret.SECRET) == 192
    assert len(xxh3_secret.WORDS) == 185

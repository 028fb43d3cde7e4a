"""The coder LBQ: the kernel and its twin, what comes back, and what malformed bytes do."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.codecs.blocks import decode_block, encode_block, scratch
from lifeboat_cache.codecs.layout import ITEM_BYTES, KVLayout, TensorLayout
from lifeboat_cache.codecs.lbq import CENTRED, PRECISE, TURNING, Lbq
from lifeboat_cache.codecs.names import LBQ4
from lifeboat_cache.codecs.recipes import CodedLayout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels.codec_layout import CODER_COPY, CODER_LBQ

GOLDEN = Path(__file__).parent / "golden" / "codecs"
FLOATS = ("bfloat16", "float16", "float32")
HEAD_SIZES = (64, 80, 96, 128, 192, 256, 576)
WIDTHS = (2, 3, 4)
FLAGS = (0, CENTRED, PRECISE, CENTRED | PRECISE, CENTRED | TURNING, CENTRED | TURNING | PRECISE)
#: Mean squared errors of unit Gaussian elements at each width, and a little more.
ERRORS = {2: 0.1, 3: 0.028, 4: 0.0078}

Bytes = npt.NDArray[np.uint8]


def tensor_of(
    dtype: Any,
    dim: int,
    *,
    outer: int = 1,
    inner: int = 1,
    heads: int = 1,
    heads_first: bool = False,
    gap: int = 0,
    offset: int = 0,
    role: Any = "key",
) -> TensorLayout:
    """A tensor whose vectors lie ``gap`` bytes apart, by tokens or within pages by heads."""
    near = dim * ITEM_BYTES[dtype] + gap
    by_head, by_inner = (near * inner, near) if heads_first else (near, near * heads)
    page = near * heads * inner
    return TensorLayout(role, dtype, 0, outer, inner, heads, dim, page, by_inner, by_head, offset)


def coded_of(tensor: TensorLayout, bits: int, after: int = 0) -> CodedLayout:
    """A block of this tensor and of bytes around it, which are copied."""
    end = int(tensor.starts().max()) + tensor.dim * tensor.item_bytes
    layout = KVLayout.of(end + after, [tensor])
    coders = [(CODER_LBQ, bits)] + [(CODER_COPY, 0)] * (len(layout.tensors) - 1)
    return CodedLayout(layout, LBQ4, tuple(coders))


def elements(dtype: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Bits of elements nearest to these values (bfloat16: of those with more bits cut off)."""
    with np.errstate(over="ignore"):
        exact = np.asarray(values, dtype=np.float16 if dtype == "float16" else np.float32)
    if dtype == "bfloat16":
        return (exact.view(np.uint32) >> 16).astype(np.uint16)
    return exact.view(np.uint16 if dtype == "float16" else np.uint32)


def floats(dtype: str, bits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Their values."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float16 if dtype == "float16" else np.float32).astype(np.float64)


def restored(dtype: str, values: npt.ArrayLike, bits: int) -> npt.NDArray[np.float64]:
    """What comes back of ``(tokens, heads, dim)`` values."""
    there = elements(dtype, values)
    tokens, heads, dim = there.shape
    coded = coded_of(tensor_of(dtype, dim, inner=tokens, heads=heads), bits)
    back = np.zeros(coded.layout.nbytes, dtype=np.uint8)
    decode_block(coded, encode_block(coded, there.reshape(-1).view(np.uint8)), back)
    return floats(dtype, back.view(there.dtype)).reshape(there.shape)


def turning(rng: np.random.Generator, tokens: int, heads: int, dim: int, apart: int) -> Any:
    """Vectors of noise around a mean whose channels, so far apart, turn as with RoPE."""
    values = rng.standard_normal((tokens, heads, dim))
    channel = np.arange(dim)
    first = channel[channel // apart % 2 == 0]
    angle = rng.uniform(-3, 3, dim // 2) * np.arange(tokens)[:, None, None]
    size = 10 * rng.standard_normal((heads, dim // 2))
    values[..., first] += size * np.cos(angle)
    values[..., first + apart] += size * np.sin(angle)
    return values


@st.composite
def blocks(draw: Any) -> tuple[CodedLayout, Bytes]:
    """A block with one tensor for LBQ, and a payload of anything between real and random."""
    dtype = draw(st.sampled_from(FLOATS))
    dim = draw(st.one_of(st.sampled_from(HEAD_SIZES), st.integers(1, 12).map(lambda n: 16 * n)))
    flags = draw(st.sampled_from(FLAGS))
    if dim % 32:
        flags &= ~TURNING
    item = ITEM_BYTES[dtype]
    tensor = tensor_of(
        dtype,
        dim,
        outer=draw(st.integers(1, 3)),
        inner=draw(st.integers(1, 19)),
        heads=draw(st.integers(1, 3)),
        heads_first=draw(st.booleans()),
        gap=draw(st.sampled_from((0, item, 3))),
        offset=draw(st.integers(0, 70)),
        role=draw(st.sampled_from(("key", "value", "latent"))),
    )
    coded = coded_of(tensor, draw(st.sampled_from(WIDTHS)) | flags, after=draw(st.integers(0, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    payload = rng.integers(0, 256, coded.layout.nbytes, dtype=np.uint8)
    if draw(st.booleans()):
        shape = (tensor.tokens, tensor.heads, dim)
        apart = draw(st.sampled_from(tables.distances_of(dim) if dim % 32 == 0 else (dim // 2,)))
        values = turning(rng, *shape, apart) * 2.0 ** draw(st.integers(-20, 10))
        if dtype != "float16":
            values *= 2.0 ** draw(st.sampled_from((0, 0, -120, 115)))
        special = rng.random(shape) < draw(st.sampled_from((0, 0, 0.01, 0.5, 1)))
        numbers = elements(dtype, np.asarray(values, dtype=np.float32))
        odd = elements(dtype, [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-41, 6e-8, 3e38, 65504.0])
        numbers = np.where(special, rng.choice(odd, shape), numbers).astype(numbers.dtype)
        tensor.scatter(numbers.view(np.uint8).reshape(tensor.tokens, tensor.heads, -1), payload)
    return coded, payload


class Kernel:
    """The kernels on memory with a margin around it, which must stay as it is."""

    MARGIN = 512
    FILL = 0xA5

    def __init__(self, coded: CodedLayout) -> None:
        self.coded = coded
        self.rows = coded.rows
        tensors = coded.layout.tensors
        self.within = np.array([tensor.offset for tensor in tensors], dtype=np.int64)
        self.which = np.zeros(len(tensors), dtype=np.int64)
        self.starts = np.array([0, 1], dtype=np.int64)

    def guarded(self, size: int, content: Bytes | None = None) -> tuple[Bytes, Bytes]:
        whole = np.full(size + 2 * self.MARGIN, self.FILL, dtype=np.uint8)
        inside = whole[self.MARGIN : self.MARGIN + size]
        if content is not None:
            inside[:] = content
        return whole, inside

    def run(self, call: Any, payload: Bytes, stored: Bytes, size: int) -> tuple[int, int]:
        iov = np.array([payload.ctypes.data, payload.nbytes], dtype=np.uint64)
        places = np.array([0, stored.nbytes], dtype=np.int64)
        sizes = np.array([size], dtype=np.int64)
        arrays = (self.rows, iov, self.starts, self.which, self.within, stored, places, sizes)
        rows, iov_, starts, which, within, at, places_, sizes_ = (
            array.ctypes.data for array in arrays
        )
        done = call(
            rows, len(self.rows), iov_, starts, which, within, 1, at, places_, sizes_, scratch()
        )
        return int(done), int(sizes[0])

    def encode(self, payload: Bytes, room: int) -> Bytes | None:
        """The stored block; ``None`` if it does not fit into ``room`` bytes."""
        from lifeboat_cache.kernels.coders import encode_blocks

        whole, stored = self.guarded(room)
        done, size = self.run(encode_blocks, payload, stored, 0)
        self._check(whole, stored)
        return stored[:size] if done else None

    def decode(self, stored: Bytes) -> Bytes | None:
        """The payload, of which every byte was ``FILL``; ``None`` if the block is refused."""
        from lifeboat_cache.kernels.coders import decode_blocks

        whole, payload = self.guarded(self.coded.layout.nbytes)
        payload[:] = self.FILL
        done, _ = self.run(decode_blocks, payload, stored, stored.shape[0])
        self._check(whole, payload)
        return payload if done else None

    def _check(self, whole: Bytes, inside: Bytes) -> None:
        around = whole.copy()
        around[self.MARGIN : self.MARGIN + inside.shape[0]] = self.FILL
        assert (around == self.FILL).all()


@given(blocks())
def test_the_kernel_stores_the_bytes_of_its_twin(
    kernels_on: None, block: tuple[CodedLayout, Bytes]
) -> None:
    coded, payload = block
    size = coded.fixed_bytes
    assert size is not None
    assert size == coded.most_bytes
    stored = Kernel(coded).encode(payload, size)
    assert stored is not None
    mine = Lbq().encode(coded.layout.tensors[0], payload, coded.coders[0][1])
    assert stored[: mine.shape[0]].tobytes() == mine.tobytes()
    assert stored.shape[0] == size


@given(blocks(), st.integers(0, 2**32), st.booleans())
def test_the_kernel_restores_the_bytes_of_its_twin(
    kernels_on: None, block: tuple[CodedLayout, Bytes], seed: int, random: bool
) -> None:
    coded, payload = block
    tensor, bits = coded.layout.tensors[0], coded.coders[0][1]
    stored = Kernel(coded).encode(payload, coded.most_bytes)
    assert stored is not None
    if random:
        before = stored
        noise = np.random.default_rng(seed).integers(0, 256, stored.shape, dtype=np.uint8)
        noise[0] = max(int(noise[0]), 16)
        stored = noise
        if bits & TURNING:
            stored[1:3] = before[1:3]
        if bits & PRECISE:
            size = Lbq().most_bytes(tensor, bits)
            count = tables.precise_of(tensor.tokens, tensor.role == "key") * tensor.heads
            tokens = size - count * (4 + tensor.dim)
            numbers = np.random.default_rng(seed).integers(0, tensor.tokens, count)
            stored[tokens : tokens + 2 * count] = numbers.astype("<u2").view(np.uint8)
    back = Kernel(coded).decode(stored)
    assert back is not None
    mine = back.copy()
    tensor.scatter(np.zeros_like(tensor.gather(mine)), mine)
    assert Lbq().decode(tensor, stored, mine, bits) == Lbq().fixed_bytes(tensor, bits)
    assert back.tobytes() == mine.tobytes()


@given(blocks(), st.floats(0, 0.999))
def test_too_little_room_and_truncated_bytes_are_refused(
    kernels_on: None, block: tuple[CodedLayout, Bytes], part: float
) -> None:
    coded, payload = block
    tensor, bits = coded.layout.tensors[0], coded.coders[0][1]
    less = int(coded.most_bytes * part)
    assert Kernel(coded).encode(payload, less) is None
    stored = Kernel(coded).encode(payload, coded.most_bytes)
    assert stored is not None
    assert Kernel(coded).decode(stored[:less]) is None
    own = stored[: Lbq().most_bytes(tensor, bits) - 1]
    with pytest.raises(FormatError, match="cut short"):
        Lbq().decode(tensor, own, payload.copy(), bits)


@pytest.mark.parametrize(("at", "wrong"), [(0, 15), (1, 3), (1, 0), (2, 1)])
def test_an_impossible_beginning_is_refused(at: int, wrong: int, both_kernels: bool) -> None:
    coded = coded_of(tensor_of("bfloat16", 64, inner=4), 4 | CENTRED | TURNING)
    stored = encode_block(coded, np.zeros(coded.layout.nbytes, dtype=np.uint8))
    stored[at] = wrong
    with pytest.raises(FormatError):
        decode_block(coded, stored, np.zeros(coded.layout.nbytes, dtype=np.uint8))


def test_what_lies_between_vectors_is_not_written(both_kernels: bool) -> None:
    tensor = tensor_of("bfloat16", 80, outer=2, inner=3, heads=2, gap=6, offset=5)
    coded = coded_of(tensor, 3)
    stored = Lbq().encode(tensor, np.zeros(coded.layout.nbytes, dtype=np.uint8), 3)
    whole = np.full(coded.layout.nbytes, 0xA5, dtype=np.uint8)
    assert coded.fixed_bytes is not None
    rest = np.full(coded.fixed_bytes - stored.shape[0], 0xA5, dtype=np.uint8)
    decode_block(coded, np.concatenate((stored, rest)), whole)
    assert not tensor.gather(whole).any()
    tensor.scatter(np.full_like(tensor.gather(whole), 0xA5), whole)
    assert (whole == 0xA5).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_the_error_is_that_of_the_width(
    dtype: str, dim: int, width: int, both_kernels: bool
) -> None:
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((24, 2, dim)) * 2.0 ** rng.integers(-4, 5, (24, 2, 1))
    there = floats(dtype, elements(dtype, values))
    errors = ((restored(dtype, values, width) - there) ** 2).sum(axis=2)
    part = errors / (there**2).sum(axis=2)
    assert part.mean() < ERRORS[width]
    # A unit of fewer elements is further from the average.
    assert part.max() < 2.5 * ERRORS[width]


@pytest.mark.parametrize(("width", "part"), [(2, 0.77), (3, 0.72), (4, 0.71)])
def test_the_trellis_is_better_than_the_best_table(width: int, part: float) -> None:
    """Mean squared errors of normal values, beside those of Lloyd's and Max's levels."""
    values = np.random.default_rng(width).standard_normal((500, 1, 64))
    scaled = values / np.sqrt((values**2).mean(axis=2, keepdims=True))
    levels = np.linspace(-2, 2, 1 << width)
    for _ in range(200):
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled.reshape(-1))
        levels = np.bincount(nearest, scaled.reshape(-1)) / np.bincount(nearest)
    table = ((scaled - levels[nearest].reshape(scaled.shape)) ** 2).mean()
    error = ((restored("float32", scaled, width) - scaled) ** 2).mean()
    assert error < part * table


def test_a_large_channel_costs_the_others_what_its_energy_costs(both_kernels: bool) -> None:
    values = np.random.default_rng(1).standard_normal((64, 1, 128))
    values[:, :, 17] = 30.0 * np.sign(values[:, :, 17])
    error = ((restored("float32", values, 4) - values) ** 2).mean()
    assert error < ERRORS[4] * (values**2).mean()


@pytest.mark.parametrize("width", WIDTHS)
def test_centring_takes_off_what_all_tokens_share(width: int, both_kernels: bool) -> None:
    rng = np.random.default_rng(width)
    noise = rng.standard_normal((64, 3, 64))
    values = noise + 20 * rng.standard_normal((1, 3, 64))
    error = ((restored("float32", values, width | CENTRED) - values) ** 2).mean()
    assert error < 1.1 * ERRORS[width]
    assert ((restored("float32", values, width) - values) ** 2).mean() > 50 * error


@pytest.mark.parametrize("dim", [64, 96, 128, 576])
def test_turning_means_are_found_and_taken_off(dim: int, both_kernels: bool) -> None:
    """Whichever channels make a pair, at whatever angles, without being told."""
    rng = np.random.default_rng(dim)
    for apart in tables.distances_of(dim):
        values = turning(rng, 128, 2, dim, apart)
        bits = 4 | CENTRED | TURNING
        error = ((restored("float32", values, bits) - values) ** 2).mean()
        assert error < 1.3 * ERRORS[4]
        still = ((restored("float32", values, 4 | CENTRED) - values) ** 2).mean()
        assert still > 20 * error
        stored = encode_block(
            coded_of(tensor_of("float32", dim, inner=128, heads=2), bits),
            elements("float32", values).reshape(-1).view(np.uint8),
        )
        assert int(stored[1]) | int(stored[2]) << 8 == apart


def test_means_that_do_not_turn_stay_still(both_kernels: bool) -> None:
    """Turning means are never worse than those that stand still."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((64, 2, 64)) + 10 * rng.standard_normal((1, 2, 64))
    one, other = (
        ((restored("float32", values, bits) - values) ** 2).mean()
        for bits in (4 | CENTRED, 4 | CENTRED | TURNING)
    )
    assert other < 1.02 * one


@pytest.mark.parametrize("flags", [PRECISE, PRECISE | CENTRED, PRECISE | CENTRED | TURNING])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_far_from_the_mean_are_precise(dtype: str, flags: int, both_kernels: bool) -> None:
    """Two of 64 in each head, and the others do not notice them."""
    far = {0: [0, 40], 1: [7, 63]}
    values = turning(np.random.default_rng(2), 64, 2, 64, 32) + 50
    for head, tokens in far.items():
        values[tokens, head] = np.random.default_rng(head).standard_normal((2, 64)) * 9
    there = floats(dtype, elements(dtype, values))
    back = restored(dtype, values, 3 | flags)
    others = np.ones((64, 2), dtype=bool)
    for head, tokens in far.items():
        others[tokens, head] = False
        step = abs(there[tokens, head]).max(axis=1, keepdims=True) / 127 * 1.01
        most = step / 2 + abs(there[tokens, head]) * 2.0**-8  # the dtype rounds again
        assert (abs(back[tokens, head] - there[tokens, head]) <= most).all()
    for head, tokens in far.items():
        values[tokens, head] = -values[tokens, head]
    again = restored(dtype, values, 3 | flags)
    assert (back[others] == again[others]).all()


def test_how_many_tokens_are_precise() -> None:
    for role, tokens, count in (
        ("key", 256, 8),
        ("value", 256, 2),
        ("key", 5, 1),
        ("latent", 5, 1),
    ):
        tensor = tensor_of("bfloat16", 64, inner=tokens, heads=3, role=role)
        sizes = [Lbq().fixed_bytes(tensor, bits) for bits in (4, 4 | PRECISE)]
        assert sizes[0] is not None
        assert sizes[1] == sizes[0] + 3 * count * (4 + 64)


def test_the_precise_token_must_be_one(both_kernels: bool) -> None:
    tensor = tensor_of("bfloat16", 64, inner=4)
    coded = coded_of(tensor, 4 | PRECISE)
    stored = encode_block(coded, np.zeros(coded.layout.nbytes, dtype=np.uint8))
    stored[-68] = 4
    with pytest.raises(FormatError):
        decode_block(coded, stored, np.zeros(coded.layout.nbytes, dtype=np.uint8))


@pytest.mark.parametrize("flags", [0, CENTRED, CENTRED | TURNING])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_counts_as_missing(dtype: str, flags: int, both_kernels: bool) -> None:
    rng = np.random.default_rng(4)
    offset = 5.0 if flags else 0.0
    values = rng.standard_normal((32, 2, 64)) + offset
    plain = restored(dtype, values, 4 | (flags & CENTRED))
    values[3, 0, 5], values[4, 1, 6], values[5, 0, 7] = np.nan, np.inf, -np.inf
    back = restored(dtype, values, 4 | flags)
    assert np.isfinite(back).all()
    assert abs(back[3, 0, 5] - offset) < 1
    assert abs(back[4, 1, 6] - offset) < 1
    assert abs(back[5, 0, 7] - offset) < 1
    # Other vectors lose at most what one value less does to a mean.
    others = np.ones((32, 2), dtype=bool)
    others[3, 0] = others[4, 1] = others[5, 0] = False
    assert abs(back[others] - plain[others]).max() < (0.5 if flags else 1e-9)


def test_vectors_of_nothing_finite_become_zeros(both_kernels: bool) -> None:
    values = np.empty((3, 1, 64))
    values[0], values[1], values[2] = np.inf, np.nan, 1.0
    for dtype in FLOATS:
        back = restored(dtype, values, 4)
        assert (back[:2] == 0).all()
        assert abs(back[2] - 1).max() < 0.3


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_stay_finite(dtype: str, width: int, both_kernels: bool) -> None:
    most = 65504.0 if dtype == "float16" else float(floats(dtype, elements(dtype, 3.4028235e38)))
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (4, 1, 64))
    for values in (signs * most, np.full((4, 1, 64), most)):
        for flags in (0, CENTRED, CENTRED | TURNING):
            back = restored(dtype, values, width | flags)
            assert np.isfinite(back).all()
    back = restored(dtype, signs * most, width)
    part = (((back - signs * most) / most) ** 2).mean()
    assert part < 2.5 * ERRORS[width]


def test_small_numbers_come_back(both_kernels: bool) -> None:
    values = np.random.default_rng(1).standard_normal((8, 1, 64))
    for dtype, size in (("bfloat16", 2.0**-105), ("float32", 2.0**-105), ("float16", 2.0**-12)):
        back = restored(dtype, values * size, 4) / size
        assert ((back - values) ** 2).mean() < 2 * ERRORS[4]


def test_vectors_much_smaller_than_others_become_zeros(both_kernels: bool) -> None:
    values = np.ones((3, 1, 64))
    values[1] *= 2.0**-14
    values[2] *= 2.0**-16
    back = restored("float32", values, 4)
    assert abs(back[1] * 2.0**14 - 1).max() < 0.5
    assert not back[2].any()


def test_it_takes_floats_that_need_not_be_exact() -> None:
    for dtype in FLOATS:
        for role in ("key", "value", "latent"):
            assert Lbq().takes(tensor_of(dtype, 64, role=role))
    assert not Lbq().takes(tensor_of("float8_e4m3fn", 64))
    assert not Lbq().takes(tensor_of("bytes", 64))
    assert not Lbq().takes(tensor_of("bfloat16", 72))
    assert not Lbq().takes(tensor_of("bfloat16", 8192))
    assert not Lbq().takes(tensor_of("bfloat16", 1024, heads=65))
    state = TensorLayout("state", "float32", 0, 1, 1, 1, 64, 256, 256, 256, 0)
    assert not Lbq().takes(state)


@pytest.mark.parametrize(
    ("dtype", "dim", "bits"),
    [
        ("bfloat16", 64, 1),
        ("bfloat16", 64, 5),
        ("bfloat16", 64, 4 | TURNING),
        ("bfloat16", 80, 4 | CENTRED | TURNING),
        ("bfloat16", 64, 4 | 128),
        ("bfloat16", 72, 4),
        ("bytes", 64, 4),
    ],
)
def test_what_it_does_not_take_is_refused(
    dtype: Any, dim: int, bits: int, kernels_on: None
) -> None:
    tensor = tensor_of(dtype, dim)
    payload = np.zeros(tensor.nbytes, dtype=np.uint8)
    for call in (
        lambda: Lbq().fixed_bytes(tensor, bits),
        lambda: Lbq().most_bytes(tensor, bits),
        lambda: Lbq().encode(tensor, payload, bits),
        lambda: Lbq().decode(tensor, np.zeros(999, dtype=np.uint8), payload, bits),
    ):
        with pytest.raises(ValueError, match="lbq does not store"):
            call()
    kernel = Kernel(CodedLayout(KVLayout.of(tensor.nbytes, [tensor]), LBQ4, ((CODER_LBQ, bits),)))
    assert kernel.encode(payload, 9999) is None
    assert kernel.decode(np.full(9999, 99, dtype=np.uint8)) is None


def test_the_tables() -> None:
    for group in (64, 128):
        assert sorted(tables.ORDERS[group]) == list(range(group))
        assert sorted(1 << bit for bit in tables.STAGES[group]) == [
            1 << bit for bit in range(group.bit_length() - 1)
        ]
    for width, levels in tables.LEVELS.items():
        assert len(levels) == 1 << width
        assert list(levels) == sorted(levels)
    # Every state is reached twice, and its two ways in take levels of different subsets.
    for state in range(tables.STATES):
        ways = [(state >> 1) | (old << 2) for old in (0, 1)]
        assert len({tables.subset_of(way, state & 1) for way in ways}) == 2


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_committed_blocks_are_read_and_made_as_ever(
    dtype: str, width: int, flags: int, both_kernels: bool
) -> None:
    golden = np.load(GOLDEN / "lbq.npz")
    for dim in (64, 80, 96, 128) if dtype == "bfloat16" else (64,):
        if flags & TURNING and dim % 32:
            continue
        given_ = golden[f"given_{dtype}_{dim}"]
        stored = golden[f"stored_{dtype}_{dim}_{width | flags}"]
        tokens, heads, _ = given_.shape
        coded = coded_of(tensor_of(dtype, dim, inner=tokens, heads=heads), width | flags)
        assert encode_block(coded, given_.reshape(-1).view(np.uint8)).tobytes() == stored.tobytes()
        back = np.zeros(coded.layout.nbytes, dtype=np.uint8)
        decode_block(coded, stored, back)
        own = golden[f"restored_{dtype}_{dim}_{width | flags}"]
        assert sha256(back.data).digest() == own.tobytes()


_ON_ANOTHER_PROCESSOR = """
import ctypes
import sys
from pathlib import Path
import numpy as np
from lifeboat_cache.kernels import jit, lbq_decode
sys.path.insert(0, sys.argv[2])
import test_codec_lbq as tests
jit.compile_into(Path(sys.argv[1]))
kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)
decode = kind(jit._registered["lbq_decode.decode"].address)
rng = np.random.default_rng(1)
for dim in (64, 80, 96, 128):
    for width in tests.WIDTHS:
        for dtype in tests.FLOATS:
            bits = width | tests.PRECISE
            if dim != 80:
                bits |= tests.CENTRED | tests.TURNING
            values = tests.turning(rng, 20, 2, dim, dim // 2)
            there = tests.elements(dtype, values).reshape(-1).view(np.uint8)
            tensor = tests.tensor_of(dtype, dim, inner=20, heads=2)
            row, scratch = tensor.row(tests.CODER_LBQ, bits).ctypes, tests.scratch()
            stored = tests.Lbq().encode(tensor, there, bits)
            back, own = np.zeros_like(there), np.zeros_like(there)
            decode(row.data, back.ctypes.data, stored.ctypes.data, stored.size, scratch)
            tests.Lbq().decode(tensor, stored, own, bits)
            assert back.tobytes() == own.tobytes(), (dim, dtype, bits)
print("same")
"""


@pytest.mark.parametrize(
    ("name", "features"), [("generic", ""), ("haswell", "+avx2,+avx,+sse4.2,+bmi,+bmi2,+f16c")]
)
def test_other_processors_restore_the_same_bytes(name: str, features: str, tmp_path: Path) -> None:
    """The only place where kernels of this coder look at the processor is their table."""
    if platform.machine() != "x86_64":
        pytest.skip("the names of processors are those of x86-64")
    path = os.pathsep.join(p for p in sys.path if p)
    settings_ = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", _ON_ANOTHER_PROCESSOR, str(tmp_path), str(Path(__file__).parent)],
        env={**os.environ, **settings_},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same"

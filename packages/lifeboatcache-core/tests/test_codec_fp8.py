"""The coder fp8: the kernel and its twin, what comes back, and what malformed bytes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.codecs.blocks import decode_block, encode_block, scratch
from lifeboat_cache.codecs.fp8 import Fp8
from lifeboat_cache.codecs.layout import ITEM_BYTES, KVLayout, TensorLayout
from lifeboat_cache.codecs.names import FP8
from lifeboat_cache.codecs.recipes import CodedLayout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels.codec_layout import CODER_COPY, CODER_FP8

GOLDEN = Path(__file__).parent / "golden" / "codecs"
FLOATS = ("bfloat16", "float16", "float32")
HEAD_SIZES = (64, 80, 96, 128, 192, 256, 576)
MANTISSAS = (3, 4, 5)

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
) -> TensorLayout:
    """A tensor whose vectors lie ``gap`` bytes apart, by tokens or within pages by heads."""
    step = dim * ITEM_BYTES[dtype] + gap
    by_head, by_inner = (step * inner, step) if heads_first else (step, step * heads)
    page = step * heads * inner
    return TensorLayout("key", dtype, 0, outer, inner, heads, dim, page, by_inner, by_head, offset)


def coded_of(tensor: TensorLayout, bits: int, after: int = 0) -> CodedLayout:
    """A block of this tensor and of bytes around it, which are copied."""
    end = int(tensor.starts().max()) + tensor.dim * tensor.item_bytes
    layout = KVLayout.of(end + after, [tensor])
    coders = [(CODER_FP8, bits)] + [(CODER_COPY, 0)] * (len(layout.tensors) - 1)
    return CodedLayout(layout, FP8, tuple(coders))


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
    """What comes back of vectors ``(n, dim)`` of values."""
    there = elements(dtype, values)
    coded = coded_of(tensor_of(dtype, there.shape[1], inner=there.shape[0]), bits)
    back = np.zeros(coded.layout.nbytes, dtype=np.uint8)
    decode_block(coded, encode_block(coded, there.reshape(-1).view(np.uint8)), back)
    return floats(dtype, back.view(there.dtype)).reshape(there.shape)


# How far apart the magnitudes of a vector lie, and around what, in binary orders.
SPREADS = {
    "bfloat16": ((0, 0), (2, -125), (2, 126), (30, 0)),
    "float16": ((0, 0), (3, -20), (3, 14)),
}
SPREADS["float32"] = SPREADS["bfloat16"]


@st.composite
def blocks(draw: Any) -> tuple[CodedLayout, Bytes]:
    """A block with one tensor for fp8, and a payload of anything between real and random."""
    dtype = draw(st.sampled_from(FLOATS))
    dim = draw(st.one_of(st.sampled_from(HEAD_SIZES), st.integers(1, 140)))
    item = ITEM_BYTES[dtype]
    tensor = tensor_of(
        dtype,
        dim,
        outer=draw(st.integers(1, 3)),
        inner=draw(st.integers(1, 5)),
        heads=draw(st.integers(1, 3)),
        heads_first=draw(st.booleans()),
        gap=draw(st.sampled_from((0, item, 3))),
        offset=draw(st.integers(0, 70)),
    )
    coded = coded_of(tensor, draw(st.sampled_from(MANTISSAS)), after=draw(st.integers(0, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    payload = rng.integers(0, 256, coded.layout.nbytes, dtype=np.uint8)
    if draw(st.booleans()):
        wide, around = draw(st.sampled_from(SPREADS[dtype]))
        shape = (tensor.tokens, tensor.heads, dim)
        with np.errstate(over="ignore"):
            values = rng.standard_normal(shape) * 2.0 ** (
                around + wide * rng.standard_normal(shape)
            )
            numbers = elements(dtype, np.asarray(values, dtype=np.float32))
        special = rng.random(shape) < draw(st.sampled_from((0, 0.01, 0.5)))
        odd = elements(dtype, [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-41, 6e-8, 3e38, 65504.0])
        numbers = np.where(special, rng.choice(odd, shape), numbers).astype(numbers.dtype)
        tensor.scatter(numbers.view(np.uint8).reshape(tensor.tokens, tensor.heads, -1), payload)
    return coded, payload


class Kernel:
    """The kernels on memory with a margin around it, which must stay as it is."""

    MARGIN = 256
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


def twin_encode(coded: CodedLayout, payload: Bytes) -> Bytes:
    return Fp8().encode(coded.layout.tensors[0], payload, coded.coders[0][1])


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
    mine = twin_encode(coded, payload)
    assert stored[: mine.shape[0]].tobytes() == mine.tobytes()
    assert stored.shape[0] == size


@given(blocks(), st.integers(0, 2**32), st.booleans())
def test_the_kernel_restores_the_bytes_of_its_twin(
    kernels_on: None, block: tuple[CodedLayout, Bytes], seed: int, random: bool
) -> None:
    coded, payload = block
    tensor, bits = coded.layout.tensors[0], coded.coders[0][1]
    stored = encode_block(coded, payload)
    if random:
        rng = np.random.default_rng(seed)
        stored = rng.integers(0, 256, (stored.shape[0],), dtype=np.uint8)
    back = Kernel(coded).decode(stored)
    assert back is not None
    mine = back.copy()
    tensor.scatter(np.zeros_like(tensor.gather(mine)), mine)
    assert Fp8().decode(tensor, stored, mine, bits) == tensor.vectors * (tensor.dim + 1)
    assert back.tobytes() == mine.tobytes()


@given(blocks(), st.floats(0, 0.999))
def test_too_little_room_and_truncated_bytes_are_refused(
    kernels_on: None, block: tuple[CodedLayout, Bytes], part: float
) -> None:
    coded, payload = block
    less = int(coded.most_bytes * part)
    assert Kernel(coded).encode(payload, less) is None
    stored = Kernel(coded).encode(payload, coded.most_bytes)
    assert stored is not None
    assert Kernel(coded).decode(stored[:less]) is None
    own = stored[: coded.layout.tensors[0].vectors * (coded.layout.tensors[0].dim + 1) - 1]
    with pytest.raises(FormatError, match="cut short"):
        Fp8().decode(coded.layout.tensors[0], own, payload.copy(), coded.coders[0][1])


def test_what_lies_between_vectors_is_not_written(both_kernels: bool) -> None:
    tensor = tensor_of("bfloat16", 70, outer=2, inner=3, heads=2, gap=6, offset=5)
    coded = coded_of(tensor, 3)
    stored = Fp8().encode(tensor, np.zeros(coded.layout.nbytes, dtype=np.uint8), 3)
    whole = np.full(coded.layout.nbytes, 0xA5, dtype=np.uint8)
    rest = np.full(coded.fixed_bytes - stored.shape[0], 0xA5, dtype=np.uint8)
    decode_block(coded, np.concatenate((stored, rest)), whole)
    assert not tensor.gather(whole).any()
    tensor.scatter(np.full_like(tensor.gather(whole), 0xA5), whole)
    assert (whole == 0xA5).all()


@pytest.mark.parametrize("bits", MANTISSAS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_the_error_of_normal_values_is_half_a_place(
    dtype: str, dim: int, bits: int, both_kernels: bool
) -> None:
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((40, dim)) * 2.0 ** rng.integers(-8, 9, (40, 1))
    there = floats(dtype, elements(dtype, values))
    back = restored(dtype, values, bits)
    most = np.abs(there).max(axis=1, keepdims=True)
    # Down from the largest magnitude, so many binary orders have all bits of mantissa.
    full = np.abs(there) >= most * 2.0 ** -(2.0 ** (7 - bits) - 3)
    assert (np.abs(back - there) <= np.where(full, np.abs(there), 0) * 2.0 ** -(bits + 1))[
        full
    ].all()
    smallest = most * 2.0 ** -(2.0 ** (7 - bits) - 3)
    assert (np.abs(back - there) <= smallest * 2.0 ** -(bits + 1))[~full].all()
    assert ((np.signbit(back) == np.signbit(there)) | (there == 0)).all()


@pytest.mark.parametrize("bits", MANTISSAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_infinity_nan_and_zeros_come_back(dtype: str, bits: int, both_kernels: bool) -> None:
    values = np.tile(np.linspace(-3, 3, 80), (4, 1))
    plain = restored(dtype, values, bits)
    values[1, 3], values[1, 70], values[2, 79] = np.inf, -np.inf, np.nan
    values[3, 5], values[3, 6] = 0.0, -0.0
    back = restored(dtype, values, bits)
    assert back[1, 3] == np.inf
    assert back[1, 70] == -np.inf
    assert np.isnan(back[2, 79])
    assert back[3, 5] == 0
    assert not np.signbit(back[3, 5])
    assert back[3, 6] == 0
    assert np.signbit(back[3, 6])
    # And no other element notices.
    special = np.zeros(values.shape, dtype=bool)
    special[1, 3] = special[1, 70] = special[2, 79] = special[3, 5] = special[3, 6] = True
    assert (back[~special] == plain[~special]).all()


def test_vectors_of_nothing_finite(both_kernels: bool) -> None:
    values = np.array([[0.0] * 20, [np.inf] * 20, [np.nan] * 20, [-np.inf] * 20])
    for dtype in FLOATS:
        back = restored(dtype, values, 3)
        assert (back[0] == 0).all()
        assert np.isposinf(back[1]).all()
        assert np.isnan(back[2]).all()
        assert np.isneginf(back[3]).all()


@pytest.mark.parametrize("bits", MANTISSAS)
def test_no_nan_loses_its_sign_and_none_keeps_its_payload(bits: int, both_kernels: bool) -> None:
    for dtype, given_, expected in (
        ("bfloat16", [0x7F81, 0xFFFF], [0x7FC0, 0xFFC0]),
        ("float16", [0x7C01, 0xFFFF], [0x7E00, 0xFE00]),
        ("float32", [0x7F800001, 0xFFFFFFFF], [0x7FC00000, 0xFFC00000]),
    ):
        there = np.array(given_, dtype=np.uint32 if dtype == "float32" else np.uint16)
        coded = coded_of(tensor_of(dtype, 2), bits)
        back = np.zeros(coded.layout.nbytes, dtype=np.uint8)
        decode_block(coded, encode_block(coded, there.view(np.uint8)), back)
        assert back.view(there.dtype).tolist() == expected


@pytest.mark.parametrize("bits", MANTISSAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_stay_finite(dtype: str, bits: int, both_kernels: bool) -> None:
    most = 65504.0 if dtype == "float16" else float(floats(dtype, elements(dtype, 3.4028235e38)))
    back = restored(dtype, [[most, -most, most / 2, 1.0]], bits)[0]
    assert np.isfinite(back).all()
    assert back[0] == most
    assert back[1] == -most
    assert abs(back[2] / (most / 2) - 1) <= 2.0 ** -(bits + 1)


@pytest.mark.parametrize("bits", MANTISSAS)
def test_subnormal_numbers(bits: int, both_kernels: bool) -> None:
    """Those of float16 are numbers like others; the others' are zeros."""
    least = 2.0**-24
    counts = np.array([[1, 2, 3, 7, -8, 15, 16, 17, 0, 1000]], dtype=np.float64)
    back = restored("float16", counts * least, bits) / least
    assert (back == np.trunc(back)).all()
    assert back[0, 8] == 0
    if bits == 3:
        few = np.abs(counts) <= 16
        assert (back[few] == counts[few]).all()
        assert abs(back[0, 9] / 1000 - 1) <= 1 / 16
    for dtype in ("bfloat16", "float32"):
        back = restored(dtype, [[2.0**-127, -(2.0**-130), 0.0]], bits)
        assert (back == 0).all()
        assert np.signbit(back[0, 1])


def test_an_outlier_leaves_the_others_alone(both_kernels: bool) -> None:
    values = np.random.default_rng(3).standard_normal((8, 128))
    alone = restored("bfloat16", values, 3)
    values[:, 17] = 1000.0
    back = restored("bfloat16", values, 3)
    large = np.abs(values) >= 2.0**-4
    large[:, 17] = False
    assert (back[large] == alone[large]).all()


def test_e4m3_codes_are_those_of_everyone(both_kernels: bool) -> None:
    """With three bits of mantissa, codes are float8_e4m3fn."""
    positive = np.array(
        [0.0, 2.0**-9, 3 * 2.0**-9, 2.0**-6, 1.0, 1.125, 240.0, 256.0, 416.0], dtype=np.float64
    )
    expected = [0x00, 0x01, 0x03, 0x08, 0x38, 0x39, 0x77, 0x78, 0x7D]
    coded = coded_of(tensor_of("float32", len(expected)), 3)
    stored = encode_block(coded, elements("float32", positive).view(np.uint8))
    assert stored[1:].tolist() == expected
    assert stored[0] == 135


def test_ties_go_to_even(both_kernels: bool) -> None:
    values = [[8.0, 1 + 1 / 16, 1 + 3 / 16, -(1 + 5 / 16), 1 + 1 / 16 + 2.0**-20]]
    assert restored("float32", values, 3).tolist() == [[8.0, 1.0, 1.25, -1.25, 1.125]]


def test_it_takes_floats_that_need_not_be_exact() -> None:
    for dtype in FLOATS:
        assert Fp8().takes(tensor_of(dtype, 64))
    assert not Fp8().takes(tensor_of("float8_e4m3fn", 64))
    assert not Fp8().takes(tensor_of("bytes", 64))
    state = TensorLayout("state", "float32", 0, 1, 1, 1, 64, 256, 256, 256, 0)
    assert not Fp8().takes(state)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 2), ("bfloat16", 6), ("bytes", 3)])
def test_what_it_does_not_take_is_refused(dtype: Any, bits: int, kernels_on: None) -> None:
    tensor = tensor_of(dtype, 8)
    payload = np.zeros(tensor.nbytes, dtype=np.uint8)
    for call in (
        lambda: Fp8().fixed_bytes(tensor, bits),
        lambda: Fp8().most_bytes(tensor, bits),
        lambda: Fp8().encode(tensor, payload, bits),
        lambda: Fp8().decode(tensor, np.zeros(99, dtype=np.uint8), payload, bits),
    ):
        with pytest.raises(ValueError, match="fp8 does not store"):
            call()
    kernel = Kernel(CodedLayout(KVLayout.of(tensor.nbytes, [tensor]), FP8, ((CODER_FP8, bits),)))
    assert kernel.encode(payload, 999) is None
    assert kernel.decode(np.zeros(9, dtype=np.uint8)) is None


@pytest.mark.parametrize("bits", MANTISSAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_committed_blocks_are_read_and_made_as_ever(
    dtype: str, bits: int, both_kernels: bool
) -> None:
    golden = np.load(GOLDEN / "fp8.npz")
    given_ = golden[f"given_{dtype}"]
    stored = golden[f"stored_{dtype}_{bits}"]
    coded = coded_of(tensor_of(dtype, given_.shape[1], inner=given_.shape[0]), bits)
    assert encode_block(coded, given_.reshape(-1).view(np.uint8)).tobytes() == stored.tobytes()
    back = np.zeros(coded.layout.nbytes, dtype=np.uint8)
    decode_block(coded, stored, back)
    assert back.tobytes() == golden[f"restored_{dtype}_{bits}"].tobytes()

"""The exact coders: kernels and twins agree, every bit comes back, malformed bytes are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.codecs.blocks import scratch
from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, TensorLayout
from lifeboat_cache.codecs.recipes import coder
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels.codec_layout import CODER_DENSE, CODER_LOSSLESS

GOLDEN = Path(__file__).parent / "golden" / "codecs"
HEAD_SIZES = (64, 80, 96, 128, 192, 256, 576)
DTYPES: tuple[DType, ...] = get_args(DType)
CODERS = {"lossless": CODER_LOSSLESS, "dense": CODER_DENSE}
MARGIN = 192
FILL = 0xA5

Bytes = npt.NDArray[np.uint8]

exact_coders = pytest.mark.parametrize("number", CODERS.values(), ids=CODERS)


def encode_kernel(number: int, tensor: TensorLayout, payload: Bytes, room: int) -> Bytes | None:
    """What the kernel stores; nothing outside of its room may change."""
    from lifeboat_cache.kernels.coders import encode_blocks

    stored = np.full(room + 2 * MARGIN, FILL, dtype=np.uint8)
    size = _run(encode_blocks, number, tensor, payload, stored[MARGIN : MARGIN + room], 0)
    assert (stored[:MARGIN] == FILL).all()
    assert (stored[MARGIN + room :] == FILL).all()
    return None if size < 0 else stored[MARGIN : MARGIN + size].copy()


def decode_kernel(number: int, tensor: TensorLayout, stored: Bytes, payload: Bytes) -> bool:
    """Restore into a payload, in which nothing outside of the tensor may change."""
    from lifeboat_cache.kernels.coders import decode_blocks

    before = payload.copy()
    size = _run(decode_blocks, number, tensor, payload, stored, stored.shape[0])
    tensor.scatter(tensor.gather(payload), before)
    assert payload.tobytes() == before.tobytes()
    return size >= 0


def _run(
    call: Any, number: int, tensor: TensorLayout, payload: Bytes, stored: Bytes, size: int
) -> int:
    rows = tensor.row(number)
    iov = np.array([payload.ctypes.data, payload.nbytes], dtype=np.uint64)
    starts, places = np.array([0, 1]), np.array([0, stored.nbytes])
    which, within, sizes = np.array([0]), np.array([tensor.offset]), np.array([size])
    at = [array.ctypes.data for array in (rows, iov, starts, which, within, stored, places, sizes)]
    call(at[0], 1, at[1], at[2], at[3], at[4], 1, at[5], at[6], at[7], scratch())
    return int(sizes[0])


def agree(number: int, tensor: TensorLayout, payload: Bytes) -> Bytes:
    """Kernel and twin store the same bytes, and restore the same."""
    twin = coder(number)
    most = twin.most_bytes(tensor, 0)
    stored = encode_kernel(number, tensor, payload, most)
    assert stored is not None
    assert stored.tobytes() == twin.encode(tensor, payload, 0).tobytes()
    assert encode_kernel(number, tensor, payload, stored.shape[0] - 1) is None
    again = encode_kernel(number, tensor, payload, stored.shape[0])
    assert again is not None
    assert again.tobytes() == stored.tobytes()
    by_kernel, by_twin = np.full_like(payload, FILL), np.full_like(payload, FILL)
    assert decode_kernel(number, tensor, stored, by_kernel)
    assert tensor.gather(by_kernel).tobytes() == tensor.gather(payload).tobytes()
    assert twin.decode(tensor, stored, by_twin, 0) == stored.shape[0]
    assert by_twin.tobytes() == by_kernel.tobytes()
    return stored


def tensor_of(dtype: DType, tokens: int, heads: int, dim: int) -> TensorLayout:
    """A tensor whose elements lie one after the other."""
    step = dim * ITEM_BYTES[dtype]
    page = tokens * heads * step
    return TensorLayout("key", dtype, 0, 1, tokens, heads, dim, page, heads * step, step, 0)


def numbers(dtype: str, values: npt.NDArray[np.float32]) -> Bytes:
    """The bytes of elements near to these values."""
    values = values.reshape(-1)
    if dtype == "float32":
        return values.astype(np.float32).reshape(-1).view(np.uint8)
    if dtype in ("bfloat16", "bytes"):
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).reshape(-1).view(np.uint16)
    if dtype == "float16":
        return half.view(np.uint8)
    if dtype == "float8_e5m2":
        return (half >> 8).astype(np.uint8)
    exponent = np.clip((half >> 10 & 31).astype(np.int16) - 8, 0, 15)
    return (half >> 8 & 0x80 | exponent << 3 | half >> 7 & 7).astype(np.uint8)


@st.composite
def tensors(draw: Any) -> tuple[TensorLayout, Bytes]:
    """A tensor of any shape in a payload: random bytes, one number, or numbers like KV."""
    dtype = draw(st.sampled_from(DTYPES))
    item = ITEM_BYTES[dtype]
    dim = draw(st.one_of(st.sampled_from(HEAD_SIZES), st.integers(1, 70)))
    sizes = [draw(st.sampled_from(some)) for some in ((1, 1, 2, 17), (1, 2, 5, 16), (1, 2, 3, 8))]
    stride = dim * item + draw(st.sampled_from((0, 0, 4)))
    strides = [0, 0, 0]
    for axis in draw(st.permutations((2, 1, 0))):
        strides[axis] = stride
        stride = stride * sizes[axis] + draw(st.sampled_from((0, 0, 2, 64)))
    offset = draw(st.sampled_from((0, 3, 64)))
    outer, inner, heads = sizes
    tensor = TensorLayout(
        "key", dtype, 0, outer, inner, heads, dim, strides[0], strides[1], strides[2], offset
    )
    size = int(tensor.starts().max()) + dim * item + draw(st.sampled_from((0, 9)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = draw(st.sampled_from(("random", "one", "even", "outliers", "columns")))
    count = size // item + 1
    if kind == "random":
        return tensor, rng.integers(0, 256, size, dtype=np.uint8)
    if kind == "one":
        return tensor, np.resize(rng.integers(0, 256, item, dtype=np.uint8), size)
    values = rng.standard_normal(count)
    if kind == "outliers":
        values *= np.exp(rng.normal(0, draw(st.sampled_from((1.0, 4.0))), count))
        values[rng.random(count) < 0.05] = 0
    payload = np.resize(numbers(dtype, values.astype(np.float32)), size).copy()
    if kind == "columns":
        shape = (tensor.tokens, tensor.heads, dim)
        scales = np.exp(rng.normal(0, 2, shape[1:])) * np.sign(rng.normal(0.5, 1, shape[1:]))
        spread = rng.choice([0.05, 0.5, 3.0], shape[1:])
        values = scales * (1 + spread * rng.standard_normal(shape))
        whole = numbers(dtype, values.astype(np.float32))
        width = dim * item
        flat = np.resize(whole, tensor.vectors * width)
        tensor.scatter(flat.reshape(tensor.tokens, tensor.heads, width), payload)
    return tensor, payload


@exact_coders
@given(case=tensors())
def test_kernel_and_twin_agree_and_every_bit_comes_back(
    number: int, case: tuple[TensorLayout, Bytes], kernels_on: None
) -> None:
    agree(number, *case)


@exact_coders
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bytes"])
def test_all_patterns_of_16_bits(number: int, dtype: DType, tokens: int, kernels_on: None) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    count = (1 << 16) * 2 // ITEM_BYTES[dtype]
    tensor = tensor_of(dtype, tokens, 1, count // tokens)
    agree(number, tensor, every.view(np.uint8))
    agree(number, tensor, np.random.default_rng(2).permutation(every).view(np.uint8))


@exact_coders
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bytes"])
def test_all_patterns_of_8_bits(number: int, dtype: DType, tokens: int, kernels_on: None) -> None:
    every = np.tile(np.arange(256, dtype=np.uint8), 64)
    agree(number, tensor_of(dtype, tokens, 1, every.shape[0] // tokens), every)


@exact_coders
def test_numbers_that_are_none(number: int, kernels_on: None) -> None:
    """Payloads of NaN, infinities, both zeros and what is smaller than normal numbers."""
    rng = np.random.default_rng(5)
    odd = np.array([0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x807F], dtype=np.uint16)
    normal = numbers("bfloat16", rng.standard_normal(64 * 320).astype(np.float32)).view(np.uint16)
    for share in (0.002, 0.1, 1.0):
        chosen = rng.random(normal.shape) < share
        mixed = np.where(chosen, rng.choice(odd, normal.shape), normal).astype(np.uint16)
        agree(number, tensor_of("bfloat16", 64, 5, 64), mixed.view(np.uint8))


@exact_coders
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_number_takes_no_room(number: int, dtype: DType, kernels_on: None) -> None:
    tensor = tensor_of(dtype, 256, 8, 128)
    payload = np.zeros(tensor.nbytes, dtype=np.uint8)
    assert agree(number, tensor, payload).shape[0] < 16


@exact_coders
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bytes_cost_a_few_more(number: int, dtype: DType, kernels_on: None) -> None:
    tensor = tensor_of(dtype, 64, 3, 80)
    payload = np.random.default_rng(6).integers(0, 256, tensor.nbytes, dtype=np.uint8)
    stored = agree(number, tensor, payload)
    assert stored.shape[0] <= tensor.nbytes + 5
    assert coder(number).most_bytes(tensor, 0) == tensor.nbytes + 5


@exact_coders
@pytest.mark.parametrize(
    ("dtype", "tokens", "columns"),
    [
        ("bfloat16", 1, (1 << 19) + 77),
        ("bytes", 1, (1 << 20) + 3),
        ("bytes", 1, (1 << 20) + 2),
        ("bfloat16", 3, 4096 + 65),
        ("bfloat16", 300, 70),
        ("float32", 70, 4200),
        ("float8_e4m3fn", 300, 4160),
        ("bfloat16", 40, 1),
    ],
)
def test_tensors_of_several_parts(
    number: int, dtype: DType, tokens: int, columns: int, kernels_on: None
) -> None:
    tensor = tensor_of(dtype, tokens, 1, columns)
    values = np.random.default_rng(7).standard_normal(tokens * columns).astype(np.float32)
    payload = np.resize(numbers(dtype, values), tensor.nbytes)
    agree(number, tensor, payload)


@exact_coders
@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_bfloat16_like_kv_becomes_smaller(number: int, tokens: int, kernels_on: None) -> None:
    rng = np.random.default_rng(8)
    scales = np.exp(rng.normal(0, 0.7, (1, 8 * 128)))
    values = (rng.standard_normal((tokens, 8 * 128)) * scales).astype(np.float32)
    tensor = tensor_of("bfloat16", tokens, 8, 128)
    ratio = tensor.nbytes / agree(number, tensor, numbers("bfloat16", values)).shape[0]
    assert ratio > (1.4 if tokens == 256 else 1.3)


@exact_coders
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 1, 80), (1, 1, 128), (1, 2, 96), (1, 1, 200)])
def test_one_vector_becomes_smaller(
    number: int, shape: tuple[int, int, int], kernels_on: None
) -> None:
    tensor = tensor_of("bfloat16", *shape)
    values = np.random.default_rng(9).standard_normal(shape).astype(np.float32)
    stored = agree(number, tensor, numbers("bfloat16", values))
    assert stored.shape[0] < 0.85 * tensor.nbytes


@exact_coders
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(16, 8, 128), (64, 3, 96), (300, 1, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_heads_before_tokens(
    number: int, dtype: DType, tokens: int, heads: int, dim: int, kernels_on: None
) -> None:
    """Tensors large enough for a range coder, whose vectors do not lie as they are stored."""
    step = dim * ITEM_BYTES[dtype]
    page = step * heads * 4
    tensor = TensorLayout(
        "value", dtype, 0, tokens // 4, 4, heads, dim, 2 * page, step, step * 4, page
    )
    rng = np.random.default_rng(11)
    shape = (tensor.tokens, heads, dim)
    values = rng.standard_normal(shape) * np.exp(rng.normal(0, 1, shape[1:]))
    payload = rng.integers(0, 256, 2 * page * (tokens // 4), dtype=np.uint8)
    elements = np.resize(numbers(dtype, values.astype(np.float32)), tensor.nbytes)
    tensor.scatter(elements.reshape(tensor.tokens, heads, step), payload)
    stored = agree(number, tensor, payload)
    _damage(number, tensor, payload, stored, rng)


@exact_coders
@given(case=tensors(), seed=st.integers(0, 1 << 32))
def test_malformed_bytes_are_refused_or_decoded_alike(
    number: int, case: tuple[TensorLayout, Bytes], seed: int, kernels_on: None
) -> None:
    tensor, payload = case
    good = coder(number).encode(tensor, payload, 0)
    _damage(number, tensor, payload, good, np.random.default_rng(seed))


def _damage(
    number: int, tensor: TensorLayout, payload: Bytes, good: Bytes, rng: np.random.Generator
) -> None:
    for kind in range(4):
        bad = good.copy()
        if kind == 0:
            bad = bad[: rng.integers(0, bad.shape[0])]
        elif kind == 1:
            bad = rng.integers(0, 256, int(rng.integers(0, 2 * bad.shape[0])), dtype=np.uint8)
        else:
            near = min(bad.shape[0], 64) if kind == 2 else bad.shape[0]
            at = rng.integers(0, near, int(rng.integers(1, 4)))
            bad[at] = rng.integers(0, 256, at.shape[0])
        if rng.random() < 0.7 and bad.shape[0] >= 4:
            bad[:4] = np.frombuffer(bad.shape[0].to_bytes(4, "little"), dtype=np.uint8)
        by_kernel, by_twin = np.full_like(payload, FILL), np.full_like(payload, FILL)
        done = decode_kernel(number, tensor, bad, by_kernel)
        try:
            taken = coder(number).decode(tensor, bad, by_twin, 0)
        except FormatError:
            taken = -1
        assert done == (taken == bad.shape[0])
        if done:
            assert by_kernel.tobytes() == by_twin.tobytes()


@exact_coders
def test_bytes_of_another_shape_are_refused(number: int, kernels_on: None) -> None:
    values = np.random.default_rng(10).standard_normal(64 * 320).astype(np.float32)
    tensor, other = tensor_of("bfloat16", 64, 5, 64), tensor_of("bfloat16", 63, 5, 64)
    stored = agree(number, tensor, numbers("bfloat16", values))
    payload = np.zeros(other.nbytes, dtype=np.uint8)
    assert not decode_kernel(number, other, stored, payload)
    with pytest.raises(FormatError, match="computed again"):
        coder(number).decode(other, stored, payload, 0)


@exact_coders
@pytest.mark.parametrize(
    ("dtype", "number_of", "shape"),
    [
        *((dtype, 0, (40, 2, 37)) for dtype in DTYPES),
        *((dtype, 1, (3, 1, 80)) for dtype in DTYPES),
        *((dtype, 2, (1, 1, 200)) for dtype in DTYPES),
        ("bfloat16", 3, (64, 2, 130)),
        ("float8_e4m3fn", 3, (17, 8, 130)),
    ],
)
def test_committed_tensors_are_read_and_made_as_ever(
    number: int, dtype: DType, number_of: int, shape: tuple[int, int, int], kernels_on: None
) -> None:
    name = next(name for name, known in CODERS.items() if known == number)
    payload = np.load(GOLDEN / "exact.npz")[f"{dtype}_{number_of}"]
    stored = np.load(GOLDEN / f"{name}.npz")[f"{dtype}_{number_of}"]
    assert agree(number, tensor_of(dtype, *shape), payload).tobytes() == stored.tobytes()


_WITHOUT = """
import sys
import pytest
from lifeboat_cache.kernels import vectors

vectors.HAS_EXPAND = False
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_the_same_on_processors_that_cannot_spread_bytes(tmp_path: Path) -> None:
    """All of this with kernels as they are compiled there."""
    options = ("-q", "-x", "-m", "not full", "-o", f"cache_dir={tmp_path}", __file__)
    subprocess.run([sys.executable, "-c", _WITHOUT, *options], check=True)

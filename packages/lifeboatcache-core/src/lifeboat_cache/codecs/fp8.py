"""The coder fp8: vectors of 8-bit floating-point numbers, each vector with a power of two."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["Fp8"]

_INF = 0x7F800000
_CODE_INF = 0x7E
_CODE_NAN = 0x7F

#: Bounds of a vector's exponent.
_BOUNDS = {"bfloat16": (20, 255), "float16": (103, 143), "float32": (20, 255)}


class Fp8:
    """8-bit floating-point numbers with a power of two for each vector.

    ``bits`` is the number of mantissa bits ``m`` of a code: 3 (e4m3), 4 (e3m4) or 5 (e2m5).
    A stored tensor is one byte per vector, in the order of tokens and heads: its exponent
    ``E``; then ``dim`` bytes per vector: the codes of its elements.

    - ``E`` is the exponent, biased as in float32, of the vector's largest finite magnitude, or
      one more if its significand would be rounded to the code of infinity; at least 20
      (float16: 103).
    - A code is a sign, ``7 - m`` bits of exponent ``f`` and ``m`` bits of mantissa. Its value is
      that of a float32 with biased exponent ``f + E - 2 ** (7 - m) + 1`` and this mantissa;
      with ``f = 0`` it is a subnormal, as in OCP E4M3: for ``m = 3`` a code is the
      ``float8_e4m3fn`` of the element divided by ``2 ** (E - 135)``.
    - Elements are rounded to nearest, ties to even. A finite element never becomes infinite;
      codes 0x7E and 0x7F are infinity and NaN.

    So infinities, NaN (a quiet one with its sign, without its payload) and signs of zeros come
    back as they were, and no other element notices an infinity or NaN. Elements smaller than
    the vector's largest by a factor of up to ``2 ** 13`` (e3m4: ``2 ** 5``; e2m5: 2) have all
    ``m`` bits; those that are smaller still lose places one by one, down to zero. Subnormal
    numbers of bfloat16 and float32 become zeros; those of float16 are numbers like others.
    """

    number = columns.CODER_FP8

    def takes(self, tensor: TensorLayout) -> bool:
        """Tensors of 16- or 32-bit floating-point numbers that need not be exact."""
        return tensor.dtype in _BOUNDS and tensor.role not in ("state", "opaque")

    def fixed_bytes(self, tensor: TensorLayout, bits: int) -> int | None:
        """A byte per element and one per vector."""
        _check(tensor, bits)
        return tensor.vectors * (tensor.dim + 1)

    def most_bytes(self, tensor: TensorLayout, bits: int) -> int:
        """A byte per element and one per vector."""
        _check(tensor, bits)
        return tensor.vectors * (tensor.dim + 1)

    def encode(
        self, tensor: TensorLayout, payload: npt.NDArray[np.uint8], bits: int
    ) -> npt.NDArray[np.uint8]:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        _check(tensor, bits)
        vectors = tensor.gather(payload).reshape(tensor.vectors, -1)
        sizes, signs = _float32_bits(tensor.dtype, vectors)
        finite = np.where(sizes < _INF, sizes, 0)
        exponents = (finite.max(axis=1) + (5 << (22 - bits))) >> 23
        exponents = np.clip(exponents, *_BOUNDS[tensor.dtype])
        codes = _codes(sizes, exponents[:, None] - _top(bits), bits) | signs
        return np.concatenate((exponents.astype(np.uint8), codes.astype(np.uint8).reshape(-1)))

    def decode(
        self,
        tensor: TensorLayout,
        stored: npt.NDArray[np.uint8],
        payload: npt.NDArray[np.uint8],
        bits: int,
    ) -> int:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        _check(tensor, bits)
        size = tensor.vectors * (tensor.dim + 1)
        if stored.shape[0] < size:
            raise FormatError("a stored tensor is cut short: it is computed again")
        exponents = stored[: tensor.vectors]
        codes = stored[tensor.vectors : size].reshape(tensor.vectors, tensor.dim)
        elements = _elements(tensor.dtype, bits)[exponents[:, None], codes]
        tensor.scatter(elements.view(np.uint8), payload)
        return size


def _check(tensor: TensorLayout, bits: int) -> None:
    if tensor.dtype not in _BOUNDS or bits not in (3, 4, 5):
        raise ValueError(
            f"fp8 does not store {tensor.dtype} with {bits} bits of mantissa: "
            f"it takes 3, 4 or 5 and {', '.join(_BOUNDS)}"
        )


def _top(bits: int) -> int:
    """The largest exponent of a code."""
    return (1 << (7 - bits)) - 1


def _float32_bits(
    dtype: str, vectors: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Magnitudes as bits of float32, and signs as bit 7."""
    if dtype == "bfloat16":
        bits = vectors.view("<u2").astype(np.uint32) << np.uint32(16)
    elif dtype == "float16":
        bits = vectors.view("<f2").astype(np.float32).view(np.uint32)
    else:
        bits = vectors.view("<u4")
    sizes = (bits & np.uint32(0x7FFFFFFF)).astype(np.int32)
    signs = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.int32)
    return sizes, signs


def _codes(sizes: npt.NDArray[np.int32], base: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Codes without signs."""
    field = (sizes >> 23) - base
    shift = np.clip(24 - bits - field, 23 - bits, 31)
    significand = (sizes & 0x7FFFFF) | 0x800000
    exact = np.where(field >= 1, sizes - (base << 23), significand)
    odd = (exact >> shift) & 1
    codes = (exact + (1 << (shift - 1)) - 1 + odd) >> shift
    codes = np.where(sizes >= _INF, _CODE_INF, codes)
    return np.where(sizes > _INF, _CODE_NAN, codes)


@cache
def _elements(dtype: str, bits: int) -> npt.NDArray[Any]:
    """``(256, 256)``: the bits of the element of each exponent and code."""
    least, most = _BOUNDS[dtype]
    base = np.clip(np.arange(256), least, most)[:, None] - _top(bits)
    code = np.arange(128)
    field, mantissa = code >> bits, code & ((1 << bits) - 1)
    significand = np.where(field > 0, mantissa + (1 << bits), mantissa)
    with np.errstate(over="ignore"):
        # Exact in float64 for every dtype.
        values = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) + base - 127 - bits)
    elements: npt.NDArray[Any]
    if dtype == "float16":
        values = np.minimum(np.trunc(values * 2.0**24) * 2.0**-24, 65504.0)
        elements = values.astype(np.float16).view(np.uint16)
        inf, nan, sign = 0x7C00, 0x7E00, 1 << 15
    else:
        values = np.minimum(values, float(np.finfo(np.float32).max))
        elements = values.astype(np.float32).view(np.uint32)
        inf, nan, sign = _INF, 0x7FC00000, 1 << 31
        if dtype == "bfloat16":
            elements = (elements >> np.uint32(16)).astype(np.uint16)
            inf, nan, sign = inf >> 16, nan >> 16, 1 << 15
    elements[:, _CODE_INF] = inf
    elements[:, _CODE_NAN] = nan
    return np.concatenate((elements, elements | elements.dtype.type(sign)), axis=1)

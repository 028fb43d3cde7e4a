"""Write the golden tensors of the exact coders anew: ``python golden/codecs/make_exact.py``.

Only before a release: what has been released never changes. If the tests say that it would,
the code is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, TensorLayout
from lifeboat_cache.codecs.recipes import coder
from lifeboat_cache.kernels.codec_layout import CODER_DENSE, CODER_LOSSLESS

#: Tokens, heads and head size: enough tokens for a base of every column, and too few.
SHAPES = ((40, 2, 37), (3, 1, 80), (1, 1, 200))
#: The same with enough elements for a range coder.
LARGE: dict[DType, tuple[int, int, int]] = {
    "bfloat16": (64, 2, 130),
    "float8_e4m3fn": (17, 8, 130),
}
CODERS = {"lossless": CODER_LOSSLESS, "dense": CODER_DENSE}
_KINDS = {
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float32": (8, 23),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
    "bytes": (4, 3),
}


def tensor_of(dtype: DType, tokens: int, heads: int, dim: int) -> TensorLayout:
    """A tensor whose elements lie one after the other."""
    step = dim * ITEM_BYTES[dtype]
    page = tokens * heads * step
    return TensorLayout("key", dtype, 0, 1, tokens, heads, dim, page, heads * step, step, 0)


def given(tensor: TensorLayout, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A payload like KV: channels of different scales, and a few odd values."""
    exponent_bits, mantissa = _KINDS[tensor.dtype]
    shape = (tensor.tokens, tensor.heads * tensor.dim)
    top = rng.integers(4, (1 << exponent_bits) - 1, shape[1])
    exponent = np.maximum(top - np.minimum(rng.geometric(0.4, shape), 12) + 1, 0)
    sign = rng.integers(0, 2, shape)
    bits = sign << exponent_bits | exponent
    bits = bits << mantissa | rng.integers(0, 1 << mantissa, shape)
    odd = rng.random(shape) < 0.01
    bits[odd] = rng.integers(0, 1 << (1 + exponent_bits + mantissa), int(odd.sum()))
    return bits.astype(f"<u{tensor.item_bytes}").view(np.uint8).reshape(-1)


if __name__ == "__main__":
    rng = np.random.default_rng(4)
    payloads = {}
    stored: dict[str, dict[str, npt.NDArray[np.uint8]]] = {name: {} for name in CODERS}
    for dtype in get_args(DType):
        shapes = [*SHAPES, *([LARGE[dtype]] if dtype in LARGE else [])]
        for number, shape in enumerate(shapes):
            tensor = tensor_of(dtype, *shape)
            payload = given(tensor, rng)
            payloads[f"{dtype}_{number}"] = payload
            for name, coder_number in CODERS.items():
                stored[name][f"{dtype}_{number}"] = coder(coder_number).encode(tensor, payload, 0)
    here = Path(__file__).parent
    np.savez_compressed(here / "exact.npz", **payloads)  # type: ignore[arg-type]
    for name, arrays in stored.items():
        np.savez_compressed(here / f"{name}.npz", **arrays)  # type: ignore[arg-type]

"""Write the golden blocks of the coder fp8 anew: ``python golden/codecs/make_fp8.py``.

Only before a release: what has been released never changes. If the tests say that it would,
the code is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.fp8 import Fp8
from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, TensorLayout

_DIM = 37
_KINDS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}


def given(dtype: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Bits of elements: every exponent, then random bits, infinities, NaN and zeros."""
    exponent_bits, mantissa = _KINDS[dtype]
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    width = 1 + exponent_bits + mantissa
    inf = ((1 << exponent_bits) - 1) << mantissa
    rows = [rng.integers(0, 1 << width, (3, _DIM), dtype=np.uint64)]
    for top in range(0, (1 << exponent_bits) - 1, 1 if dtype == "float16" else 17):
        down = np.maximum(top - np.minimum(rng.geometric(0.3, _DIM), 20) + 1, 0).astype(np.uint64)
        signs = rng.integers(0, 2, _DIM, dtype=np.uint64) << np.uint64(width - 1)
        low = rng.integers(0, 1 << mantissa, _DIM, dtype=np.uint64)
        rows.append((signs | (down << np.uint64(mantissa)) | low)[None])
    odd = np.zeros((2, _DIM), dtype=np.uint64)
    odd[1, :6] = [inf, inf | 1 << (width - 1), inf + 1, 1 << (width - 1), inf - 1, 1]
    return np.concatenate([row.astype(unsigned) for row in (*rows, odd)])


if __name__ == "__main__":
    rng = np.random.default_rng(4)
    arrays = {}
    for dtype in get_args(DType):
        if dtype not in _KINDS:
            continue
        elements = given(dtype, rng)
        step = _DIM * ITEM_BYTES[dtype]
        tokens = elements.shape[0]
        tensor = TensorLayout("key", dtype, 0, 1, tokens, 1, _DIM, step * tokens, step, step, 0)
        arrays[f"given_{dtype}"] = elements
        for bits in (3, 4, 5):
            stored = Fp8().encode(tensor, elements.reshape(-1).view(np.uint8), bits)
            restored = np.zeros(tensor.nbytes, dtype=np.uint8)
            Fp8().decode(tensor, stored, restored, bits)
            arrays[f"stored_{dtype}_{bits}"] = stored
            arrays[f"restored_{dtype}_{bits}"] = restored
    np.savez_compressed(Path(__file__).parent / "fp8.npz", **arrays)  # type: ignore[arg-type]

"""Write the golden blocks of the coder LBQ anew: ``python golden/codecs/make_lbq.py``.

Only before a release: what has been released never changes. If the tests say that it would,
the code is wrong.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, TensorLayout
from lifeboat_cache.codecs.lbq import CENTRED, PRECISE, TURNING, Lbq

_TOKENS, _HEADS = 10, 2
_DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")


def given(dtype: str, dim: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Bits of vectors around a mean that turns, and of some that are odd."""
    values = rng.standard_normal((_TOKENS, _HEADS, dim))
    angle = rng.uniform(-3, 3, dim // 2) * np.arange(_TOKENS)[:, None, None]
    size = 5 * rng.standard_normal((_HEADS, dim // 2))
    values += np.concatenate((size * np.cos(angle), size * np.sin(angle)), axis=2)
    values[3, 0] *= 1000
    values[4, 1] *= 1e-4
    values[5, 0] = 0
    if dim == 80:
        values[6, 1, 3], values[7, 0, 4], values[8, 1, 5] = np.nan, np.inf, -np.inf
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return values.astype(np.float32).view(np.uint32)


if __name__ == "__main__":
    rng = np.random.default_rng(4)
    arrays = {}
    for dtype in _DTYPES:
        for dim in (64, 80, 96, 128) if dtype == "bfloat16" else (64,):
            elements = given(dtype, dim, rng)
            near = dim * ITEM_BYTES[dtype]
            tensor = TensorLayout(
                *("key", dtype, 0, 1, _TOKENS, _HEADS, dim),
                *(near * _HEADS * _TOKENS, near * _HEADS, near, 0),
            )
            arrays[f"given_{dtype}_{dim}"] = elements
            for width in (2, 3, 4):
                for flags in (
                    *(0, CENTRED, PRECISE, CENTRED | PRECISE),
                    *(CENTRED | TURNING, CENTRED | TURNING | PRECISE),
                ):
                    if flags & TURNING and dim % 32:
                        continue
                    bits = width | flags
                    stored = Lbq().encode(tensor, elements.reshape(-1).view(np.uint8), bits)
                    restored = np.zeros(tensor.nbytes, dtype=np.uint8)
                    Lbq().decode(tensor, stored, restored, bits)
                    arrays[f"stored_{dtype}_{dim}_{bits}"] = stored
                    digest = np.frombuffer(sha256(restored.data).digest(), dtype=np.uint8)
                    arrays[f"restored_{dtype}_{dim}_{bits}"] = digest
    np.savez_compressed(Path(__file__).parent / "lbq.npz", **arrays)  # type: ignore[arg-type]

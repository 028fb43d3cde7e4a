"""Dead bitmaps: one bit per slot of a segment, set once and never cleared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_BYTES", "dead_slots", "set_dead"]

#: No segment has so many slots; what lies behind is of no meaning.
MOST_BYTES = 2 << 20


def dead_slots(body: bytes) -> npt.NDArray[np.bool_]:
    """The bits after a bitmap's header as booleans.

    Slot ``i`` is bit ``i % 8`` (least significant first) of byte ``i // 8``.
    """
    bits = np.unpackbits(np.frombuffer(body, dtype=np.uint8), bitorder="little")
    return bits.astype(np.bool_)


def set_dead(body: bytes, slots: npt.ArrayLike) -> bytes:
    """``body`` with the bits of ``slots`` set, grown as needed. No bit is cleared."""
    index = np.asarray(slots, dtype=np.int64)
    length = max(len(body), int(index.max(initial=-1)) // 8 + 1)
    bits = np.zeros(length * 8, dtype=np.uint8)
    bits[: len(body) * 8] = np.unpackbits(np.frombuffer(body, dtype=np.uint8), bitorder="little")
    bits[index] = 1
    return np.packbits(bits, bitorder="little").tobytes()

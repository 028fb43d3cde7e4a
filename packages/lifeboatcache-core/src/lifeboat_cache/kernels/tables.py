"""With what the dense coder begins to choose tables, and what symbols cost."""

from __future__ import annotations

import numpy as np

__all__ = ["COSTS", "SEEDS"]

_SLOTS = 1024
_UNIT = 16
_ABSENT = 14 * _UNIT


def _cost(slots: int) -> int:
    """Sixteenths of a bit, rounded down, of a symbol with so many slots; exactly."""
    if slots == 0:
        return _ABSENT
    times: int = _SLOTS**_UNIT // slots**_UNIT
    return times.bit_length() - 1


#: int64 ``(1025,)``: cost of a symbol by its slots.
COSTS = np.array([_cost(slots) for slots in range(_SLOTS + 1)], dtype=np.int64)

# Slots of 32 symbols in tables that suit keys and values of a small model, four to begin with
# and four for large parts. They only have to be unlike each other.
_SEEDS = """
0 1 6 272 479 136 35 13 6 3 1 1 1 1 1 1 0 0 1 4 14 16 12 8 4 2 1 1 1 1 1 1
0 2 109 327 209 91 40 19 9 4 2 1 1 1 1 1 1 1 7 38 54 44 28 15 8 4 2 1 1 1 1 1
1 17 133 182 125 67 34 17 9 4 2 1 1 1 1 1 1 8 70 123 98 59 32 17 9 4 2 1 1 1 1 1
1 1 54 180 173 96 48 24 12 6 3 1 1 1 1 1 1 1 23 104 120 80 44 23 11 6 3 1 1 1 1 1
0 0 0 49 747 183 18 4 1 1 1 1 1 1 1 1 0 0 0 1 3 2 1 1 1 1 1 1 1 1 0 1
0 1 39 435 283 97 38 16 8 4 2 1 1 1 1 1 0 0 1 7 19 23 18 11 6 4 2 1 1 1 1 1
1 21 107 143 110 64 34 18 9 5 2 1 1 1 1 1 1 17 99 143 109 64 34 17 9 5 2 1 1 1 1 1
0 1 34 252 252 119 52 24 12 5 3 1 1 1 1 1 0 1 3 42 76 61 37 20 11 6 3 1 1 1 1 1
"""

#: int64 ``(8 * 32,)``: slots of the tables to begin with.
SEEDS = np.array(_SEEDS.split(), dtype=np.int64)

"""Tables of the coder LBQ, which its kernel and its twin share; see ``codecs/lbq.py``.

The levels were computed by alternating between the best paths of many vectors of 64 (half of
them Gaussian, half rotated keys and values of SmolLM2-135M) and the means of what was coded by
each level, until nothing moved (S. P. Lloyd's algorithm over the trellis of T. R. Fischer and
M. W. Marcellin, "Trellis coded quantization of memoryless and Gauss-Markov sources", IEEE Trans.
Communications 38(1), 1990). The trellis is G. Ungerboeck's of 8 states (parity checks 13 and 04,
octal).
"""

from __future__ import annotations

__all__ = [
    "CENTRED",
    "CHUNK",
    "LAGS",
    "LEVELS",
    "ORDERS",
    "PRECISE",
    "SHUFFLES",
    "SIGNS",
    "STAGES",
    "STATES",
    "TURNING",
    "UNITY",
    "WIDTHS",
    "WIDTH_MASK",
    "distances_of",
    "exchanges",
    "group_of",
    "precise_of",
    "subset_of",
    "unit_of",
]

#: ``ROW_BITS`` is one of the widths, and more for each of these: means are taken off; some
#: tokens have 8 bits per element; means turn from token to token, which only ``CENTRED`` have.
WIDTHS = (2, 3, 4)
WIDTH_MASK = 15
CENTRED = 16
PRECISE = 32
TURNING = 64

#: How far apart tokens are whose angles are compared to find out how means turn.
LAGS = (1, 4, 16, 64)

#: What a cosine or sine of 1 is stored as.
UNITY = 32767

#: The positive levels of each width, ascending, for elements of variance 1.
LEVELS: dict[int, tuple[float, ...]] = {
    2: (0.19466, 0.60583, 1.07481, 1.83408),
    3: (0.10739, 0.30481, 0.53008, 0.756, 1.0209, 1.32766, 1.75207, 2.4011),
    4: (
        *(0.0559, 0.1552, 0.26795, 0.37068, 0.48729, 0.59787, 0.7224, 0.84549),
        *(0.98386, 1.12887, 1.29368, 1.48206, 1.70897, 1.99019, 2.35574, 2.89884),
    ),
}

#: Element ``e`` changes its sign if bit ``e % 128`` is set: the first bits of pi's fraction.
SIGNS = 0x243F6A8885A308D313198A2E03707344

#: Elements that one path through the trellis codes.
CHUNK = 64

STATES = 8


def unit_of(dim: int) -> int:
    """Elements of a vector that share a scale."""
    for unit in (128, 64):
        if dim % unit == 0:
            return unit
    return dim


def precise_of(tokens: int, is_key: bool) -> int:
    """How many tokens of a head have 8 bits per element."""
    return max(1, tokens // 32 if is_key else tokens // 128)


def distances_of(dim: int) -> tuple[int, ...]:
    """How far apart the two channels may be that turn together."""
    return (dim // 2, 1, dim // 4) if dim % 64 == 0 else (dim // 2, 1)


def group_of(unit: int) -> int:
    """Elements of a unit that are rotated by one Hadamard matrix."""
    for group in (128, 64, 32):
        if unit % group == 0:
            return group
    return 16


def subset_of(state: int, bit: int) -> int:
    """Which of the levels 0, 4, 8, ...; 1, 5, ...; 2, 6, ... or 3, 7, ... a branch takes.

    ``state`` is made of the last three bits of the path, the last one lowest.
    """
    one, two, three = state & 1, (state >> 1) & 1, (state >> 2) & 1
    return 2 * (bit ^ one ^ three) + two


def exchanges(group: int) -> tuple[tuple[str, int], ...]:
    """How a group of 64 or 128 is rotated in registers of 16 lanes.

    Each step names a shuffle of pairs of registers, ``""`` for none, and by which bit the
    numbers of the two registers of a pair differ; then the pair becomes its sum and difference.
    """
    if group == 64:
        return (("", 0), ("", 1), ("unpack", 0), ("unpack", 1), ("quarters", 0), ("quarters", 1))
    return (
        ("", 0),
        ("", 1),
        ("", 2),
        ("unpack", 0),
        ("unpack", 1),
        ("quarters", 2),
        ("quarters", 0),
    )


#: Of two registers of 16 lanes, the lanes (16 and more: of the second) that make the new two.
SHUFFLES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "unpack": (
        (0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
        (2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31),
    ),
    "quarters": (
        (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
        (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31),
    ),
}


def _follow(group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which element must lie where so that all end in their natural order, and the stages.

    The last shuffle is undone first; on the way each pair differs by one bit of its elements.
    """
    registers = [list(range(at, at + 16)) for at in range(0, group, 16)]
    stages: list[int] = []
    for shuffle, bit in reversed(exchanges(group)):
        firsts = [number for number in range(len(registers)) if not number & (1 << bit)]
        differences = {
            b - a
            for number in firsts
            for a, b in zip(registers[number], registers[number | (1 << bit)], strict=True)
        }
        (difference,) = differences
        stages.append(difference.bit_length() - 1)
        if not shuffle:
            continue
        for number in firsts:
            other = number | (1 << bit)
            before = [0] * 32
            for half, at in zip(SHUFFLES[shuffle], (number, other), strict=True):
                for lane, source in enumerate(half):
                    before[source] = registers[at][lane]
            registers[number], registers[other] = before[:16], before[16:]
    return tuple(element for register in registers for element in register), tuple(stages[::-1])


_FOLLOWED = {group: _follow(group) for group in (64, 128)}

#: The bits of an element's number in the order in which a group's pairs are added.
STAGES: dict[int, tuple[int, ...]] = {
    16: (0, 1, 2, 3),
    32: (4, 0, 1, 2, 3),
    64: _FOLLOWED[64][1],
    128: _FOLLOWED[128][1],
}

#: The order in which the rotated elements of a unit of 64 or 128 are stored.
ORDERS: dict[int, tuple[int, ...]] = {group: _FOLLOWED[group][0] for group in (64, 128)}

"""Codecs by number and name.

A codec's number stands in journal entries and never changes its meaning.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "ALIASES",
    "AUTO",
    "CODECS",
    "CODEC_NAMES",
    "DENSE",
    "EXACT",
    "FP8",
    "LBQ2",
    "LBQ3",
    "LBQ4",
    "LOSSLESS",
    "RAW",
    "CodecName",
    "codec_name",
    "codec_number",
    "is_exact",
    "more_precise",
]

RAW = 0
LOSSLESS = 1
DENSE = 2
FP8 = 3
LBQ4 = 4
LBQ3 = 5
LBQ2 = 6

#: Leaves the choice to measurements.
AUTO = "auto"

CodecName = Literal["raw", "lossless", "dense", "fp8", "lbq4", "lbq3", "lbq2"]

#: By number. In this order each is at most as precise as those before it.
CODEC_NAMES: tuple[CodecName, ...] = ("raw", "lossless", "dense", "fp8", "lbq4", "lbq3", "lbq2")

#: Their numbers. What a codec stores differently some day gets another number.
CODECS = frozenset(range(len(CODEC_NAMES)))

#: Those that give back every bit.
EXACT = frozenset({RAW, LOSSLESS, DENSE})

#: Names of others for codecs of the same class.
ALIASES: dict[str, CodecName] = {"turboquant4": "lbq4", "turboquant3": "lbq3", "oscar2": "lbq2"}


def codec_name(number: int) -> str:
    """The name of a codec; of one that this release does not know, its number."""
    return CODEC_NAMES[number] if 0 <= number < len(CODEC_NAMES) else f"codec {number}"


def codec_number(name: CodecName) -> int:
    """The number of a codec."""
    return CODEC_NAMES.index(name)


def is_exact(number: int) -> bool:
    """Whether a codec gives back every bit."""
    return number in EXACT


def more_precise(number: int) -> int:
    """The next more precise codec: that of a lossy one, or ``raw`` for an exact one."""
    if is_exact(number):
        return RAW
    return LOSSLESS if number == FP8 else number - 1

"""XXH3-128 of inputs of more than 240 bytes, in numpy: what serves without kernels.

Not compiled and not fast: it verifies what another process stored with kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lifeboat_cache.kernels.xxh3_secret import INITIAL, PRIME32_1, SECRET, WORDS

__all__ = ["xxh3_128"]

_Words = npt.NDArray[np.uint64]

_STRIPE = 64
_BLOCK = 1024
_MANY = 128 * _BLOCK
_MASK = (1 << 64) - 1

_STRIPE_SECRETS: _Words = np.array(
    [[WORDS[8 * stripe + 8 * lane] for lane in range(8)] for stripe in range(16)], dtype=np.uint64
)
_LAST_SECRET: _Words = np.array([WORDS[121 + 8 * lane] for lane in range(8)], dtype=np.uint64)
_SCRAMBLE: _Words = np.array([WORDS[128 + 8 * lane] for lane in range(8)], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PRIME = np.uint64(PRIME32_1)


def xxh3_128(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Canonical digest (16 bytes) of all pieces together.

    Raises
    ------
    ValueError
        If they have 240 bytes or less: XXH3 has other rules for those.
    """
    lanes: _Words = np.array(INITIAL, dtype=np.uint64)
    pending = bytearray()
    before = b""  # the end of what has been consumed
    total = 0
    for piece in pieces:
        data = memoryview(piece).cast("B")
        total += len(data)
        at = 0
        # A block is consumed when something follows it.
        while len(pending) + len(data) - at > _BLOCK:
            if pending:
                missing = _BLOCK - len(pending)
                pending += data[at : at + missing]
                at += missing
                before = bytes(pending[-_STRIPE:])
                _consume(lanes, pending)
                pending = bytearray()
            else:
                size = min(_MANY, (len(data) - at - 1) // _BLOCK * _BLOCK)
                before = bytes(data[at + size - _STRIPE : at + size])
                _consume(lanes, data[at : at + size])
                at += size
        pending += data[at:]
    if total <= 240:
        raise ValueError(f"an input of {total} bytes is too short; give more than 240 bytes")
    stripes = (len(pending) - 1) // _STRIPE
    if stripes:
        words = np.frombuffer(pending, dtype="<u8", count=8 * stripes).reshape(stripes, 8)
        lanes += _added(words, _STRIPE_SECRETS[:stripes]).sum(axis=0)
    last = (before + pending)[-_STRIPE:]
    lanes += _added(np.frombuffer(last, dtype="<u8").reshape(1, 8), _LAST_SECRET)[0]
    finals = [int(lane) for lane in lanes]
    low = _merge(finals, 11, total * 0x9E3779B185EBCA87 & _MASK)
    high = _merge(finals, 117, ~(total * 0xC2B2AE3D27D4EB4F) & _MASK)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _added(words: _Words, secrets: _Words) -> _Words:
    """What each stripe adds to the lanes: words ``(..., 8)`` and secrets likewise."""
    keyed = words ^ secrets
    added: _Words = (keyed & _LOW) * (keyed >> _HALF)
    added[..., 0::2] += words[..., 1::2]
    added[..., 1::2] += words[..., 0::2]
    return added


def _consume(lanes: _Words, blocks: bytearray | memoryview) -> None:
    """Consume whole blocks."""
    words = np.frombuffer(blocks, dtype="<u8").reshape(-1, 16, 8)
    # Within a block the order does not matter; between blocks the lanes are scrambled.
    for block in _added(words, _STRIPE_SECRETS).sum(axis=1):
        lanes += block
        lanes ^= lanes >> np.uint64(47)
        lanes ^= _SCRAMBLE
        lanes *= _PRIME


def _merge(lanes: list[int], offset: int, start: int) -> int:
    mixed = start
    for lane in range(0, 8, 2):
        first, second = (
            lanes[number]
            ^ int.from_bytes(SECRET[offset + 8 * number : offset + 8 * number + 8], "little")
            for number in (lane, lane + 1)
        )
        product = first * second
        mixed += (product & _MASK) ^ (product >> 64)
    mixed &= _MASK
    mixed ^= mixed >> 37
    mixed = mixed * 0x165667919E3779F9 & _MASK
    return mixed ^ (mixed >> 32)

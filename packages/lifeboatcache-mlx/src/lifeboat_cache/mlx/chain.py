"""Names of prefixes: each block's contains those of all blocks before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

__all__ = ["as_tokens", "lengths_within", "prefix_digests"]

_START = blake3(b"", derive_key_context="lifeboatcache 2026 mlx prefix v1").digest()


def as_tokens(tokens: Sequence[int]) -> npt.NDArray[np.int64] | None:
    """Tokens as int64, or ``None`` if they do not say all of what a prompt is.

    mlx-lm's server puts negative numbers in the place of images: they stand for where an
    image came from, and another one may be there tomorrow.
    """
    try:
        known = np.array(tokens, dtype="<i8").reshape(-1)
    except (OverflowError, TypeError, ValueError):
        return None
    return None if (known < 0).any() else known


def prefix_digests(tokens: npt.NDArray[np.int64], block: int) -> list[bytes]:
    """Digests of the prefixes of 0, 1, 2, … whole blocks of tokens."""
    digests = [_START]
    for end in range(block, tokens.shape[0] + 1, block):
        digests.append(blake3(digests[-1] + tokens[end - block : end].tobytes()).digest())
    return digests


def lengths_within(
    digest: bytes, tokens: npt.NDArray[np.int64], first: int, last: int
) -> Iterator[bytes]:
    """Digests of a prefix of whole blocks and ``first`` to ``last`` tokens behind it."""
    hasher = blake3(b"state" + digest)
    hasher.update(tokens[:first].tobytes())
    yield hasher.copy().digest()
    for number in range(first, last):
        hasher.update(tokens[number : number + 1].tobytes())
        yield hasher.copy().digest()

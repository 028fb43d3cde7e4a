"""Which prefixes the pools beside KV's can restore, by what SGLang asks of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from lifeboat_cache.integrations.sglang_prefixes import longest_run, trailing_hits

__all__ = ["hashes_of", "pool_hits", "within"]


def hashes_of(transfer: PoolTransfer, keys: list[str]) -> list[str]:
    """Which pages of a pool decide whether it can restore a prefix of ``keys``."""
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return list(transfer.keys or [])
    return keys


def pool_hits(
    transfer: PoolTransfer, there: npt.NDArray[np.bool_], run: int
) -> tuple[int, npt.NDArray[np.bool_] | None]:
    """A pool's own verdict, and which prefixes it can restore (``None``: all of them).

    The second is bool ``(run + 1,)``, by length of the prefix in pages.
    """
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        group, block = int(transfer.group_pages), int(transfer.block_pages)
        if group < 1 or block < 1:
            return 0, None
        whole = there.shape[0] // group
        complete: npt.NDArray[np.bool_] = np.all(
            there[: whole * group].reshape(whole, group), axis=1
        )
        return longest_run(complete) * block, None
    page_there = np.zeros(run, dtype=bool)
    page_there[: there.shape[0]] = there[:run]
    prefixes = np.zeros(run + 1, dtype=bool)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        boundary = longest_run(page_there)
        prefixes[1 : boundary + 1] = True
        return boundary, prefixes
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        prefixes[1:] = trailing_hits(page_there, max(1, len(transfer.keys or ())))
        ends = np.flatnonzero(prefixes)
        return int(ends[-1]) if ends.shape[0] else 0, prefixes
    return 0, prefixes  # a policy of a later release


def within(transfer: PoolTransfer, keys: Sequence[bytes], prefix: int) -> Sequence[bytes]:
    """Those of a pool's keys that restoring a prefix needs."""
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return keys[max(0, prefix - max(1, len(transfer.keys or ()))) : prefix]
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return keys
    return keys[:prefix]

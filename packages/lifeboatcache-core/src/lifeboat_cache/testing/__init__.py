"""What tests of targets and adapters share, shipped so that third parties can use it.

Needs no test framework at import; :class:`TargetTests` is written for pytest.
"""

from __future__ import annotations

from lifeboat_cache.testing.blocks import (
    aligned_memory,
    cut_at,
    empty_like,
    flip_byte,
    payload_of,
    sample_keys,
    sample_payloads,
    sample_records,
)
from lifeboat_cache.testing.driver import StoreDriver
from lifeboat_cache.testing.golden import GoldenTree
from lifeboat_cache.testing.target import TargetTests

__all__ = [
    "GoldenTree",
    "StoreDriver",
    "TargetTests",
    "aligned_memory",
    "cut_at",
    "empty_like",
    "flip_byte",
    "payload_of",
    "sample_keys",
    "sample_payloads",
    "sample_records",
]

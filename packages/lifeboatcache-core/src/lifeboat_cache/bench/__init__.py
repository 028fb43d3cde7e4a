"""Measurements beside limits of the same run: what ``lifeboat-cache bench`` is made of.

The benchmarks of this project share :mod:`~lifeboat_cache.bench.pairs` (statistics)
and :mod:`~lifeboat_cache.bench.report` (what they print).
"""

from __future__ import annotations

from lifeboat_cache.bench.compiled import ready_kernels, without_kernels
from lifeboat_cache.bench.page_cache import forget_pages
from lifeboat_cache.bench.pairs import LEAST_PAIRS, interval_ranks, median_ratio, rotated
from lifeboat_cache.bench.raw import RawFile
from lifeboat_cache.bench.report import Report, Row, compare, machine_use
from lifeboat_cache.bench.run import BenchPlan, run_bench

__all__ = [
    "LEAST_PAIRS",
    "BenchPlan",
    "RawFile",
    "Report",
    "Row",
    "compare",
    "forget_pages",
    "interval_ranks",
    "machine_use",
    "median_ratio",
    "ready_kernels",
    "rotated",
    "run_bench",
    "without_kernels",
]

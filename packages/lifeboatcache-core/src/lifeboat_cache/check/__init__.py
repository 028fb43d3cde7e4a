"""Verifies everything that storage targets hold, and repairs what can be repaired."""

from lifeboat_cache.check.report import CheckReport, Finding, NamespaceReport, TargetReport
from lifeboat_cache.check.run import check_targets, namespace_directories

__all__ = [
    "CheckReport",
    "Finding",
    "NamespaceReport",
    "TargetReport",
    "check_targets",
    "namespace_directories",
]

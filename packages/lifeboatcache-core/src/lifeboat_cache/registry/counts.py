"""Counts with labels: what the documents of processes carry and totals add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Counts", "Labels"]

#: Pairs of label and value, sorted.
Labels = tuple[tuple[str, str], ...]


class Counts:
    """Sums by labels and name.

    As JSON: ``[{"labels": {"target": "nvme"}, "values": {"blocks_stored": 7}}, …]``. A
    name may end in ``:`` and what is counted apart (``store_outcome:full``).
    """

    def __init__(self) -> None:
        self._groups: dict[Labels, dict[str, float]] = {}

    @classmethod
    def from_json(cls, value: Any) -> Counts:
        """Read counts; what is not a count is left out."""
        counts = cls()
        for group in value if isinstance(value, list) else ():
            if not isinstance(group, dict):
                continue
            labels, values = group.get("labels"), group.get("values")
            if isinstance(labels, dict) and isinstance(values, dict):
                counts.add(labels, values)
        return counts

    def add(self, labels: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Add ``values`` under ``labels``. Only finite numbers of 0 or more are counts."""
        key = tuple(sorted((str(name), str(value)) for name, value in labels.items()))
        group = self._groups.setdefault(key, {})
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if math.isfinite(value) and value >= 0:
                group[str(name)] = group.get(str(name), 0) + value

    def merge(self, other: Counts) -> None:
        """Add everything of ``other``."""
        for labels, values in other.groups():
            self.add(dict(labels), values)

    def without(self, other: Counts) -> Counts:
        """These counts less ``other``, at least 0."""
        out = Counts()
        for labels, values in self.groups():
            less = other._groups.get(labels, {})
            out.add(
                dict(labels),
                {name: max(0, value - less.get(name, 0)) for name, value in values.items()},
            )
        return out

    def fallen(self, later: Counts) -> Counts:
        """Counts of these that have started again in ``later``: less there, or gone."""
        out = Counts()
        for labels, values in self.groups():
            after = later._groups.get(labels, {})
            lost = {name: value for name, value in values.items() if after.get(name, 0) < value}
            if lost:
                out.add(dict(labels), lost)
        return out

    def groups(self) -> Iterable[tuple[Labels, dict[str, float]]]:
        """Labels and the counts under them."""
        return self._groups.items()

    def total(self, name: str) -> float:
        """One count over all labels."""
        return sum(values.get(name, 0) for values in self._groups.values())

    def parts(self, prefix: str) -> dict[str, float]:
        """Counts named ``prefix:…`` over all labels, by what follows."""
        out: dict[str, float] = {}
        for values in self._groups.values():
            for name, value in values.items():
                head, colon, tail = name.partition(":")
                if colon and head == prefix:
                    out[tail] = out.get(tail, 0) + value
        return out

    def to_json(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [{"labels": dict(labels), "values": values} for labels, values in self.groups()]

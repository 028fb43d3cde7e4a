"""What every line of a benchmark's ``--json`` holds."""

from __future__ import annotations

from typing import Any

__all__ = ["conforms"]

_NAMES = {"bench", "case", "metric", "unit", "peer_name", "limit_name"}
_NUMBERS = {"ours", "peer", "limit", "ratio_peer", "ratio_limit"}
_UNITS = {"s", "us", "GB/s", "share", "bytes", "nats", "requests"}


def conforms(row: dict[str, Any]) -> None:
    """Look at one line."""
    assert row.keys() == _NAMES | _NUMBERS | {"interval"}
    assert all(isinstance(row[name], str) for name in ("bench", "case", "metric"))
    assert row["unit"] in _UNITS
    assert isinstance(row["ours"], (int, float))
    for other in ("peer", "limit"):
        assert (row[other] is None) == (row[f"{other}_name"] is None)
        ratio = row[f"ratio_{other}"]
        if row[other]:
            low, high = row["interval"][f"ratio_{other}"]
            assert low <= ratio <= high
        else:
            assert ratio is None
            assert f"ratio_{other}" not in row["interval"]

"""What happened over time: samples of the totals, in a small file that is never longer.

The file holds a line that says what is in it, and three rings of samples: one every ten
seconds for an hour, every minute for a day, every quarter of an hour for two weeks. A sample
holds sums that only grow, so that any two of them say what happened in between.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.latency import JOB_BOUNDS, bucket_of

__all__ = ["FIELDS", "LOAD_BUCKETS", "SPANS", "History", "Samples", "Span", "sample_of"]

Samples = npt.NDArray[np.float64]

#: How many loads took so long, by the end of each bucket.
LOAD_BUCKETS = tuple(f"load_le_{end:g}" for end in (*JOB_BOUNDS, math.inf))

#: What a sample holds, after its time.
FIELDS = (
    "lookups",
    "lookup_hits",
    "prompt_tokens",
    "cached_tokens",
    "served_tokens",
    "saved_seconds",
    "prefill_tokens",
    "prefill_seconds",
    "loaded_blocks",
    "loaded_bytes",
    "load_seconds",
    "stored_blocks",
    "stored_bytes",
    "store_seconds",
    "encoded_raw_bytes",
    "encoded_bytes",
    "decoded_raw_bytes",
    "decoded_bytes",
    "not_stored_blocks",
    "not_loaded_blocks",
    "evicted_bytes",
    "used_bytes",
    "queue_bytes",
    "codec_error",
    "engines",
    *LOAD_BUCKETS,
)

#: Of these a sample has the value then, not a sum.
LEVELS = frozenset({"used_bytes", "queue_bytes", "codec_error", "engines"})

_COLUMNS = len(FIELDS) + 1
_ROW_BYTES = _COLUMNS * 8
_HEAD_BYTES = 2048


@dataclass(frozen=True)
class Span:
    """One ring.

    Attributes
    ----------
    name, title
        As an address and a person call it.
    step_s, count
        Seconds between two samples, and how many there are.
    """

    name: str
    title: str
    step_s: int
    count: int

    @property
    def seconds(self) -> int:
        """What the ring covers."""
        return self.step_s * self.count


SPANS = (
    Span("1h", "1 hour", 10, 360),
    Span("24h", "24 hours", 60, 1440),
    Span("14d", "14 days", 900, 1344),
)

_TOTAL_BYTES = _HEAD_BYTES + sum(span.count for span in SPANS) * _ROW_BYTES


class History:
    """Samples over time. Whatever happens to the file, no method raises.

    Parameters
    ----------
    path
        The file. Where it cannot be written, history lasts as long as this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = threading.Lock()
        self._rings = {span.name: np.zeros((span.count, _COLUMNS)) for span in SPANS}
        self._fd = -1
        self.problem = ""
        try:
            self._open()
        except OSError as error:
            self._close(error)

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """Add a sample; of each ring the newest place is replaced until its step is over."""
        row = np.array([time, *(values.get(name, math.nan) for name in FIELDS)])
        offset = _HEAD_BYTES
        with self._guard:
            for span in SPANS:
                place = int(time // span.step_s) % span.count
                ring = self._rings[span.name]
                # The first sample of a step stands for it.
                if int(ring[place, 0] // span.step_s) != int(time // span.step_s):
                    ring[place] = row
                    self._write(offset + place * _ROW_BYTES, row.astype("<f8").tobytes())
                offset += span.count * _ROW_BYTES

    def read(self, span: Span, now: float) -> Samples:
        """The samples of a span that ends now, oldest first: ``(n, 1 + len(FIELDS))``."""
        with self._guard:
            ring = self._rings[span.name].copy()
        times = ring[:, 0]
        ring = ring[(times > now - span.seconds) & (times <= now + span.step_s)]
        ordered: Samples = ring[np.argsort(ring[:, 0], kind="stable")]
        return ordered

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._guard:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        head = json.dumps(
            {"format": 1, "fields": FIELDS, "rings": [[s.step_s, s.count] for s in SPANS]}
        ).encode()
        wanted = head.ljust(_HEAD_BYTES)
        data = os.pread(self._fd, _TOTAL_BYTES, 0)
        if len(data) != _TOTAL_BYTES or data[:_HEAD_BYTES] != wanted:
            # None yet, or one of another release: there is nothing to go on with.
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, _TOTAL_BYTES)
            os.pwrite(self._fd, wanted, 0)
            return
        values = np.frombuffer(data, "<f8", offset=_HEAD_BYTES).reshape(-1, _COLUMNS)
        at = 0
        for span in SPANS:
            ring = values[at : at + span.count].copy()
            ring[~np.isfinite(ring[:, 0])] = 0.0
            self._rings[span.name] = ring
            at += span.count

    def _write(self, offset: int, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, data, offset)
        except OSError as error:
            self._close(error)

    def _close(self, error: OSError) -> None:
        self.problem = (
            f"{self._path} cannot be written ({error.strerror or error}), so history is lost when "
            "the dashboard ends: correct its owner and mode, or free space"
        )
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def sample_of(document: Mapping[str, Any]) -> dict[str, float]:
    """The sample that a status document gives."""
    totals = document["totals"]
    sample = {name: float(totals[name]) for name in FIELDS if name in totals}
    for name in ("encoded_raw_bytes", "encoded_bytes", "decoded_raw_bytes", "decoded_bytes"):
        sample[name] = sum(float(codec[name]) for codec in totals["codecs"].values())
    sample["not_stored_blocks"] = float(sum(totals["store_dropped"].values()))
    # Evicted between lookup and load is no fault.
    failed = totals["load_failed"]
    sample["not_loaded_blocks"] = float(sum(failed.values()) - failed.get("missing", 0))
    sample.update(dict.fromkeys(LOAD_BUCKETS, 0.0))
    for end, count in totals["latency"].get("load", {}).get("buckets", {}).items():
        sample[LOAD_BUCKETS[bucket_of(end, JOB_BOUNDS)]] += float(count)
    used = [target.get("used_bytes") for target in document["targets"]]
    known = [float(value) for value in used if isinstance(value, (int, float))]
    sample["used_bytes"] = sum(known) if known else math.nan
    processes = document["processes"]
    sample["queue_bytes"] = float(sum(_queued(item) for item in processes))
    sample["engines"] = float(sum(item["role"] == "engine" for item in processes))
    errors = [
        one["error"]
        for item in processes
        for one in item["codecs"].get("guard") or ()
        if one.get("samples") and isinstance(one.get("error"), (int, float))
    ]
    sample["codec_error"] = max(errors, default=math.nan)
    return sample


def _queued(process: Mapping[str, Any]) -> float:
    value = process["queue"].get("pending_bytes")
    return float(value) if isinstance(value, (int, float)) else 0.0

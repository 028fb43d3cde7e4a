"""Requests to an object store and the bytes they move, counted because they cost money."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["VERBS", "Traffic", "TrafficSnapshot", "verb_of"]

#: What requests are counted as. ``put`` is everything that adds an object: parts of an upload,
#: and what begins, ends and gives up an upload, too.
VERBS = ("put", "get", "list", "delete")

_OTHERS = {
    "CreateMultipartUpload": "put",
    "UploadPart": "put",
    "CompleteMultipartUpload": "put",
    "AbortMultipartUpload": "delete",
    "HeadBucket": "get",
    "HeadObject": "get",
}


def verb_of(operation: str) -> str:
    """What an operation of S3 is counted as."""
    found = _OTHERS.get(operation)
    if found is not None:
        return found
    return next((verb for verb in VERBS if operation.lower().startswith(verb)), "get")


@dataclass(frozen=True)
class TrafficSnapshot:
    """Totals since a client was made.

    Attributes
    ----------
    requests
        Requests sent, by verb; every attempt counts.
    errors
        Answers that were errors, by what they mean (the values of ``Fault``). What is not there
        is no error.
    bytes_in, bytes_out
        Bytes of bodies.
    """

    requests: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0


class Traffic:
    """Counts what one client sends and gets. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._in = self._out = 0

    def request(self, verb: str, sent: int = 0) -> None:
        """Count a request that is being sent, with so many bytes."""
        with self._lock:
            self._requests[verb] += 1
            self._out += sent

    def received(self, count: int) -> None:
        """Count bytes that have come."""
        with self._lock:
            self._in += count

    def error(self, kind: str) -> None:
        """Count an answer that was an error."""
        with self._lock:
            self._errors[kind] += 1

    def snapshot(self) -> TrafficSnapshot:
        """Totals until now."""
        with self._lock:
            return TrafficSnapshot(dict(self._requests), dict(self._errors), self._in, self._out)

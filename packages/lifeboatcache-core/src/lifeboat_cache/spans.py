"""OpenTelemetry spans for lookups, stores and loads, where ``OTEL_*`` variables ask for them.

OpenTelemetry is no dependency: engines bring it. Where it is missing, or nothing is asked,
:data:`spans` stays ``None``, which is all that a store looks at. Where it is asked for, a store
only notes what happened; spans are made, and sent, on threads of their own, and what does
not fit into the queue is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lifeboat_cache.job import Job
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.version import __version__

__all__ = ["Spans", "asked_for", "begin", "end", "note_job", "note_lookup", "spans"]

_log = logging.getLogger("lifeboat_cache")

#: What is noted and has no span yet; more is dropped.
_MOST_WAITING = 4096

#: How often spans are made of what was noted, in seconds.
_PAUSE_S = 0.5

#: How long the end of a process waits for spans to be sent, in seconds.
_END_S = 2.0

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SERVICE = "lifeboatcache"


def asked_for(environ: Mapping[str, str]) -> bool:
    """Whether the standard variables ask for traces to be exported."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter:
        return exporter != "none"
    return any(environ.get(name, "").strip() for name in _ENDPOINTS)


@dataclass(slots=True)
class _Note:
    """What happened, for a span to be made of it."""

    name: str
    began: int
    ended: int
    facts: dict[str, Any]
    fault: str = ""


class Spans:
    """Makes spans of what is noted, on a thread of its own.

    Parameters
    ----------
    tracer
        OpenTelemetry's, which is asked from that thread only.
    flush
        Sends what has been made, within so many milliseconds.
    """

    def __init__(self, tracer: Any, flush: Any = None) -> None:
        self._tracer = tracer
        self._flush = flush
        self._notes: deque[_Note] = deque()
        self.dropped = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lifeboat-spans", daemon=True)
        self._thread.start()

    def note(self, name: str, seconds: float, facts: dict[str, Any], fault: str = "") -> None:
        """Note what ended just now. Returns at once."""
        if len(self._notes) >= _MOST_WAITING:
            self.dropped += 1
            return
        ended = time.time_ns()
        self._notes.append(_Note(name, ended - round(seconds * 1e9), ended, facts, fault))

    def close(self, timeout: float = _END_S) -> None:
        """Make the last spans and send them. Idempotent."""
        self._stop.set()
        self._thread.join(timeout)

    def _work(self) -> None:
        try:
            while not self._stop.wait(_PAUSE_S):
                self._make()
            self._make()
            if self._flush is not None:
                self._flush(round(1000 * _END_S))
        except Exception as exc:  # a fault of a library: stores go on without spans
            _log.warning("LifeboatCache: spans are not made any more: %s", exc)

    def _make(self) -> None:
        from opentelemetry.trace import Status, StatusCode

        while self._notes:
            one = self._notes.popleft()
            span = self._tracer.start_span(one.name, start_time=one.began, attributes=one.facts)
            if one.fault:
                span.set_status(Status(StatusCode.ERROR, one.fault))
            span.end(one.ended)


#: What spans are made of; ``None`` as long as there is nobody who asks.
spans: Spans | None = None

_guard = threading.Lock()
_users = 0


def _after_fork() -> None:
    """In a forked child: the threads stayed with the parent."""
    global spans, _guard, _users
    spans, _guard, _users = None, threading.Lock(), 0


os.register_at_fork(after_in_child=_after_fork)


def begin() -> None:
    """A store has been opened: make spans, if they are asked for. Returns at once."""
    global _users
    with _guard:
        _users += 1
        if _users > 1 or not asked_for(os.environ):
            return
    try:
        # OpenTelemetry takes a while to be imported.
        threading.Thread(target=_start, name="lifeboat-spans-start", daemon=True).start()
    except RuntimeError as exc:
        _log.warning("LifeboatCache: there are no spans: %s", exc)


def end() -> None:
    """A store has been closed: after the last one, send what has been noted."""
    global spans, _users
    made = None
    with _guard:
        _users = max(0, _users - 1)
        if not _users:
            made, spans = spans, None
    if made is not None:
        made.close()


def _start() -> None:
    global spans
    try:
        tracer, flush = _tracer()
    except Exception as exc:
        _log.warning(
            "LifeboatCache: OTEL_* variables ask for traces, but there are none of "
            "LifeboatCache: %s. Install opentelemetry-sdk and opentelemetry-exporter-otlp in the "
            "engine's environment, or set OTEL_TRACES_EXPORTER=none",
            exc,
        )
        return
    with _guard:
        if _users and spans is None:
            spans = Spans(tracer, flush)


def _tracer() -> tuple[Any, Any]:
    """A tracer of the engine's provider; of one of ours if it has none."""
    from opentelemetry import trace

    provider: Any = trace.get_tracer_provider()
    if not hasattr(provider, "force_flush"):  # no SDK is behind it
        provider = _provider()
    return provider.get_tracer("lifeboat_cache", __version__), provider.force_flush


def _provider() -> Any:
    """A provider of our own, which the engine does not see, as the variables say."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {"service.name": _SERVICE})
    # At the end of the process it would wait for a collector that does not answer.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> Any:
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if kind not in ("otlp", "otlp_proto_http", "otlp_proto_grpc"):
        raise ValueError(f"OTEL_TRACES_EXPORTER is {kind!r}, and only otlp and console are known")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", ""
    )
    if kind == "otlp_proto_grpc" or (kind == "otlp" and protocol.strip().lower() == "grpc"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter()


def note_job(job: Job, target: str) -> None:
    """Note a finished job, if somebody asks."""
    made = spans
    if made is None:
        return
    values = job.outcomes.tobytes()
    facts: dict[str, Any] = {
        "lifeboat.target": target,
        "lifeboat.blocks": len(values),
        "lifeboat.bytes": job.bytes_moved,
    }
    if job.codec:
        facts["lifeboat.codec"] = job.codec
    bad = []
    for value in set(values):
        outcome = Outcome(value)
        facts[f"lifeboat.outcome.{outcome.name.lower()}"] = values.count(value)
        if not outcome.good and outcome is not Outcome.CANCELLED:
            bad.append(outcome.name.lower())
    made.note(f"lifeboat.{job.kind}", job.seconds, facts, ", ".join(sorted(bad)))


def note_lookup(keys: int, hits: int, seconds: float) -> None:
    """Note a lookup, if somebody asks."""
    made = spans
    if made is not None:
        facts = {"lifeboat.blocks": keys, "lifeboat.hits": hits}
        made.note("lifeboat.lookup", seconds, facts)

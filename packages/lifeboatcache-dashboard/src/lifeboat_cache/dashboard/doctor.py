"""The check that this package adds to ``lifeboat-cache doctor``."""

from __future__ import annotations

from collections.abc import Iterator

from lifeboat_cache.dashboard.access import refusal
from lifeboat_cache.doctor import Check, DoctorContext

__all__ = ["checks"]


def checks(context: DoctorContext) -> Iterator[Check]:
    """Check whether the agent will serve the dashboard with this configuration."""
    name = "dashboard"
    if context.loaded is None:
        yield Check(name, "skip", "the configuration is not valid")
        return
    where = context.loaded.config.dashboard
    if not where.enabled:
        yield Check(name, "ok", "dashboard.enabled is false: no pages are served")
        return
    why = refusal(where.host, where.auth_token.get_secret_value())
    if why:
        condition, _, remedy = why.partition(": ")
        yield Check(name, "warn", f"not served: {condition}", f"{remedy[:1].upper()}{remedy[1:]}.")
        return
    host = f"[{where.host}]" if ":" in where.host else where.host
    yield Check(name, "ok", f"the agent serves it at http://{host}:{where.port}")

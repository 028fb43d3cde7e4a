"""Whether the agent can listen where the configuration says."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lifeboat_cache.agent import AgentState, AgentStatus, agent_status
from lifeboat_cache.doctor.check import Check, DoctorContext

if TYPE_CHECKING:
    from lifeboat_cache.config import Config

__all__ = ["check_ports"]

_NAME = "ports"


@dataclass(frozen=True)
class _Port:
    """Where the agent listens, and what that is for."""

    what: str
    key: str
    host: str
    port: int

    @property
    def place(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def check_ports(context: DoctorContext) -> Check:
    """Check that nobody else listens where the dashboard and the metrics are to be found.

    The agent goes on where somebody does, and nobody finds what it shows.
    """
    if context.loaded is None:
        return Check(_NAME, "skip", "the configuration is not valid")
    wanted = list(_wanted(context.loaded.config))
    if not wanted:
        return Check(_NAME, "ok", "the configuration says that the agent serves nothing")
    agent = AgentStatus(AgentState.ABSENT)
    with contextlib.suppress(OSError):  # what is wrong with its files is another check's
        agent = agent_status(context.loaded.home)
    problems = {one: why for one in wanted if (why := _problem(one, agent))}
    if not problems:
        places = " and ".join(f"{one.place} ({one.what})" for one in wanted)
        return Check(_NAME, "ok", f"the agent listens at {places}, or can")
    return Check(
        _NAME,
        "warn",
        "; ".join(
            f"{one.place}, where the {one.what} would be, {why}" for one, why in problems.items()
        ),
        "Stop what listens there, or change "
        + " and ".join(f"{one.key}.port" for one in problems)
        + ", or the host there.",
    )


def _wanted(config: Config) -> Iterator[_Port]:
    dashboard, metrics = config.dashboard, config.telemetry.prometheus
    if dashboard.enabled and _has_dashboard():
        yield _Port("dashboard", "dashboard", dashboard.host, dashboard.port)
    if metrics.port:
        yield _Port("metrics", "telemetry.prometheus", metrics.host, metrics.port)


def _has_dashboard() -> bool:
    try:
        return importlib.util.find_spec("lifeboat_cache.dashboard") is not None
    except (ImportError, ValueError):
        return False


def _problem(wanted: _Port, agent: AgentStatus) -> str:
    """Why the agent cannot listen there; empty if it can, or does."""
    try:
        infos = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = infos[0]
        with socket.socket(family, kind, protocol) as trial:
            # As a server does: what is only left of closed connections is in nobody's way.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "" if _is_served(wanted, agent) else "is taken by another process"
        return f"cannot be listened on ({error.strerror or error})"
    except (UnicodeError, OverflowError) as error:
        return f"cannot be listened on ({error})"
    return ""


def _is_served(wanted: _Port, agent: AgentStatus) -> bool:
    """Whether it is the agent of this home that listens there."""
    if not agent.alive:
        return False
    if wanted.what == "dashboard":
        said = agent.document.get("dashboard")
        return isinstance(said, dict) and str(said.get("url")).endswith(f":{wanted.port}")
    problems = agent.document.get("problems")
    return not any(wanted.key in str(problem) for problem in problems or ())

"""What is told to others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lifeboat_cache.config.sections.base import Key, Section

__all__ = ["Prometheus", "Telemetry"]


class Prometheus(Section):
    """Metrics of all engines of this home directory together, served by the agent."""

    port: Annotated[
        int,
        Field(ge=0, le=65535),
        Key(
            allowed="a whole number from 0 to 65535; 0 serves nothing",
            example="9402",
            restart=False,
        ),
    ] = Field(default=9402, description="Where Prometheus finds `/metrics`.")
    host: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9.:_-]+$"),
        Key(allowed="an address or a name of this machine", example="0.0.0.0", restart=False),
    ] = Field(
        default="127.0.0.1",
        description="The address that is listened on. `0.0.0.0`: all of them. Whoever can reach "
        "it can read the names of models and how much they are used.",
    )


class Telemetry(Section):
    """What is told to others."""

    prometheus: Prometheus

"""The agent."""

from __future__ import annotations

from pydantic import Field

from lifeboat_cache.config.sections.base import Section
from lifeboat_cache.config.sections.values import Switch

__all__ = ["Agent"]


class Agent(Section):
    """The agent: one process per node and home directory that looks after the store."""

    autostart: Switch = Field(
        default=True,
        description="Whether engines start the agent when there is none. Without an agent nothing "
        "is evicted: a store that is full takes no more.",
    )

"""What makes room, and how long blocks are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lifeboat_cache.config.sections.base import Key, Section
from lifeboat_cache.config.sections.values import to_seconds
from lifeboat_cache.config.units import AGE_EXAMPLES

__all__ = ["Eviction"]

_MAX_AGE_S = 10 * 366 * 86400


def _age(value: object) -> object:
    seconds = to_seconds(value)
    # Whoever writes 30 may mean days, and would lose what is older than half a minute.
    if seconds != 0 and not str(value).strip()[-1:].isalpha():
        raise ValueError(f"{value!r} has no unit")
    return seconds


class Eviction(Section):
    """What happens when a place is full, and how long blocks are kept."""

    policy: Annotated[
        Literal["lru", "none"],
        Key(allowed="lru or none", example="lru", restart=False),
    ] = Field(
        default="lru",
        description="`lru`: blocks that were used least recently make room, whole prefixes from "
        "their end; a block counts as used when one behind it is. `none`: nothing makes room, and "
        "a place that is full takes no new blocks; what was deleted is reclaimed all the same.",
    )
    max_age: Annotated[
        float,
        BeforeValidator(_age),
        Field(ge=0, le=_MAX_AGE_S, allow_inf_nan=False),
        Key(
            allowed=f"0, or up to 10 years with a unit: {AGE_EXAMPLES}",
            example="30d",
            restart=False,
        ),
    ] = Field(
        default=0.0,
        description="Blocks that were stored longer ago are deleted by the agent, used or not. 0: "
        "they stay until room is needed.",
    )

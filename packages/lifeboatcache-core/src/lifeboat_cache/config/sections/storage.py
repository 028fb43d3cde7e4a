"""Where KV is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lifeboat_cache.config.sections.base import Key, Section, SettingError
from lifeboat_cache.config.sections.tiers import FALLBACK_NAME, Tier
from lifeboat_cache.config.sections.values import AbsolutePath, Capacity, Reserve, Switch

__all__ = ["FallbackLocal", "Storage"]


def _items(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class FallbackLocal(Section):
    """The directory used when no tier is usable."""

    enabled: Switch = Field(
        default=True,
        description="Whether KV is kept here when no tier is usable. With no tier configured "
        "this is the store.",
    )
    path: AbsolutePath = Field(
        # The type is what it becomes: defaults pass through the validator too.
        default=Path("$LIFEBOAT_CACHE_HOME/kv"),
        description="The directory, on a local disk.",
    )
    capacity_gb: Capacity = Field(
        default=50.0, description="The most that all engines together keep here."
    )
    min_free_gb: Reserve = Field(
        default=10.0,
        description="Free space that is left on the file system for others. "
        "Below it nothing more is stored.",
    )

    @property
    def capacity_bytes(self) -> int:
        """The capacity in bytes."""
        return round(self.capacity_gb * 1e9)

    @property
    def min_free_bytes(self) -> int:
        """The free-space reserve in bytes."""
        return round(self.min_free_gb * 1e9)

    def as_tier(self) -> Tier:
        """Return the fallback in the shape of a tier, named ``fallback_local``."""
        return Tier.model_construct(
            name=FALLBACK_NAME,
            type="filesystem",
            rung=None,
            enabled=self.enabled,
            path=self.path,
            mount=None,
            protocol=None,
            file_mode="0600",
            group=None,
            capacity_gb=self.capacity_gb,
            min_free_gb=self.min_free_gb,
            direct_io="auto",
            timeout_s=10.0,
            bandwidth_limit_gbps=None,
            bucket=None,
            region=None,
            endpoint_url=None,
            prefix="",
            sse=None,
            sse_kms_key_id=None,
            staging_gb=20.0,
        )


class Storage(Section):
    """Where KV is kept: a ladder of tiers. Blocks are found wherever they are.

    Tiers may be added, removed, changed and reordered while engines run.
    """

    tiers: Annotated[
        tuple[Tier, ...],
        BeforeValidator(_items),
        Key(allowed="a list of tiers", example="[]", restart=False),
    ] = Field(default=(), description="The tiers, the preferred one first.")
    write_mode: Annotated[
        Literal["first", "local_first", "all"],
        Key(allowed="first, local_first or all", example="first", restart=False),
    ] = Field(
        default="first",
        description="Where new blocks go. `first`: to the first tier that is usable. "
        "`local_first`: to the tier on the fastest rung, and from there, in the background, to the "
        "next slower rung. `all`: to every usable tier, and they are done when all have answered. "
        "With `local_first` and `all`, what is loaded from a slower rung is copied to the fastest.",
    )
    fallback_local: FallbackLocal
    shared_lookup: Switch = Field(
        default=True,
        description="Find also what other processes store in the same directory while this one "
        "runs, within seconds; data-parallel ranks share their blocks in this way. Off: only what "
        "was there at the start of a process, and what it stores itself.",
    )

    @property
    def places(self) -> tuple[Tier, ...]:
        """The enabled tiers in order, then the fallback if it is enabled."""
        tiers = tuple(tier for tier in self.tiers if tier.enabled)
        return (*tiers, self.fallback_local.as_tier()) if self.fallback_local.enabled else tiers

    @model_validator(mode="after")
    def _check(self) -> Storage:
        names: dict[str, int] = {}
        paths: dict[Path, int] = {}
        for index, tier in enumerate(self.tiers):
            if tier.name == FALLBACK_NAME:
                raise SettingError(
                    ("tiers", index, "name"),
                    f"{tier.name!r} is the name of storage.{FALLBACK_NAME}: "
                    "give the tier another name",
                )
            if tier.name in names:
                raise SettingError(
                    ("tiers", index, "name"),
                    f"{tier.name!r} is the name of storage.tiers[{names[tier.name]}] too: "
                    "give each tier a name of its own",
                )
            if tier.path in paths:
                raise SettingError(
                    ("tiers", index, "path"),
                    f"'{tier.path}' is the path of storage.tiers[{paths[tier.path]}] too: "
                    "give each tier a directory of its own",
                )
            names[tier.name] = paths[tier.path] = index
        if not self.places:
            raise SettingError(
                ("fallback_local", "enabled"),
                "nothing could be stored: no tier is enabled and the fallback is off; "
                "enable one of them (LIFEBOAT_CACHE=0 switches LifeboatCache off)",
            )
        return self

"""How engines use the cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lifeboat_cache.config.sections.base import Key, Section
from lifeboat_cache.config.sections.values import (
    MAX_WAIT_S,
    SIZE_ALLOWED,
    Switch,
    to_gigabytes,
    to_seconds,
)
from lifeboat_cache.config.units import DURATION_EXAMPLES

__all__ = ["Engine"]


class Engine(Section):
    """How an engine uses the cache."""

    native_cpu_gb: Annotated[
        float,
        BeforeValidator(to_gigabytes),
        Field(gt=0, allow_inf_nan=False),
        Key(allowed=f"above 0, {SIZE_ALLOWED}", example="20G", unit="GB"),
    ] = Field(
        default=20.0,
        description="Memory for vLLM's CPU tier, through which blocks pass on their way to and "
        "from storage, for all data-parallel ranks on this host together; in the mode `lmcache` "
        "that of the LMCache server. Less is taken when /dev/shm or the memory left is smaller.",
    )
    native_block_tokens: Annotated[
        int,
        Field(ge=1, le=65536),
        Key(allowed="a whole number from 1 to 65536", example="256", unit="tokens"),
    ] = Field(
        default=256,
        description="Tokens per stored block, rounded to a multiple of the engine's own block. "
        "Larger blocks mean fewer lookups; only whole blocks are restored.",
    )
    native_promotion_wait_s: Annotated[
        float,
        BeforeValidator(to_seconds),
        Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False),
        Key(
            allowed=f"0 to {MAX_WAIT_S} seconds, a number of seconds or with a unit: "
            f"{DURATION_EXAMPLES}",
            example="5s",
            unit="s",
        ),
    ] = Field(
        default=5.0,
        description="How long a request waits at most for the store to become ready (model "
        "identified, index read) before its blocks count as missing.",
    )
    native_codec: Annotated[
        Literal["exact", "ladder"],
        Key(allowed="exact or ladder", example="exact"),
    ] = Field(
        default="exact",
        description="How KV of vLLM's native mode and of SGLang's MLX backend is stored. `exact`: "
        "without loss, raw or compressed, whichever restores faster on the target; what others "
        "have stored with loss "
        "is not used. `ladder`: as `compression.ladder` says; recurrent state stays exact.",
    )
    io_workers: Annotated[
        int,
        Field(ge=1, le=64),
        Key(allowed="a whole number from 1 to 64", example="8", unit="threads"),
    ] = Field(
        default=8,
        description="The most threads that read and write storage in one engine process.",
    )
    vllm_mode: Annotated[
        Literal["native", "lmcache"],
        Key(allowed="native or lmcache", example="native"),
    ] = Field(
        default="native",
        description="What `LIFEBOAT_CACHE=1` switches on in vLLM. `native`: vLLM's own offloading "
        "with LifeboatCache as a tier. `lmcache`: LMCache with LifeboatCache as its second tier, "
        "in a server that all engines of the node share (needs lifeboatcache-lmcache).",
    )
    lmcache_port: Annotated[
        int,
        Field(ge=1024, le=65533),
        Key(allowed="a whole number from 1024 to 65533", example="6555"),
    ] = Field(
        default=6555,
        description="Where the local LMCache server listens. Its HTTP interface has the next port, "
        "its metrics the one after.",
    )
    lmcache_stays: Switch = Field(
        default=False,
        description="Whether the LMCache server that engines have started stays when the last of "
        "them has ended. Otherwise it then writes what is queued, and ends.",
    )

    @property
    def native_cpu_bytes(self) -> int:
        """Bytes of vLLM's CPU tier on this host."""
        return round(self.native_cpu_gb * 1e9)

"""Launches that SGLang would refuse, or serve wrongly, with a storage backend.

Read from SGLang 0.5.23: each entry is a launch that works as it was asked for and would
not with the hierarchical cache and our backend. What SGLang itself refuses while it resolves
the arguments of a launch is noticed there; here is what it says too late, in words that
do not name the cause, or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from lifeboat_cache.identity import unreadable_load_format
from lifeboat_cache.integrations.sglang_mlx import uses_mlx

__all__ = ["MLX_TABLE", "TABLE", "standdown_reason"]

_Applies = Callable[[Any], bool]


def _on(field: str) -> _Applies:
    return lambda launch: bool(getattr(launch, field, False))


def _given(field: str) -> _Applies:
    return lambda launch: getattr(launch, field, None) is not None


def _above_one(field: str) -> _Applies:
    return lambda launch: int(getattr(launch, field, 1) or 1) > 1


_OTHER_CACHE = _given("radix_cache_backend")

#: What applies on SGLang's MLX backend besides.
MLX_TABLE: tuple[tuple[_Applies, str], ...] = (
    (
        lambda launch: bool(
            getattr(launch, "enable_lora", False) or getattr(launch, "lora_paths", None)
        ),
        "adapters on the MLX backend are not told apart in what is stored: serve without them",
    ),
    (
        _given("speculative_algorithm"),
        "speculative decoding on the MLX backend was not tried: start without it",
    ),
    (
        _on("enable_hierarchical_cache"),
        "the MLX backend has no hierarchical cache: leave out --enable-hierarchical-cache",
    ),
)

#: What applies, and why the launch goes without LifeboatCache, ending in the remedy.
TABLE: tuple[tuple[_Applies, str], ...] = (
    (
        _on("disable_radix_cache"),
        "--disable-radix-cache leaves no prefixes to keep: start without it",
    ),
    (
        _OTHER_CACHE,
        "--radix-cache-backend keeps prefixes in its own way: start without it",
    ),
    (_on("enable_lmcache"), "--enable-lmcache keeps KV itself: start without it"),
    (_on("enable_flexkv"), "--enable-flexkv keeps KV itself: start without it"),
    (
        _on("enable_unified_cache_external_linker"),
        "--enable-unified-cache-external-linker keeps KV itself: start without it",
    ),
    (_on("enable_hisparse"), "--enable-hisparse keeps KV on the host itself: start without it"),
    (
        _on("enable_unified_memory"),
        (
            "--enable-unified-memory keeps KV in pages that no storage backend of others was built "
            "for: start without it"
        ),
    ),
    (
        _on("enable_int8_mamba_checkpoint"),
        "--enable-int8-mamba-checkpoint excludes the hierarchical cache: start without it",
    ),
    (
        lambda launch: getattr(launch, "disaggregation_mode", "null") not in (None, "null"),
        (
            "a server with a prefill or decode role hands KV over itself: name the backend with "
            "--hicache-storage-backend on the roles that shall keep it"
        ),
    ),
    (
        _on("encoder_only"),
        "an encoder server has no KV to keep: set LIFEBOAT_CACHE on the others only",
    ),
    (
        _on("enable_kv_cache_sharding"),
        "--enable-kv-cache-sharding excludes storage backends: start without it",
    ),
    (
        _above_one("dcp_size"),
        (
            "decode context parallelism (--dcp-size) takes no storage backend but SGLang's own: "
            "start without it"
        ),
    ),
    (
        _given("dllm_algorithm"),
        (
            "a diffusion model rewrites the KV of tokens that it has seen: "
            "serve it without LifeboatCache"
        ),
    ),
    (
        _on("is_embedding"),
        "an embedding model has no prompts to continue: serve it without LifeboatCache",
    ),
    (
        _on("prefill_only_disable_kv_cache"),
        "--prefill-only-disable-kv-cache leaves no KV to keep: start without it",
    ),
    (
        _above_one("nnodes"),
        (
            "the hosts of this launch each decide, and have to agree: name the backend with "
            "--hicache-storage-backend and size the pool with --hicache-size on each"
        ),
    ),
    (
        _on("use_ray"),
        (
            "Ray starts the engine where LIFEBOAT_CACHE may not be set: name the backend with "
            "--hicache-storage-backend"
        ),
    ),
)


def standdown_reason(
    launch: Any, environ: Mapping[str, str] = os.environ, *, ours: str | None = None
) -> str | None:
    """Why a launch must go without LifeboatCache; ``None`` if it need not.

    Parameters
    ----------
    launch
        SGLang's ``ServerArgs``, or a view of it.
    environ
        The environment.
    ours
        A prefix cache that is ours where the launch names it.

    Returns
    -------
    str or None
        One line that ends in the remedy.
    """
    if uses_mlx(environ):
        for applies, reason in MLX_TABLE:
            if applies(launch):
                return reason
    for applies, reason in TABLE:
        if applies(launch) and not (applies is _OTHER_CACHE and ours == launch.radix_cache_backend):
            return reason
    unreadable = unreadable_load_format(str(getattr(launch, "load_format", None) or "auto"))
    return f"{unreadable}; use --load-format auto" if unreadable else None

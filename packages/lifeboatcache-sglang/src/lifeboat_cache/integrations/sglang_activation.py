"""``LIFEBOAT_CACHE=1``: the hierarchical cache with our backend, where the launch chose none.

On SGLang's MLX backend, which has no hierarchical cache, our prefix cache takes its place.

What a launch says itself always wins, and a launch that works without LifeboatCache works
with it: its arguments are resolved with our choices, without our page size if SGLang
refuses them, and as they were given if it refuses again. Then LifeboatCache stands
down with one line.

SGLang resolves the arguments once, in the process that launches; the others are
handed the result. An ``Engine`` in a program of its own launches in the same way.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lifeboat_cache.config import load_config
from lifeboat_cache.engines.memory import available_ram
from lifeboat_cache.engines.places import places_reason
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrations import sglang_mlx
from lifeboat_cache.integrations.sglang_memory import size_host_pool
from lifeboat_cache.integrations.sglang_settings import AUTO, Settings, read_settings
from lifeboat_cache.integrations.sglang_standdown import standdown_reason

__all__ = [
    "BACKEND_CLASS",
    "BACKEND_MODULE",
    "DECISION",
    "decision_of",
    "install",
    "stand_down",
]

BACKEND_MODULE = "lifeboat_cache.integrations.sglang_backend"
BACKEND_CLASS = "LifeboatHiCacheStorage"

#: Attribute of a ``ServerArgs`` that says what was decided; it reaches all processes.
DECISION = "_lifeboat_cache_decision"

#: The first step of the resolution that may be wrapped and comes before SGLang looks at
#: the hierarchical cache.
_STEP = "handle_hicache_ratio_default"

#: ``--hicache-host-memory-fraction`` where the launch does not give one.
_DEFAULT_FRACTION = 0.8

_SOURCE = "lifeboat_cache"
_MARK = "_lifeboat_activation"
_log = logging.getLogger("lifeboat_cache")


class _StandDownError(LifeboatError):
    """The launch goes without LifeboatCache, for the reason that the message says."""


@dataclass(frozen=True)
class _Plan:
    """What would be changed in a launch.

    Attributes
    ----------
    fields
        Of ``ServerArgs``, with the values they shall have.
    pool
        About the host pool, for the log.
    staging_tokens
        See :class:`~.sglang_settings.Settings`.
    source
        Where our configuration came from.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    pool: str = ""
    staging_tokens: int = 0
    source: str = ""

    @property
    def hierarchical(self) -> bool:
        """Whether it is SGLang's hierarchical cache that is switched on."""
        return "enable_hierarchical_cache" in self.fields

    def without(self, *names: str) -> _Plan:
        kept = {name: value for name, value in self.fields.items() if name not in names}
        return _Plan(kept, self.pool, self.staging_tokens, self.source)


def install(platform_can_offload: Callable[[Any], bool]) -> None:
    """Complete the launches of this process. Idempotent.

    Parameters
    ----------
    platform_can_offload
        Asked at each launch, with its arguments: whether SGLang's hierarchical
        cache works on this platform.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.server_args import ServerArgs

    original = ServerArgs.resolve_once
    if hasattr(original, _MARK):
        return

    def decide(server_args: Any, previous: Callable[[Any], None]) -> None:
        decision = decision_of(server_args)
        if decision is not None:
            declare_resolution(server_args, _SOURCE, **decision["fields"])
        previous(server_args)

    register_resolution_hook(_STEP)(decide)

    @functools.wraps(original)
    def resolve_once(self: Any) -> None:
        if _is_over(self) or _is_left_alone(self):
            original(self)
        else:
            _resolve(self, original, platform_can_offload)

    setattr(resolve_once, _MARK, True)
    ServerArgs.resolve_once = resolve_once


def decision_of(server_args: Any) -> dict[str, Any] | None:
    """Return what was decided about a launch; ``None`` where it was left as it is."""
    decision: dict[str, Any] | None = getattr(server_args, DECISION, None)
    return decision


def stand_down(reason: str) -> None:
    """Say that this launch goes without LifeboatCache."""
    _log.warning("LifeboatCache stands down, SGLang runs without it: %s", reason)
    from lifeboat_cache.integrations.sglang_notice import show_stand_down

    show_stand_down(reason)


def _is_over(server_args: Any) -> bool:
    return any(
        getattr(server_args, name, False) for name in ("_resolution_finished", "_resolution_failed")
    )


def _is_left_alone(server_args: Any) -> bool:
    if str(server_args.model_path).lower() in ("none", "dummy"):
        return True
    if sglang_mlx.uses_mlx() and server_args.radix_cache_backend == sglang_mlx.BACKEND:
        return True  # what we would choose
    if getattr(server_args, "hicache_storage_backend", None) is None:
        return False
    _log.info("LifeboatCache: the launch chooses a storage backend itself; left as it is")
    return True


def _resolve(
    server_args: Any, original: Callable[[Any], None], platform_can_offload: Callable[[Any], bool]
) -> None:
    reason = ""
    # A failed resolution leaves its traces here, and SGLang starts no second one.
    state, environ = dict(server_args.__dict__), dict(os.environ)
    for plan in _plans(server_args, platform_can_offload):
        if isinstance(plan, str):
            reason = plan
            break
        setattr(server_args, DECISION, {"fields": plan.fields})
        try:
            original(server_args)
            _check(server_args, plan)
            _tell(server_args, plan)
        except Exception as error:
            reason = reason or _reason(error, plan)
            _restore(server_args, state, environ)
        else:
            return
    original(server_args)
    stand_down(reason)


def _restore(server_args: Any, state: dict[str, Any], environ: dict[str, str]) -> None:
    server_args.__dict__.clear()
    server_args.__dict__.update(state)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _reason(error: Exception, plan: _Plan) -> str:
    if isinstance(error, _StandDownError):
        return str(error)
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    what = "the hierarchical cache" if plan.hierarchical else "a prefix cache of others"
    return (
        f"SGLang refuses {what} in this launch ({text}): leave out what excludes "
        "it, or leave LIFEBOAT_CACHE unset"
    )


def _plans(server_args: Any, platform_can_offload: Callable[[Any], bool]) -> Iterator[_Plan | str]:
    """Yield what to try, in order; a reason instead if there is nothing to."""
    try:
        plan = _plan(server_args, platform_can_offload)
    except LifeboatError as error:
        yield str(error)
        return
    except Exception as error:  # a fault of ours
        _log.debug("LifeboatCache: no decision", exc_info=True)
        yield f"{type(error).__name__}: {error}; please report this"
        return
    yield plan
    if "page_size" in plan.fields:
        yield plan.without("page_size")


def _plan(server_args: Any, platform_can_offload: Callable[[Any], bool]) -> _Plan:
    if sglang_mlx.uses_mlx():
        return _plan_for_mlx(server_args)
    settings = read_settings()
    loaded = load_config()
    if not platform_can_offload(server_args):
        raise _StandDownError(
            "SGLang's hierarchical cache is known to work on CUDA, ROCm and XPU only: to try it "
            "elsewhere, name the backend with --hicache-storage-backend"
        )
    reason = standdown_reason(server_args)
    if reason is not None:
        raise _StandDownError(reason)
    fields: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": _extra_config(server_args, settings),
    }
    pool = _size_pool(server_args, settings, fields)
    reason = places_reason(loaded.config)
    if reason is not None:
        raise _StandDownError(reason)
    # The schedulers import it, and do not start if they cannot; raises, and we stand down.
    importlib.import_module(BACKEND_MODULE)
    if server_args.page_size is None:
        fields["page_size"] = settings.page_size
    if settings.write_policy is not None and not _policy_given(server_args):
        fields["hicache_write_policy"] = settings.write_policy
    return _Plan(fields, pool, settings.staging_tokens, str(loaded.source))


def _plan_for_mlx(server_args: Any) -> _Plan:
    loaded = load_config()
    reason = standdown_reason(server_args) or places_reason(loaded.config)
    if reason is not None:
        raise _StandDownError(reason)
    return _Plan({"radix_cache_backend": sglang_mlx.BACKEND}, source=str(loaded.source))


def _extra_config(server_args: Any, settings: Settings) -> str:
    """Return the backend's configuration, with the thresholds that the launch may have given."""
    given = server_args.hicache_storage_backend_extra_config
    ours = {
        "backend_name": "lifeboat",
        "module_path": BACKEND_MODULE,
        "class_name": BACKEND_CLASS,
        "interface_v1": int(settings.zero_copy),
    }
    if not given:
        return json.dumps(ours)
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    parsed = HybridCacheController.parse_storage_backend_extra_config(given)
    names = (
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    )
    return json.dumps({**ours, **parsed[0], **dict(zip(names, parsed[1:], strict=True))})


def _size_pool(server_args: Any, settings: Settings, fields: dict[str, Any]) -> str:
    """Decide on the host pool, into ``fields``; return what to say about it."""
    if server_args.hicache_size > 0 or server_args.hicache_ratio is not None:
        return "host pool as the launch sizes it"
    if (
        server_args.enable_hierarchical_cache
        or server_args.hicache_host_memory_fraction != _DEFAULT_FRACTION
    ):
        return "host pool as SGLang sizes it"
    ranks = _ranks(server_args)
    pool = size_host_pool(
        settings.host_bytes,
        ranks,
        available_ram(),
        device_bytes=_device_bytes() if settings.host_bytes == AUTO else None,
        reserve=_reserve(),
    )
    if not pool.bytes:
        raise _StandDownError(
            f"too little memory for a host pool ({pool.reason}, of which SGLang keeps "
            f"{_reserve() / 1e9:.1f} GB free): free memory, or raise the container's limit"
        )
    fields["hicache_size"] = pool.gigabytes
    return f"host pool of {pool.gigabytes:g} GB per rank ({pool.reason})"


def _ranks(server_args: Any) -> int:
    """Return how many ranks the launch starts on this host."""
    # Attention data parallelism divides the tensor parallel ranks and adds none.
    replicas = 1 if server_args.enable_dp_attention else int(server_args.dp_size)
    return int(server_args.tp_size) * int(server_args.pp_size) * replicas


def _reserve() -> int:
    from sglang.srt.mem_cache.pool_host import base

    return int(base.HICACHE_HOST_MEMORY_RESERVE_BYTES)


def _device_bytes() -> int | None:
    from sglang.srt.utils import get_device_memory_capacity

    mebibytes = get_device_memory_capacity()
    return None if not mebibytes else int(mebibytes) << 20


def _policy_given(server_args: Any) -> bool:
    """Whether the launch chose a write policy, which looks like the default where it chose that."""
    command = getattr(server_args, "launch_command", None) or ""
    return (
        server_args.hicache_write_policy != "write_through"
        or "--hicache-write-policy" in command
        or "hicache_write_policy=" in command
    )


def _check(server_args: Any, plan: _Plan) -> None:
    """Look for what SGLang refuses or drops only after the resolution."""
    from sglang.srt.arg_groups.overrides import resolving_view

    launch = resolving_view(server_args)
    if not plan.hierarchical:
        reason = standdown_reason(launch, ours=sglang_mlx.BACKEND)
        if reason is not None:
            raise _StandDownError(reason)
        return
    if not launch.enable_hierarchical_cache:
        raise _StandDownError(
            "SGLang switches the hierarchical cache off in this launch, and says above why: leave "
            "out what excludes it, or leave LIFEBOAT_CACHE unset"
        )
    reason = standdown_reason(launch)  # a model may have defaults of its own
    if reason is not None:
        raise _StandDownError(reason)
    chunk = launch.chunked_prefill_size
    if chunk and chunk > 0 and chunk % launch.page_size:
        raise _StandDownError(
            f"pages of {launch.page_size} tokens do not divide --chunked-prefill-size {chunk}: "
            "make it a multiple"
        )


def _tell(server_args: Any, plan: _Plan) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    if not plan.hierarchical:
        setattr(server_args, DECISION, {"fields": plan.fields})
        _log.info(
            "LifeboatCache is on: prefix cache of SGLang's MLX backend, configuration from %s",
            plan.source,
        )
        return
    launch = resolving_view(server_args)
    staging = 0
    if plan.staging_tokens:
        staging = max(1, plan.staging_tokens // int(launch.page_size))
    decision = {"fields": plan.fields, "staging_pages": staging}
    setattr(server_args, DECISION, decision)
    config = json.loads(plan.fields["hicache_storage_backend_extra_config"])
    _log.info(
        "LifeboatCache is on: hierarchical cache, %s, pages of %d tokens, %s, %s, "
        "configuration from %s",
        plan.pool,
        launch.page_size,
        launch.hicache_write_policy,
        "zero copy" if config["interface_v1"] else "copying",
        plan.source,
    )

"""``LIFEBOAT_CACHE=1``: what ``engine.vllm_mode`` says, where the launch chose nothing.

``native``: vLLM's own offloading with our tier; ``lmcache``: LMCache with our server.

An explicit choice (``--kv-transfer-config``, ``--kv-offloading-size``) always wins,
and a launch that works without LifeboatCache works with it: the engine's
configuration is made as it was asked for, then looked at, and only then completed.
Where offloading cannot work, LifeboatCache stands down with one line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

from lifeboat_cache.config import LoadedConfig, load_config
from lifeboat_cache.engines.places import places_reason
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.integrations.vllm_handover import CHUNK_TOKENS_KEY
from lifeboat_cache.integrations.vllm_identity import standdown_reason
from lifeboat_cache.integrations.vllm_memory import available_memory, size_cpu_tier

__all__ = ["TIER_MODULE", "TIER_TYPE", "install"]

TIER_MODULE = "lifeboat_cache.integrations.vllm_tier"
TIER_TYPE = "LifeboatTier"

#: The other mode, and its connector.
_LMCACHE = "lmcache"
_CONNECTOR_MODULE = "lifeboat_cache.integrations.vllm_connector"

#: Handed by a launcher to the API servers that it starts beside its engines: bytes
#: of the CPU tier, 0 = none, or the name of the other mode. They configure the launch once
#: more, when the engines may have taken the memory already, and must not decide otherwise:
#: an API server fails on the statistics of a connector that its own configuration does not
#: have.
_DECIDED = "_LIFEBOAT_CACHE_CPU_TIER_BYTES"

_MARK = "_lifeboat_activation"
_log = logging.getLogger("lifeboat_cache")


def install(platform_can_offload: Callable[[], bool]) -> None:
    """Complete engine configurations of this process. Idempotent.

    Parameters
    ----------
    platform_can_offload
        Asked at each launch; whether vLLM can offload on this platform.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        explicit = any(
            getattr(self, name, None) is not None
            for name in ("kv_transfer_config", "kv_offloading_size")
        )
        config = original(self, *args, **kwargs)
        if explicit:
            _log.info("LifeboatCache: the launch configures KV transfer itself; left as it is")
            return config
        try:
            rank = getattr(config.parallel_config, "_api_process_rank", 0)
            servers = getattr(config.parallel_config, "_api_process_count", 1)
            decided = os.environ.get(_DECIDED) if rank >= 0 and servers > 1 else None
            if config.kv_transfer_config is not None:
                pass  # vLLM itself decided on one
            elif decided is not None:
                _follow(config, decided)
            else:
                taken = _complete(config, platform_can_offload)
                if rank < 0:
                    os.environ[_DECIDED] = str(taken)
        except Exception as exc:
            config.kv_transfer_config = None
            os.environ[_DECIDED] = "0"
            _stand_down(str(exc))
        return config

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config


def _stand_down(reason: str) -> None:
    _log.warning("LifeboatCache stands down, vLLM runs without it: %s", reason)
    from lifeboat_cache.integrations.vllm_published import show_stand_down

    show_stand_down(reason)


def _complete(config: Any, platform_can_offload: Callable[[], bool]) -> int | str:
    """Set what the configuration says, or stand down with one line.

    Returns the bytes of the CPU tier, the name of another mode, or 0 = it stands down.
    """
    try:
        loaded = load_config()
    except LifeboatError as exc:
        _stand_down(str(exc))
        return 0
    if loaded.config.engine.vllm_mode == _LMCACHE:
        return _complete_lmcache(config, loaded)
    reason = _platform_reason(platform_can_offload) or _unsupported(config)
    if reason is None:
        ranks, local = _ranks(config.parallel_config)
        tier = size_cpu_tier(
            loaded.config.engine.native_cpu_bytes,
            local,
            available_memory(),
            # Each of them is launched on its own, perhaps on this host and at this time.
            launches=ranks // max(1, local),
        )
        if not tier.bytes:
            reason = (
                f"too little memory for the CPU tier ({tier.reason}): free memory, or enlarge "
                "/dev/shm or the container's limit"
            )
        else:
            reason = places_reason(loaded.config)
    if reason is not None:
        _stand_down(reason)
        return 0
    tokens = loaded.config.engine.native_block_tokens
    # The engines import it, and do not start if they cannot; raises, and we stand down.
    importlib.import_module(TIER_MODULE)
    _set(config, tier.bytes, tokens)
    # What vLLM refuses in combination with any connector; raises, and we stand down.
    verify = getattr(config, "_verify_kv_transfer_compat", None)
    if verify is not None:
        verify()
    _log.info(
        "LifeboatCache is on: native offloading, CPU tier %.1f GB per engine (%s), chunks of about "
        "%d tokens, configuration from %s",
        tier.bytes / 1e9,
        tier.reason,
        tokens,
        loaded.source,
    )
    return tier.bytes


def _complete_lmcache(config: Any, loaded: LoadedConfig) -> int | str:
    """Set the connector of the mode `lmcache`, or stand down with one line."""
    reason = _unsupported(config) or places_reason(loaded.config)
    if reason is None and importlib.util.find_spec(_CONNECTOR_MODULE) is None:
        reason = (
            "engine.vllm_mode is lmcache, and lifeboatcache-lmcache is not installed: "
            'pip install "lifeboatcache-lmcache[lmcache]", or set it to native'
        )
    if reason is not None:
        _stand_down(reason)
        return 0
    # An engine whose connector fails does not start, so what can fail is tried here.
    importlib.import_module(_CONNECTOR_MODULE).prepare(config, loaded)
    _set_lmcache(config)
    verify = getattr(config, "_verify_kv_transfer_compat", None)
    if verify is not None:
        verify()
    _log.info(
        "LifeboatCache is on: LMCache with a server on port %d, configuration from %s",
        loaded.config.engine.lmcache_port,
        loaded.source,
    )
    return _LMCACHE


def _set_lmcache(config: Any) -> None:
    from vllm.config import KVTransferConfig

    config.kv_transfer_config = KVTransferConfig(
        kv_connector="LifeboatConnector",
        kv_connector_module_path=_CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"lifeboat.activated": True},
    )


def _follow(config: Any, decided: str) -> None:
    """Configure an API server as its launcher has configured the engines."""
    if decided == _LMCACHE:
        _set_lmcache(config)
    elif int(decided):
        _set(config, int(decided), 0)


def _set(config: Any, cpu_bytes: int, tokens: int) -> None:
    from vllm.config import KVTransferConfig

    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        # A block that cannot be loaded is recomputed; vLLM's default fails the request.
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": cpu_bytes,
            CHUNK_TOKENS_KEY: tokens,
            "secondary_tiers": [{"type": TIER_TYPE, "module_path": TIER_MODULE}],
        },
    )


def _ranks(parallel: Any) -> tuple[int, int]:
    """Data-parallel ranks in all, and those of this launch on this host."""
    ranks = int(getattr(parallel, "data_parallel_size", 1) or 1)
    return ranks, int(getattr(parallel, "data_parallel_size_local", ranks))


def _spread(parallel: Any) -> bool:
    """Whether engines of several launches, which each decide, report to one API server."""
    ranks, local = _ranks(parallel)
    offline = getattr(parallel, "data_parallel_rank_local", None) is not None
    return local < ranks and not offline and not getattr(parallel, "local_engines_only", False)


def _platform_reason(platform_can_offload: Callable[[], bool]) -> str | None:
    if not platform_can_offload():
        return "vLLM offloads KV only on CUDA, ROCm and XPU platforms"
    return None


def _unsupported(config: Any) -> str | None:
    """Why no connector can work for this launch, ``None`` if one can."""
    if _spread(config.parallel_config):
        return (
            "data-parallel ranks of this launch run on several hosts behind one API server, which "
            "have to agree: name the tier in --kv-transfer-config on each, or use "
            "--data-parallel-hybrid-lb"
        )
    model = config.model_config
    if getattr(model, "is_encoder_decoder", False):
        return "vLLM has no KV connectors for encoder-decoder models"
    if getattr(model, "runner_type", "generate") != "generate":
        return f"a model run for {model.runner_type} has no prompts to continue"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off: start without --no-enable-prefix-caching"
    if getattr(getattr(config, "mamba_config", None), "use_replayssm", False) or getattr(
        config, "use_replayssm", False
    ):
        return "--use-replayssm excludes KV connectors"
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        return "HiSparse keeps KV on the host itself"
    return standdown_reason(config, None)

"""When an engine's KV must not be shared, and why.

A block may be served only if its bytes follow from the identity and the block's
hash alone. The conditions here are those under which that does not hold in vLLM
0.32 and 0.33, or cannot be known.
"""

from __future__ import annotations

import os
import re
from typing import Any

from lifeboat_cache.identity import unreadable_load_format

__all__ = ["standdown_reason", "unstable_hash_reason"]

_STABLE_HASHES = frozenset({"sha256", "sha256_cbor"})

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

#: Models whose layers before the last hidden state load weights from more than the
#: usual files of the model's directory: another model, or a folder below.
_SCATTERED_WEIGHTS = frozenset({"cosmos3", "cosmos3_edge", "flint", "kimi_audio", "ultravox"})

#: These load further weights too, but only behind the last hidden state, or keep no KV.
_SCATTERED_HEADS = frozenset({"clef_flash", "clef_omni", "d3", "roberta"})


def unstable_hash_reason(vllm_config: Any) -> str | None:
    """Why block hashes of this engine mean nothing in another process, if so.

    vLLM seeds the hashes that are not collision-resistant at random, unless
    ``PYTHONHASHSEED`` is set for all processes.
    """
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "sha256"))
    if algorithm in _STABLE_HASHES or os.environ.get("PYTHONHASHSEED") is not None:
        return None
    return (
        f"--prefix-caching-hash-algo {algorithm} names blocks differently in every process: "
        "use sha256, or set PYTHONHASHSEED to the same number everywhere"
    )


def _hosts_reason(parallel: Any) -> str | None:
    if int(getattr(parallel, "nnodes_within_dp", 1) or 1) > 1:
        return (
            "the workers of one engine run on several hosts, and a host sees the KV of its own "
            "workers only: keep the parallel sizes of an engine within one host"
        )
    backend = getattr(parallel, "distributed_executor_backend", None)
    if int(getattr(parallel, "world_size", 1) or 1) == 1:
        return None
    if backend == "external_launcher":
        return (
            "with the external launcher each process holds a part of the KV and none all of it: "
            "let vLLM start its workers (--distributed-executor-backend mp)"
        )
    if backend == "ray" or getattr(backend, "uses_ray", False):
        return (
            "Ray may place the workers of one engine on several hosts: "
            "use --distributed-executor-backend mp on one host"
        )
    return None


def _weights_reason(model: Any, load: Any) -> str | None:
    for name in ("model", "model_weights"):
        path = str(getattr(model, name, "") or "")
        if _REMOTE.match(path):
            return f"weights at {path} cannot be identified: serve the model from a local directory"
    reason = unreadable_load_format(str(getattr(load, "load_format", "auto")))
    if reason is not None:
        return f"{reason}; use --load-format auto"
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true") and not os.path.exists(
        str(model.model)
    ):
        return "weights from ModelScope cannot be identified by name: give vLLM the local directory"
    return None


def _module(model: Any) -> str:
    """Last part of the name of the module that implements a model."""
    try:
        entry = model.registry.models[model.architecture]
        name = getattr(entry, "module_name", None) or entry.model_cls.__module__
    except Exception:
        return ""
    parts = str(name).split(".")
    if parts[:2] == ["vllm", "models"] and len(parts) > 2:
        return parts[2]
    return parts[-1]


def _model_reason(vllm_config: Any) -> str | None:
    model = vllm_config.model_config
    module = _module(model)
    if module in _SCATTERED_WEIGHTS:
        return (
            f"models of the kind {module!r} load weights from more than one place, which cannot "
            "be identified yet: serve them without LifeboatCache"
        )
    if getattr(model, "is_encoder_decoder", False):
        return (
            "an encoder-decoder model's KV depends on the encoder's input, which block hashes do "
            "not cover: serve it without LifeboatCache"
        )
    if getattr(vllm_config, "diffusion_config", None) is not None:
        return (
            "a diffusion model rewrites the KV of tokens it has seen: "
            "serve it without LifeboatCache"
        )
    return None


def standdown_reason(vllm_config: Any, offloading_config: Any) -> str | None:
    """Why the KV of this engine must not be shared; ``None`` if it may be.

    Parameters
    ----------
    vllm_config
        vLLM's ``VllmConfig``; ``None`` without an engine.
    offloading_config
        vLLM's ``OffloadingConfig``; ``None`` while the launch is still being
        configured, in a process that serves no requests itself.

    Returns
    -------
    str or None
        One line that ends in the remedy.
    """
    if vllm_config is None:
        return None
    if not getattr(vllm_config.cache_config, "enable_prefix_caching", True):
        return (
            "prefix caching is off, so vLLM neither asks for KV nor finds its own: "
            "remove --no-enable-prefix-caching"
        )
    sizes = None if offloading_config is None else offloading_config.parallel
    if sizes is not None and int(sizes.world_size) != int(vllm_config.parallel_config.world_size):
        return (
            "vLLM's offloading and the engine disagree about the number of workers: "
            "report this with vLLM's version"
        )
    reason = (
        unstable_hash_reason(vllm_config)
        or _hosts_reason(vllm_config.parallel_config)
        or _weights_reason(vllm_config.model_config, vllm_config.load_config)
        or _model_reason(vllm_config)
    )
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if reason is None and draft is not None:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        reason = _weights_reason(draft, load)
    lora_config = getattr(vllm_config, "lora_config", None)
    if reason is None and lora_config is not None and offloading_config is not None:
        from lifeboat_cache.integrations.vllm_lora import EngineAdapters

        reason = EngineAdapters(lora_config).problem
    return reason

"""The namespace identity of a vLLM engine: everything that decides a block's bytes.

The identity is a JSON-able document that a person can read and compare. What is
in it and why is told in ``docs/identity.md``. Two engines share KV exactly if
their documents are equal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import WeightsIdentity, jsonable, weights_identity
from lifeboat_cache.integrations import vllm_identity_fields as rules
from lifeboat_cache.integrations.vllm_identity_fields import select_fields
from lifeboat_cache.integrations.vllm_identity_model import (
    effective_config,
    model_directory,
    model_section,
)
from lifeboat_cache.integrations.vllm_standdown import standdown_reason, unstable_hash_reason

__all__ = [
    "ADAPTER_FORMAT",
    "effective_config",
    "engine_identity",
    "identify_engine",
    "identify_model",
    "model_directory",
    "standdown_reason",
    "unstable_hash_reason",
    "unverified_identity",
    "version_for_identity",
]

_ADAPTER = "lifeboatcache-vllm"

#: Raised when the adapter stores the same KV under other keys or in another form.
ADAPTER_FORMAT = 1

_SALT_CONTEXT = "lifeboatcache 2026 namespace salt v1"

#: Methods of speculative decoding whose proposals come without a model.
_NO_DRAFT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})

#: Environment variables of vLLM that change numbers by more than rounding, or the
#: layout, and that no configuration object shows.
_DECISIVE_ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MLA_DISABLE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_USE_FLASHINFER_MOE_INT4",
)


def version_for_identity(version: str) -> str:
    """The part of vLLM's version that enters the identity.

    Layouts and hash schemes change between minor releases, so ``0.32.1`` becomes
    ``0.32``. A development build may hold anything and keeps its whole version.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.\d+)?(?:\.post\d+)?(?:\+[\w.]*)?$", version.strip())
    return f"{match[1]}.{match[2]}" if match else version.strip()


def _salt(salt: str) -> str | None:
    return blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).hexdigest() if salt else None


# The cache ------------------------------------------------------------------


def _groups(kv_cache_config: Any) -> list[dict[str, Any]]:
    return [
        select_fields(group, rules.KV_GROUP, f"kv_cache_groups[{number}]")
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    ]


def _placement(kv_cache_config: Any) -> dict[str, Any]:
    """Where layers lie relative to each other, without how much memory there is.

    A row of vLLM's CPU tier holds the layers in the order of their regions; layers
    at one address share a region. Where layers lie within each block, the offset
    itself counts; where each has a region of its own, only the order does, since
    offsets then grow with the number of blocks.
    """
    places: dict[str, tuple[int, int]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            address = tensor.offset + number * tensor.layer_stride
            places[layer] = (int(address), int(tensor.block_stride))
    if not places:
        return {}
    addresses = sorted({address for address, _ in places.values()})
    within_block = addresses[-1] < min(stride for _, stride in places.values())
    order = {address: number for number, address in enumerate(addresses)}
    return {
        layer: {"at": address if within_block else order[address], "block_stride": stride}
        for layer, (address, stride) in places.items()
    }


def _kv(kv_cache_config: Any, offloading: Any, row_bytes: int | None) -> dict[str, Any]:
    section = _offloading(offloading)
    section.update(select_fields(kv_cache_config, rules.KV_CACHE, "kv_cache_config"))
    section["layout"] = jsonable(getattr(offloading, "kv_cache_layout", None), "kv_cache_layout")
    section["cache_groups"] = _groups(kv_cache_config)
    section["placement"] = _placement(kv_cache_config)
    if row_bytes is not None:
        section["row_bytes"] = int(row_bytes)
    return section


def _offloading(offloading: Any) -> dict[str, Any]:
    cache, model = offloading.cache, offloading.model
    return {
        "dtype": str(model.dtype),
        "tokens_per_hash": int(cache.tokens_per_hash),
        "blocks_per_chunk": int(cache.blocks_per_chunk),
        "worker_kv_bytes_per_block": int(offloading.worker_kv_bytes_per_block),
        "replicated": bool(getattr(offloading, "replicated_layout", False)),
        "canonical": bool(getattr(offloading, "canonical_layout", False)),
        "groups": [
            {
                "group_id": int(group.group_id),
                "tokens_per_block": int(group.tokens_per_block),
                "layer_names": [str(name) for name in group.layer_names],
            }
            for group in offloading.groups
        ],
    }


def _parallel_sizes(offloading: Any) -> dict[str, int]:
    sizes = offloading.parallel
    return {
        name: int(getattr(sizes, name))
        for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    }


# The machine ----------------------------------------------------------------


def _platform(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """What of the machine decides the bytes: backends and formats follow from it."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return {"device": "unknown"}
    device = str(getattr(current_platform, "device_type", "unknown"))
    section: dict[str, Any] = {"device": device, "machine": os.uname().machine}
    if device == "cpu":
        section["attention_isa"] = _cpu_isa(vllm_config, kv_cache_config)
        return section
    section["capability"] = _capability(current_platform)
    try:
        section["fp8"] = jsonable(current_platform.fp8_dtype(), "fp8_dtype")
    except Exception:
        section["fp8"] = None
    return section


def _capability(platform: Any) -> list[int] | None:
    # Some platforms ask the device itself, which would open it in a process that
    # must not hold it. Those answer from a table or from the driver's library.
    if type(platform).__name__ not in ("NvmlCudaPlatform", "RocmPlatform"):
        return None
    try:
        found = platform.get_device_capability()
        return None if found is None else [int(found[0]), int(found[1])]
    except Exception:
        return None


def _cpu_isa(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The CPU kernel per head size: it decides how K lies in a block."""
    found: dict[str, str] = {}
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dtype = vllm_config.model_config.dtype
        kv_dtype = vllm_config.cache_config.cache_dtype
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            head = getattr(spec, "head_size", None)
            if head is not None:
                found[f"{head}x{spec.block_size}"] = str(
                    _get_attn_isa(dtype, spec.block_size, head, kv_dtype)
                )
    except Exception as exc:
        raise IdentityError(
            f"the CPU attention kernel cannot be found out ({exc}), and it decides the layout of "
            "KV: report this with vLLM's version"
        ) from exc
    return found


def _environment() -> dict[str, Any]:
    """The decisive variables as vLLM understands them; it sets some of them itself."""
    try:
        from vllm import envs
    except ImportError:
        envs = None
    found = {}
    for name in _DECISIVE_ENVIRONMENT:
        try:
            found[name] = jsonable(getattr(envs, name, None), name)
        except ValueError:  # vLLM refuses the value when it comes to use it
            found[name] = os.environ.get(name)
    return found


# All of it ------------------------------------------------------------------


def _speculative(
    vllm_config: Any, weights: WeightsIdentity, draft_weights: WeightsIdentity | None
) -> dict[str, Any] | None:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    method = str(getattr(speculative, "method", None))
    if method in _NO_DRAFT_MODEL:
        return select_fields(speculative, rules.SPECULATIVE, "speculative_config")
    section = select_fields(speculative, rules.DRAFT, "speculative_config")
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        # A proposer of somebody's own: its name is all there is to know.
        section["proposer"] = jsonable(getattr(speculative, "model", None), "speculative_config")
        return section
    if draft_weights is None:
        if str(draft.model) != str(vllm_config.model_config.model):
            raise IdentityError(
                f"{draft.model}: the draft model's weights were not identified: "
                "report this with vLLM's version"
            )
        draft_weights = weights  # its layers are in the model's own checkpoint
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    section["draft"], _ = model_section(draft, load, draft_weights, "draft_model_config")
    return section


def engine_identity(
    vllm_config: Any,
    kv_cache_config: Any,
    offloading_config: Any,
    *,
    salt: str,
    weights: WeightsIdentity,
    draft_weights: WeightsIdentity | None,
    engine_version: str,
    row_bytes: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe everything that decides the bytes of an engine's KV blocks.

    Reads small files beside the weights: call it from a thread.

    Parameters
    ----------
    vllm_config, kv_cache_config, offloading_config
        vLLM's ``VllmConfig``, ``KVCacheConfig`` and ``OffloadingConfig``, as they
        are when connectors are made.
    salt
        The configured salt; only its digest enters.
    weights, draft_weights
        From :func:`lifeboat_cache.identity.weights_identity`. ``draft_weights`` is
        ``None`` if there is no draft model, or if it is in the model's checkpoint.
    engine_version
        ``vllm.__version__``.
    row_bytes
        Bytes of a chunk in vLLM's CPU tier, if known.

    Returns
    -------
    identity, display
        The document that names the namespace, and facts for people that do not
        enter it (name and directory of the model, sizes).

    Raises
    ------
    IdentityError
        If something that matters has no unambiguous spelling.
    """
    identity, display = _model_identity(
        vllm_config,
        salt=salt,
        weights=weights,
        draft_weights=draft_weights,
        engine_version=engine_version,
    )
    identity |= {
        "kind": "vllm-engine",
        "platform": _platform(vllm_config, kv_cache_config),
        "parallel": {
            **select_fields(vllm_config.parallel_config, rules.PARALLEL, "parallel_config"),
            **_parallel_sizes(offloading_config),
        },
        "kv": _kv(kv_cache_config, offloading_config, row_bytes),
    }
    display |= {
        "dtype": str(offloading_config.model.dtype),
        "tensor_parallel_size": int(offloading_config.parallel.tp_size),
        "pipeline_parallel_size": int(offloading_config.parallel.pp_size),
    }
    return identity, display


def _model_identity(
    vllm_config: Any,
    *,
    salt: str,
    weights: WeightsIdentity,
    draft_weights: WeightsIdentity | None,
    engine_version: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of an identity follows from ``VllmConfig`` alone."""
    model, directory = model_section(
        vllm_config.model_config, vllm_config.load_config, weights, "model_config"
    )
    identity: dict[str, Any] = {
        "adapter": {"name": _ADAPTER, "format": ADAPTER_FORMAT},
        "engine": {
            "name": "vllm",
            "version": version_for_identity(engine_version),
            "model_runner_v2": jsonable(
                getattr(vllm_config, "use_v2_model_runner", None), "use_v2_model_runner"
            ),
        },
        "environment": _environment(),
        "model": model,
        "cache": select_fields(vllm_config.cache_config, rules.CACHE, "cache_config"),
        "attention": select_fields(
            getattr(vllm_config, "attention_config", None), rules.ATTENTION, "attention_config"
        ),
        "mamba": select_fields(
            getattr(vllm_config, "mamba_config", None), rules.MAMBA, "mamba_config"
        ),
        "speculative": _speculative(vllm_config, weights, draft_weights),
        "other": select_fields(vllm_config, rules.ENGINE, "vllm_config"),
        "salt": _salt(salt),
    }
    display = {
        "engine": f"vllm {engine_version}",
        "model": str(vllm_config.model_config.model),
        "directory": directory.name if directory is not None else None,
        "weights": weights.to_display(),
        "draft_weights": draft_weights.to_display() if draft_weights is not None else None,
    }
    return identity, display


def unverified_identity(offloading_config: Any, salt: str, engine_version: str) -> dict[str, Any]:
    """Describe an engine of which only vLLM's ``OffloadingConfig`` is known.

    For driving vLLM's offloading without an engine. The model is known by the name
    it was given only, so its KV never meets that of an identified model.
    """
    return {
        "kind": "vllm-unverified-model",
        "model": "unverified-model",
        "adapter": {"name": _ADAPTER, "format": ADAPTER_FORMAT},
        "engine": {"name": "vllm", "version": version_for_identity(engine_version)},
        "name": str(offloading_config.model.name),
        "kv": {
            **_offloading(offloading_config),
            "layout": jsonable(
                getattr(offloading_config, "kv_cache_layout", None), "kv_cache_layout"
            ),
        },
        "parallel": _parallel_sizes(offloading_config),
        "salt": _salt(salt),
    }


def identify_engine(
    vllm_config: Any,
    kv_cache_config: Any,
    offloading_config: Any,
    *,
    salt: str,
    engine_version: str,
    row_bytes: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    not_after: float | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the weights of an engine, fingerprint them, and describe the engine.

    Parameters
    ----------
    vllm_config, kv_cache_config, offloading_config, salt, engine_version, row_bytes
        See :func:`engine_identity`.
    should_stop
        Asked before every read.
    not_after
        When this process started to load the model, in seconds since the epoch.
        Files of a *local directory* that changed later are refused, because the
        engine may hold what was there before; a Hub snapshot is never rewritten.

    Returns
    -------
    identity, display
        See :func:`engine_identity`.

    Raises
    ------
    IdentityError
        If the engine's KV must not be shared; the message says why.
    """
    reason = standdown_reason(vllm_config, offloading_config)
    if reason is not None:
        raise IdentityError(reason)
    weights, draft_weights = _all_weights(vllm_config, should_stop, not_after)
    return engine_identity(
        vllm_config,
        kv_cache_config,
        offloading_config,
        salt=salt,
        weights=weights,
        draft_weights=draft_weights,
        engine_version=engine_version,
        row_bytes=row_bytes,
    )


def identify_model(
    vllm_config: Any,
    *,
    salt: str,
    engine_version: str,
    not_after: float | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe what decides an engine's KV, as far as ``VllmConfig`` says it.

    All processes of an engine have that in common; ``KVCacheConfig`` differs between them.
    For who keeps KV in a form of its own, whose shape is told apart elsewhere.

    Parameters
    ----------
    vllm_config, salt, engine_version, not_after
        See :func:`identify_engine`.

    Returns
    -------
    identity, display
        See :func:`engine_identity`.

    Raises
    ------
    IdentityError
        If the engine's KV must not be shared; the message says why.
    """
    reason = standdown_reason(vllm_config, None)
    if reason is not None:
        raise IdentityError(reason)
    weights, draft_weights = _all_weights(vllm_config, None, not_after)
    identity, display = _model_identity(
        vllm_config,
        salt=salt,
        weights=weights,
        draft_weights=draft_weights,
        engine_version=engine_version,
    )
    head = vllm_config.model_config.get_head_size()
    spec = SimpleNamespace(head_size=head, block_size=vllm_config.cache_config.block_size)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    identity |= {
        "kind": "vllm-model",
        "platform": _platform(vllm_config, groups),
        "parallel": select_fields(vllm_config.parallel_config, rules.PARALLEL, "parallel_config"),
        "block_tokens": int(spec.block_size),
    }
    return identity, display


def _all_weights(
    vllm_config: Any, should_stop: Callable[[], bool] | None, not_after: float | None
) -> tuple[WeightsIdentity, WeightsIdentity | None]:
    """Fingerprint the model, and the draft model if there is one with weights of its own."""

    def fingerprint(model: Any, load: Any) -> WeightsIdentity:
        load_format = str(load.load_format)
        if load_format == "dummy":
            return weights_identity(Path(), load_format=load_format)
        directory = model_directory(model, load)
        local = os.path.exists(str(model.model))
        return weights_identity(
            directory,
            load_format=load_format,
            should_stop=should_stop,
            not_after=not_after if local else None,
        )

    model = vllm_config.model_config
    weights = fingerprint(model, vllm_config.load_config)
    draft_weights = None
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and str(getattr(speculative, "method", None)) not in _NO_DRAFT_MODEL:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        same = str(draft.model) == str(model.model) and load is vllm_config.load_config
        draft_weights = None if same else fingerprint(draft, load)
    return weights, draft_weights

"""The names and signatures of SGLang that the adapter depends on.

Looked at without calling anything: for ``lifeboat-cache selftest sglang``, which says
what a new release of SGLang has moved before a server finds out.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from lifeboat_cache.integrations import sglang_epoch
from lifeboat_cache.integrations import sglang_identity_fields as fields

__all__ = [
    "hook_problems",
    "interface_problems",
    "missing_names",
    "parameters",
    "unknown_settings",
]

_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_TREE = "sglang.srt.mem_cache.unified_radix_cache"

#: Names that are imported, with the module they come from.
_NAMES = (
    *(
        (_STORAGE, name)
        for name in (
            "HiCacheStorage",
            "HiCacheStorageConfig",
            "HiCacheStorageExtraInfo",
            "PoolHitPolicy.ALL_PAGES",
            "PoolHitPolicy.TRAILING_PAGES",
            "PoolHitPolicy.BLOCK_GROUPS",
            "PoolName.KV",
            "PoolTransfer",
            "PoolTransferResult",
        )
    ),
    ("sglang.srt.arg_groups.arg_utils", "namespace_of"),
    ("sglang.srt.observability.metrics_collector", "StorageMetrics"),
    ("sglang.srt.runtime_context", "get_context"),
    ("sglang.srt.utils.hf_transformers_utils", "get_config"),
    ("sglang.srt.mem_cache.storage", "StorageBackendFactory._create_dynamic_backend"),
    *(
        ("sglang.srt.mem_cache.pool_host.mha", f"MHATokenToKVPoolHost.{name}")
        for name in ("get_data_page", "get_page_buffer_meta")
    ),
    *(
        ("sglang.srt.mem_cache.pool_host.mla", f"MLATokenToKVPoolHost.{name}")
        for name in ("get_data_page", "get_page_buffer_meta")
    ),
    ("sglang.srt.mem_cache.pool_host.mamba", "MambaPoolHost._iter_page_tensors"),
)

#: Fields of SGLang's records that are read.
_FIELDS = (
    (
        _STORAGE,
        "HiCacheStorageConfig",
        (
            "attn_cp_rank",
            "attn_cp_size",
            "dcp_rank",
            "dcp_size",
            "extra_config",
            "is_mla_model",
            "model_name",
            "pp_rank",
            "pp_size",
            "tp_rank",
            "tp_size",
        ),
    ),
    (
        _STORAGE,
        "PoolTransfer",
        ("name", "host_indices", "keys", "hit_policy", "block_pages", "group_pages"),
    ),
    (_STORAGE, "HiCacheStorageExtraInfo", ("prefix_keys",)),
    (
        _STORAGE,
        "PoolTransferResult",
        ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
    ),
)

#: What is wrapped besides what :mod:`~.sglang_epoch` watches.
_HOOKED = (
    ("sglang.srt.lora.lora_manager", "LoRAManager._load_lora_adapter"),
    ("sglang.srt.lora.lora_manager", "LoRAManager.load_lora_adapter_from_tensors"),
    ("sglang.srt.managers.schedule_batch", "Req.__init__"),
    (_TREE, "UnifiedRadixCache.write_backup_storage"),
    (_TREE, "UnifiedRadixCache.release_host_resources"),
    (_CONTROLLER, "HybridCacheController.parse_storage_backend_extra_config"),
)


def _found(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def missing_names(names: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Which of some names, with their modules, are not there; a line each."""
    for module, name in names:
        try:
            _found(module, name)
        except ImportError as error:
            yield f"{module}: {error}"
        except AttributeError:
            yield f"{module} has no {name}"


def _missing_fields() -> Iterator[str]:
    for module, name, wanted in _FIELDS:
        try:
            kind = _found(module, name)
            there = {field.name for field in dataclasses.fields(kind)}
        except (ImportError, AttributeError, TypeError):
            continue  # said with the names
        yield from (f"{module}.{name} has no field {one}" for one in wanted if one not in there)


def parameters(function: Any) -> list[str]:
    """Names of the parameters that a function has been given."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in found if parameter.kind not in kinds]


def _backend_problems() -> Iterator[str]:
    """Compare the backend with the class of SGLang that it fills in."""
    try:
        base = _found(_STORAGE, "HiCacheStorage")
        from lifeboat_cache.integrations.sglang_backend import LifeboatHiCacheStorage
    except (ImportError, AttributeError) as error:
        yield f"the backend cannot be imported: {error}"
        return
    for name in sorted(getattr(LifeboatHiCacheStorage, "__abstractmethods__", ())):
        yield f"SGLang asks a backend for {name}, which this version does not have"
    for name in sorted(vars(LifeboatHiCacheStorage)):
        ours = getattr(LifeboatHiCacheStorage, name)
        if not getattr(ours, "__override__", False):
            continue
        theirs = getattr(base, name, None)
        if theirs is None:
            yield f"SGLang's HiCacheStorage has no {name} any more: it will not be called"
        elif len(parameters(theirs)) != len(parameters(ours)):
            yield (
                f"SGLang calls a backend's {name} with {', '.join(parameters(theirs))}; "
                f"this version takes {', '.join(parameters(ours))}"
            )


def interface_problems() -> list[str]:
    """What is missing or other than it was, a line each."""
    found = [*missing_names(iter(_NAMES)), *_missing_fields(), *_backend_problems()]
    return list(dict.fromkeys(found))


def hook_problems() -> list[str]:
    """What the hooks would not find, a line each."""
    return list(missing_names(iter((*_HOOKED, *sglang_epoch.WATCHED))))


def unknown_settings() -> list[str]:
    """Settings of SGLang's that this adapter does not know; harmless at their defaults."""
    namespace_of = _found("sglang.srt.arg_groups.arg_utils", "namespace_of")
    return fields.unclassified(namespace_of(_found("sglang.srt.server_args", "ServerArgs")))

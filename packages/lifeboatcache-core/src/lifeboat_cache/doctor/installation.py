"""Checks of the installation: versions, configuration file, home directory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lifeboat_cache.config import Config
from lifeboat_cache.config.paths import ENV_INTEGRITY_KEY
from lifeboat_cache.doctor.check import Check, DoctorContext
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.integrity import configured_integrity_key
from lifeboat_cache.kernels import cache
from lifeboat_cache.version import __version__

__all__ = ["check_adapters", "check_config", "check_home", "check_kernels", "check_versions"]

_CORE = "lifeboatcache-core"

#: Keys that nobody else may read, and what they hold.
_SECRETS = {
    "security.namespace_salt": "the namespace salt",
    "dashboard.auth_token": "the dashboard's token",
}


def check_versions() -> Check:
    """Report the versions of Python and of LifeboatCache's distributions."""
    installed = {
        distribution.name: distribution.version
        for distribution in importlib.metadata.distributions(path=list(dict.fromkeys(sys.path)))
        if (distribution.name or "").startswith("lifeboatcache")
    }
    summary = f"Python {platform.python_version()}, {_CORE} {__version__}"
    others = sorted(f"{name} {version}" for name, version in installed.items() if name != _CORE)
    details = (f"Python: {sys.executable}", *others)
    if _CORE not in installed:
        details = (*details, f"{_CORE} runs from a source tree, without installed metadata")
    elif installed[_CORE] != __version__:
        return Check(
            "versions",
            "warn",
            f"{summary}, but the installed metadata says {installed[_CORE]}",
            f"Reinstall {_CORE} into {sys.prefix}, or remove the other copy from PYTHONPATH.",
            details,
        )
    return Check("versions", "ok", summary, details=details)


def check_adapters(entries: Iterable[str]) -> Iterator[Check]:
    """Say so if no engine can use the store from this environment.

    Parameters
    ----------
    entries
        Names of what other distributions check: each adapter checks its engine.
    """
    if set(entries) <= {"dashboard"}:
        yield Check(
            "adapters",
            "warn",
            f"none is installed for {sys.executable}: no engine in this environment can use the "
            "cache",
            "Install the one of your engine here: lifeboatcache-vllm, lifeboatcache-sglang, "
            f"lifeboatcache-lmcache or lifeboatcache-mlx, from where {_CORE} came from.",
        )


def check_config(context: DoctorContext) -> Iterator[Check]:
    """Check that the configuration is valid and that its secrets are private."""
    loaded = context.loaded
    if loaded is None:
        yield Check(
            "configuration",
            "fail",
            context.problem,
            "Correct it; then run: lifeboat-cache config validate",
        )
        return
    yield Check(
        "configuration",
        "ok",
        loaded.source,
        details=tuple(str(path) for path in loaded.files),
    )
    yield from _check_integrity_key(loaded.config)
    for key, secret in _SECRETS.items():
        origin = loaded.origins.get(key, "")
        file = Path(origin.rpartition(":")[0])
        if file in loaded.files:
            yield _check_private(file, secret)


def _check_private(file: Path, secret: str) -> Check:
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        return Check(
            "configuration: private",
            "warn",
            f"{file} holds {secret}, and its mode {mode:04o} lets others read it",
            f"chmod 600 {file}",
        )
    return Check("configuration: private", "ok", f"{file} has the mode {mode:04o}")


def _check_integrity_key(config: Config) -> Iterator[Check]:
    name = "configuration: integrity key"
    try:
        key = configured_integrity_key(config)
    except ConfigError as error:
        summary, found, remedy = str(error).rpartition(": run: ")
        if not found:  # the message ends in its remedy
            summary, remedy = str(error), "Correct it, or leave security.integrity_key out."
        yield Check(name, "fail", summary, remedy)
        return
    if key is not None:
        where = ENV_INTEGRITY_KEY if os.environ.get(ENV_INTEGRITY_KEY) else None
        where = where or str(config.security.integrity_key)
        yield Check(name, "ok", f"{where} holds the key {key.id}")


def check_kernels(context: DoctorContext) -> Check:
    """Check that compiled kernels can be used, or compiled, with this Python."""
    name = "kernels"
    if context.loaded is None:
        return Check(name, "skip", "the configuration is not valid")
    try:
        cache.require_jit()
        place = cache.directory(context.loaded.home)
        if not place.exists():
            when = "the agent compiles them when an engine starts"
            return Check(name, "ok", f"not compiled for this machine and release yet; {when}")
        cache.verify(place)
    except cache.UnusableError as error:
        summary, _, remedy = str(error).rpartition("; ")
        remedy = f"{remedy[:1].upper()}{remedy[1:]}. Until then plain Python serves, slower."
        return Check(name, "warn", summary, remedy)
    return Check(name, "ok", f"compiled for this machine and release ({place})")


def check_home(context: DoctorContext) -> Check:
    """Check that the home directory is this user's, and private."""
    name = "home directory"
    if context.loaded is None:
        return Check(name, "skip", "the configuration is not valid")
    home = context.loaded.home
    try:
        found = home.stat()
    except FileNotFoundError:
        return Check(name, "ok", f"{home} is not there yet; it is made on first use")
    except OSError as error:
        return Check(
            name,
            "fail",
            f"{home} cannot be looked at ({error.strerror})",
            "Correct its owner and permissions, or set LIFEBOAT_CACHE_HOME to another directory.",
        )
    if not stat.S_ISDIR(found.st_mode):
        return Check(
            name,
            "fail",
            f"{home} is not a directory",
            "Move it away, or set LIFEBOAT_CACHE_HOME to a directory.",
        )
    if found.st_uid != os.geteuid():
        return Check(
            name,
            "warn",
            f"{home} belongs to user {found.st_uid}, and this is user {os.geteuid()}",
            "Run the doctor and the engine as the same user, or set LIFEBOAT_CACHE_HOME to "
            "another directory.",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return Check(
            name, "warn", f"{home} has the mode {mode:04o}: others can get in", f"chmod 700 {home}"
        )
    return Check(name, "ok", f"{home} is private (mode {mode:04o})")

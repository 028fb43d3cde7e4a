"""The checks that the LMCache adapter adds to ``lifeboat-cache doctor``.

They look at installed metadata and at files. LMCache itself is not imported: that takes
many seconds.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.doctor import Check, DoctorContext
from lifeboat_cache.integrations.lmcache_leases import ServerPlaces
from lifeboat_cache.integrations.lmcache_versions import (
    describe_tested,
    is_tested,
    lmcache_version,
)

__all__ = ["check_engine", "check_mode", "check_server", "checks"]

_MODE = "lmcache"


def checks(context: DoctorContext) -> Iterator[Check]:
    """Check whether LMCache in this environment can use LifeboatCache."""
    version = lmcache_version()
    yield check_engine(version)
    yield from check_mode(context, version)
    yield check_server(context)


def check_engine(version: str) -> Check:
    """Check that LMCache is there in a tested version.

    Parameters
    ----------
    version
        The installed one, empty if there is none.
    """
    name = "LMCache: version"
    tested = f"LifeboatCache was tested with LMCache {describe_tested()}"
    if not version:
        return Check(
            name,
            "skip",
            f"LMCache is not installed for {sys.executable}",
            "To check an LMCache elsewhere, run the lifeboat-cache of its environment.",
        )
    if not is_tested(version):
        return Check(
            name,
            "fail",
            f"LMCache {version}; {tested}, and refuses others",
            'Install a tested one: pip install "lifeboatcache-lmcache[lmcache]".',
        )
    return Check(name, "ok", f"LMCache {version}; {tested}")


def check_mode(context: DoctorContext, version: str) -> Iterator[Check]:
    """Check that what vLLM's mode ``lmcache`` needs is in vLLM's environment."""
    if context.loaded is None or context.loaded.config.engine.vllm_mode != _MODE:
        return
    name = "LMCache: engine.vllm_mode"
    if not importlib.metadata.packages_distributions().get("vllm"):
        yield Check(
            name,
            "skip",
            f"vLLM is not installed for {sys.executable}",
            "Run the lifeboat-cache of vLLM's environment to check the mode.",
        )
    elif not version:
        yield Check(
            name,
            "fail",
            "it is lmcache, and LMCache is not installed beside vLLM: vLLM starts without a cache",
            'Install it (pip install "lifeboatcache-lmcache[lmcache]"), '
            "or set engine.vllm_mode: native.",
        )
    else:
        yield Check(name, "ok", "it is lmcache, and LMCache is installed beside vLLM")


def check_server(context: DoctorContext) -> Check:
    """Say whether an LMCache server of this home runs."""
    name = "LMCache: server"
    if context.loaded is None:
        return Check(name, "skip", "the configuration is not valid")
    try:
        places = ServerPlaces(
            home_directory(context.environ), context.loaded.config.engine.lmcache_port
        )
    except ValueError as exc:
        return Check(name, "skip", str(exc))
    if not places.served():
        return Check(name, "ok", f"none runs on port {places.port}; engines start one")
    if not places.document.exists():
        return Check(
            name, "warn", f"one starts on port {places.port}", f"If it stays so, see {places.log}."
        )
    return Check(name, "ok", f"one answers on port {places.port}; its log is {places.log}")

"""The ``sglang.srt.plugins`` plugin.

SGLang calls :func:`register` once in every process: launcher, schedulers, detokenizer.
It costs next to nothing there: what is needed is imported when SGLang comes to it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lifeboat_cache.engines.import_hook import when_imported
from lifeboat_cache.engines.switch import is_enabled, is_misspelled
from lifeboat_cache.integrations import sglang_epoch
from lifeboat_cache.integrations.sglang_mlx import uses_mlx

__all__ = ["register", "registered", "set_platform_check"]

_log = logging.getLogger("lifeboat_cache")
_registered = False

_ARGUMENTS = "sglang.srt.server_args"
_CACHES = "sglang.srt.mem_cache.registry"
_SCHEDULER = "sglang.srt.managers.scheduler"


def _offloads_here(server_args: Any) -> bool:
    from sglang.srt.runtime_context import get_platform

    if str(getattr(server_args, "device", None) or "").partition(":")[0] in ("cpu", "mps"):
        return False
    platform = get_platform()
    return any(getattr(platform, f"is_{name}", False) for name in ("cuda", "hip", "xpu"))


_platform_check: Callable[[Any], bool] = _offloads_here


def _can_offload(server_args: Any) -> bool:
    """Ask at launch: the check may be replaced after this plugin has been registered."""
    return _platform_check(server_args)


def set_platform_check(check: Callable[[Any], bool]) -> None:
    """Replace the question "does the hierarchical cache work on this platform?".

    For whoever adds it to another platform (our tests do, for the CPU).

    Parameters
    ----------
    check
        Asked with the arguments of a launch.
    """
    global _platform_check
    _platform_check = check


def registered() -> bool:
    """Whether the plugin has run in this process."""
    return _registered


def register() -> None:
    """Offer our backends, and switch one on if asked to. Idempotent."""
    global _registered
    if _registered:
        return
    _registered = True
    # Also where we are off: a backend may be attached later, and has to know.
    sglang_epoch.watch()
    when_imported(_CACHES, partial(_safely, _offer_cache))
    if uses_mlx():
        when_imported(_SCHEDULER, partial(_safely, _watch_arrivals))
    if is_enabled():
        when_imported(_ARGUMENTS, partial(_safely, _activate))
        when_imported(_SCHEDULER, partial(_safely, _watch_schedulers))
    elif is_misspelled() and multiprocessing.parent_process() is None:
        _log.warning(
            "LifeboatCache is off: LIFEBOAT_CACHE=%s is neither on nor off; set it to 1 or to 0",
            os.environ["LIFEBOAT_CACHE"],
        )


def _safely(step: Callable[[], None]) -> None:
    """Runs inside an import of SGLang's, which must not fail."""
    try:
        step()
    except Exception as error:
        _log.warning("LifeboatCache is off in this process: %s", error)


def _offer_cache() -> None:
    from lifeboat_cache.integrations import sglang_mlx

    sglang_mlx.register()


def _watch_arrivals() -> None:
    from lifeboat_cache.integrations import sglang_mlx

    sglang_mlx.watch_scheduler()


def _activate() -> None:
    from lifeboat_cache.interface import require_interface

    require_interface(1, 1, "lifeboatcache-sglang")
    from lifeboat_cache.integrations import sglang_activation

    sglang_activation.install(_can_offload)


def _watch_schedulers() -> None:
    from lifeboat_cache.integrations import sglang_fallback, sglang_kernels, sglang_staging

    sglang_staging.install()
    sglang_kernels.install()
    sglang_fallback.install()

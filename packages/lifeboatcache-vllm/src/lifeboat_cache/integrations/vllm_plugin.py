"""The ``vllm.general_plugins`` plugin.

vLLM calls :func:`register` once in every process: API server, engine core, workers.
It costs next to nothing there: what is needed is imported when vLLM comes to it.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Callable
from functools import partial

from lifeboat_cache.engines.import_hook import when_imported
from lifeboat_cache.engines.switch import is_enabled, is_misspelled

__all__ = ["register", "registered", "set_platform_check"]

_log = logging.getLogger("lifeboat_cache")
_registered = False

_CONNECTOR = "lifeboat_cache.integrations.vllm_connector"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_ARGUMENTS = "vllm.engine.arg_utils"


def _offloads_here() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike() or current_platform.is_xpu())


_platform_check: Callable[[], bool] = _offloads_here


def _can_offload() -> bool:
    """Ask at launch: the check may be replaced after this plugin has been registered."""
    return _platform_check()


def set_platform_check(check: Callable[[], bool]) -> None:
    """Replace the question "can vLLM offload on this platform?".

    For whoever adds offloading to another platform (our tests do, for the CPU).
    """
    global _platform_check
    _platform_check = check


def registered() -> bool:
    """Whether the plugin has run in this process."""
    return _registered


def register() -> None:
    """Hand configurations to the tier and, if asked to, switch it on. Idempotent."""
    global _registered
    if _registered:
        return
    _registered = True
    _log_like_vllm()
    when_imported(_FACTORY, partial(_safely, _hand_over))
    if is_enabled():
        when_imported(_ARGUMENTS, partial(_safely, _activate))
    elif is_misspelled() and multiprocessing.parent_process() is None:
        _log.warning(
            "LifeboatCache is off: LIFEBOAT_CACHE=%s is neither on nor off; set it to 1 or to 0",
            os.environ["LIFEBOAT_CACHE"],
        )


def _safely(step: Callable[[], None]) -> None:
    """Runs inside an import of vLLM's, which must not fail."""
    try:
        step()
    except Exception as error:
        _log.warning("LifeboatCache is off in this process: %s", error)


def _hand_over() -> None:
    from lifeboat_cache.integrations import vllm_handover

    vllm_handover.install()
    _offer_connector()


def _offer_connector() -> None:
    """Let vLLM know the connector of the mode `lmcache`, if that is installed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if importlib.util.find_spec(_CONNECTOR) is None:
        return
    # vLLM raises where the name is taken: by this plugin, in a process that was forked.
    if "LifeboatConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("LifeboatConnector", _CONNECTOR, "LifeboatConnector")


def _activate() -> None:
    from lifeboat_cache.interface import require_interface

    require_interface(1, 0, "lifeboatcache-vllm")
    from lifeboat_cache.integrations import vllm_activation

    vllm_activation.install(_can_offload)


def _log_like_vllm() -> None:
    """Log where and how vLLM does, unless the application has set up our logger.

    vLLM replaces its handlers when it reads its logging options, so its logger is
    made the parent instead of copying them.
    """
    if not _log.handlers:
        _log.parent = logging.getLogger("vllm")

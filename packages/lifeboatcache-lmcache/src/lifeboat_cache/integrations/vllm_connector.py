"""``LifeboatConnector``: LMCache in vLLM, with a server of ours and the engine's identity.

LMCache's multiprocess connector, to which it adds three things: it starts the local server,
which all engines of a node share; it says in the name of the model what decides its KV; and
it refuses what LMCache would serve wrongly.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

from lifeboat_cache.config import LoadedConfig, load_config
from lifeboat_cache.errors import ConfigError, IdentityError, InterfaceError, LifeboatError
from lifeboat_cache.identity import process_start_time
from lifeboat_cache.integrations.lmcache_identity import ModelTag, tagged
from lifeboat_cache.integrations.lmcache_starter import ensure_server
from lifeboat_cache.integrations.lmcache_versions import refuse
from lifeboat_cache.interface import Namespace, require_interface

__all__ = ["ACTIVATED", "LifeboatConnector", "prepare"]

_log = logging.getLogger("lifeboat_cache")

#: Keys of LMCache's that point at a server which exists already, or have LMCache start one.
_ELSEWHERE = (
    "lmcache.mp.server_urls", "lmcache.mp.host", "lmcache.mp.port", "lmcache.mp.autostart",
)  # fmt: skip

#: Set once our own server has been put into LMCache's keys.
_OURS = "lifeboat.local_server"

#: Set where ``LIFEBOAT_CACHE=1`` has chosen the connector, and not the launch.
ACTIVATED = "lifeboat.activated"

#: vLLM with which LMCache was tested.
_VLLM = ((0, 32),)

#: How often the scheduler looks whether the server is still there, in seconds.
_LOOK_S = 10.0

#: So many seconds the engine waits for an answer of the local server. LMCache's own 300 hold up
#: every request when the server is killed at the wrong moment, and are what vLLM gives its workers
#: before it ends. What is waited for are copies within memory.
_ANSWER_S = 10.0

#: One that does not start is tried again after so many seconds.
_AGAIN_S = 60.0


class LifeboatConnector(LMCacheMPConnector):
    """LMCache's connector with LifeboatCache's server and identity.

    Takes LMCache's keys in ``kv_connector_extra_config``; with ``lmcache.mp.host`` or
    ``lmcache.mp.port`` it uses the server there and starts none.

    Raises
    ------
    LifeboatError
        If there is no server, or this engine's KV must not be shared; the message ends in
        the remedy.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        loaded = load_config()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        check(vllm_config)
        tag = self._tag(vllm_config, _salt(loaded), activated=bool(extra.get(ACTIVATED)))
        local = bool(extra.get(_OURS)) or not any(key in extra for key in _ELSEWHERE)
        port = loaded.config.engine.lmcache_port
        if local:
            ensure_server(loaded, port)
            extra[_OURS] = True
            extra["lmcache.mp.host"] = "tcp://127.0.0.1"
            extra["lmcache.mp.port"] = port
            extra.setdefault("lmcache.mp.mq_timeout", _ANSWER_S)
        super().__init__(vllm_config, role, kv_cache_config)
        for name in ("scheduler_adapter", "worker_adapter"):
            adapter = getattr(self, name, None)
            if adapter is not None:
                adapter.model_name = tagged(adapter.model_name, tag)
                _log.info("LifeboatCache: LMCache knows the model as %s", adapter.model_name)
                if local and name == "scheduler_adapter":
                    _keep_server(loaded, port)

    @staticmethod
    def _tag(vllm_config: Any, salt: str, *, activated: bool) -> ModelTag:
        try:
            return engine_tag(vllm_config, salt)
        except IdentityError as exc:
            if not activated:
                raise
            # It could be identified at launch, so files have changed since. Nobody asked for
            # this connector by name, so the engine must start: it finds nothing.
            _log.warning("LifeboatCache: nothing is restored in this engine: %s", exc)
            return ModelTag(uuid.uuid4().hex, recurrent=True)


def prepare(vllm_config: Any, loaded: LoadedConfig) -> None:
    """Do at launch what may fail, so that vLLM can start without LMCache.

    Raises
    ------
    LifeboatError
        See :class:`LifeboatConnector`.
    """
    check(vllm_config)
    engine_tag(vllm_config, _salt(loaded))
    ensure_server(loaded, loaded.config.engine.lmcache_port)


def _salt(loaded: LoadedConfig) -> str:
    return loaded.config.security.namespace_salt.get_secret_value()


def check(vllm_config: Any) -> None:
    """Refuse what LMCache would serve wrongly, and what was not tested.

    Raises
    ------
    LifeboatError
        If there is something.
    """
    require_interface(1, 3, "lifeboatcache-lmcache")
    refuse()
    import vllm

    try:
        from lifeboat_cache.integrations.vllm_versions import parse_minor
    except ImportError as exc:
        raise InterfaceError(
            "LifeboatConnector needs lifeboatcache-vllm: pip install lifeboatcache-vllm"
        ) from exc
    version = str(vllm.__version__)
    if parse_minor(version) not in _VLLM:
        tested = ", ".join(f"{major}.{minor}" for major, minor in _VLLM)
        raise InterfaceError(
            f"LifeboatConnector was tested with vLLM {tested}, and this is {version}: use "
            "engine.vllm_mode native, or a lifeboatcache-lmcache that was tested with yours"
        )
    if getattr(vllm_config, "lora_config", None) is not None:
        raise ConfigError(
            "LMCache does not tell the KV of LoRA adapters from that of their model: use "
            "engine.vllm_mode native, or start without --enable-lora"
        )


def engine_tag(vllm_config: Any, salt: str) -> ModelTag:
    """What decides the KV of an engine; the same in all of its processes.

    Reads samples of the model's weights.

    Raises
    ------
    IdentityError
        If the engine's KV must not be shared.
    """
    import vllm

    from lifeboat_cache.integrations.vllm_identity import identify_model

    identity, _ = identify_model(
        vllm_config,
        salt=salt,
        engine_version=str(vllm.__version__),
        not_after=process_start_time(),
    )
    model = vllm_config.model_config
    recurrent = bool(getattr(model, "is_hybrid", True)) or bool(
        getattr(model, "has_inner_state", True)
    )
    return ModelTag(Namespace.from_identity(identity).hex[:32], recurrent)


def _keep_server(loaded: LoadedConfig, port: int) -> None:
    """Start the server again where it has died."""

    def keep() -> None:
        said = ""
        while True:
            time.sleep(_LOOK_S)
            try:
                ensure_server(loaded, port)
            except LifeboatError as exc:
                if str(exc) != said:
                    said = str(exc)
                    _log.warning("LifeboatCache: %s", exc)
                time.sleep(_AGAIN_S)

    threading.Thread(target=keep, name="lifeboat-lmcache-server", daemon=True).start()

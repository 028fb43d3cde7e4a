"""What one scheduler of SGLang's MLX backend keeps on storage: its store, and its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.integrations import sglang_epoch, sglang_exit, sglang_prompts
from lifeboat_cache.integrations.sglang_identity import find_namespace
from lifeboat_cache.integrations.sglang_published import Published
from lifeboat_cache.interface import Namespace, Store, open_block_store, require_interface
from lifeboat_cache.registry import attach

__all__ = ["Keeping"]

_log = logging.getLogger("lifeboat_cache")


class Keeping:
    """The store of one scheduler, until its weights change or its process ends.

    Parameters
    ----------
    name
        What the server calls its model.
    namespace, config
        Tests and tools may give them; otherwise they are the engine's.

    Attributes
    ----------
    store
        ``None`` once nothing may be served or stored any more.
    wait_s
        How long a request may wait until the store knows what is there, in seconds.
    published
        Counts what was given back.
    """

    def __init__(
        self, name: str, *, namespace: Namespace | None = None, config: Any = None
    ) -> None:
        require_interface(1, 4, "lifeboatcache-sglang")
        live = config
        if live is None:
            live = LiveConfig(load_config())
        settings = live.config if isinstance(live, LiveConfig) else live
        self.wait_s = float(settings.engine.native_promotion_wait_s)
        self.published = Published(name)
        self._name = name
        self._stopping = threading.Event()
        # First: without it nobody would notice that weights change.
        sglang_epoch.on_change(self._weights_changed)
        sglang_exit.install()
        sglang_prompts.install()
        salt = settings.security.namespace_salt.get_secret_value()
        self.store: Store | None = open_block_store(
            live, namespace or partial(self._identify, salt), native=True
        )
        attach(self.store, self.published.facts)
        sglang_exit.at_exit(self)

    def _identify(self, salt: str) -> Namespace:
        """Name the namespace; on a thread of the store, since weights are read."""
        found = find_namespace(_rank(self._name), salt, self._stopping.is_set, _numbers())
        _log.info(
            "LifeboatCache: namespace %s for %s",
            found.hex[:12],
            found.display.get("model", "this model"),
        )
        return found

    def _weights_changed(self, what: str) -> None:
        store, self.store = self.store, None
        if store is None:
            return
        _log.warning(
            "LifeboatCache: weights may have changed (%s); nothing is stored and stored KV is not "
            "used from here on: restart the server to use it again",
            what,
        )
        threading.Thread(
            target=store.close, args=(30.0,), name="lifeboat-retire", daemon=True
        ).start()

    def finish(self, timeout: float) -> None:
        """Let what is under way arrive, within some seconds. Idempotent."""
        self._stopping.set()
        sglang_epoch.forget(self._weights_changed)
        store, self.store = self.store, None
        if store is not None:
            store.close(timeout)


def _rank(name: str) -> Any:
    """What the identity of a rank is made from; SGLang's MLX backend has one rank."""
    return SimpleNamespace(
        model_name=name, is_mla_model=False, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1,
        attn_cp_rank=0, attn_cp_size=1,
    )  # fmt: skip


def _numbers() -> Mapping[str, Any]:
    """Who computes KV here: the model's code is mlx-lm's, its kernels are MLX's."""
    import mlx.core as mx
    import mlx_lm

    return {
        "mlx": {
            "mlx": _minor(str(mx.__version__)),
            "mlx_lm": _minor(str(mlx_lm.__version__)),
            "device": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
        }
    }


def _minor(version: str) -> str:
    """Major and minor of a release; the whole of a development build."""
    parts = version.split(".")
    return ".".join(parts[:2]) if len(parts) == 3 and parts[2].isdecimal() else version

"""LoRA adapters: their content enters the hashes of their requests' pages.

SGLang begins a request's chain of page hashes with its extra key, to which it adds the
id of the adapter: a hash of name and path for adapters of the launch, which other
content leaves as it is, and a random number for those that are loaded later. Here the
id is replaced by the adapter's content, so that the same adapter is found again after a
restart, under whatever name, and another one never is. SGLang's own tree uses the same key.

The ranks of an engine must come to the same tree, so nothing here depends on time: an
adapter is fingerprinted by the call that loads it, on every rank. Ranks on several hosts
read files of their own and keep SGLang's id beside the content.

Where the content cannot be had (an adapter made of tensors, files that changed meanwhile),
pages are not stored, and the id gets a random addition in this process.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from lifeboat_cache.identity import (
    adapter_files,
    adapter_identity,
    jsonable,
    process_start_time,
    resolve_model_dir,
    stamps_of,
)

__all__ = ["Adapters", "adapters", "hook_problem", "install"]

_log = logging.getLogger("lifeboat_cache")
_MARK = "_lifeboat_lora"
_CONTEXT = "lifeboatcache 2026 sglang adapter v1"

#: In the extra key of requests whose adapter's content is known, and is not.
_KNOWN, _UNKNOWN = "lifeboat-adapter:", "lifeboat-unknown-adapter:"

#: How an engine applies adapters.
_SETTINGS = ("experts_shared_outer_loras", "lora_target_modules", "lora_use_virtual_experts")


class Adapters:
    """What is known of the adapters of this process.

    Parameters
    ----------
    identify
        What fingerprints an adapter's directory.
    """

    def __init__(self, identify: Callable[..., Any] = adapter_identity) -> None:
        self._identify = identify
        self._content: dict[str, str | None] = {}  # by SGLang's id
        self._lock = threading.Lock()
        self._nonce = uuid.uuid4().hex
        self.keeps_ids = False
        self.settings = b""

    def look(
        self, lora_id: str, name: str, path: str, *, not_after: float | None
    ) -> Callable[[], None]:
        """Fingerprint an adapter before it is loaded.

        Parameters
        ----------
        lora_id, name, path
            As in SGLang's ``LoRARef``.
        not_after
            Files that changed later may not be what the engine holds.

        Returns
        -------
        callable
            To be called after it was loaded: looks whether its files are still the same.
        """
        try:
            directory = resolve_model_dir(path)
            config, weights, _ = adapter_files(directory)
            found = self._identify(directory, not_after=not_after)
        except Exception as exc:
            self.unknown(lora_id, name, str(exc))
            return lambda: None
        content = blake3(bytes.fromhex(found.digest) + self.settings, derive_key_context=_CONTEXT)
        with self._lock:
            self._content[lora_id] = content.hexdigest()

        def confirm() -> None:
            try:
                same = stamps_of((config, weights)) == found.stamps
            except OSError:
                same = False
            if not same:
                self.unknown(lora_id, name, "its files changed while it was loaded")

        return confirm

    def unknown(self, lora_id: str, name: str, why: str) -> None:
        """Say that an adapter's content cannot be had."""
        with self._lock:
            self._content[lora_id] = None
        _log.warning(
            "LifeboatCache: KV of adapter %r is not kept: %s; load it from files of its own",
            name,
            why,
        )

    def knows(self, lora_id: str) -> bool:
        """Whether an adapter was looked at."""
        return lora_id in self._content

    def extra_key(self, extra_key: str, lora_id: str) -> str:
        """The extra key of a request with an adapter.

        Parameters
        ----------
        extra_key
            As SGLang has made it: it ends in the adapter's id.
        lora_id
            The id.
        """
        base = extra_key.removesuffix(lora_id)
        with self._lock:
            content = self._content.get(lora_id)
        if content is None:
            return f"{base}{lora_id}{_UNKNOWN}{self._nonce}"
        return f"{base}{lora_id if self.keeps_ids else ''}{_KNOWN}{content}"

    @staticmethod
    def may_store(extra_key: str | None) -> bool:
        """Whether pages under an extra key may be kept."""
        return extra_key is None or _UNKNOWN not in extra_key


adapters = Adapters()

_hook_problem: str | None = None


def hook_problem() -> str | None:
    """Why adapters cannot be followed in this process, ending in the remedy."""
    return _hook_problem


def install(resolved: dict[str, Any]) -> None:
    """Follow the adapters of this process, if its engine serves any. Idempotent.

    Parameters
    ----------
    resolved
        Every field of SGLang's ``ServerArgs`` after resolution.
    """
    global _hook_problem
    if not (resolved.get("enable_lora") or resolved.get("lora_paths")):
        return
    try:
        adapters.keeps_ids = int(resolved.get("nnodes") or 1) > 1
        adapters.settings = json.dumps(
            {name: jsonable(resolved.get(name), name) for name in _SETTINGS}, sort_keys=True
        ).encode()
        _hook_loading()
        _hook_storing()
        _hook_requests()
        for ref in _launched():
            if not adapters.knows(ref.lora_id):  # loaded before this was installed
                adapters.look(
                    ref.lora_id,
                    str(ref.lora_name),
                    str(ref.lora_path),
                    not_after=process_start_time(),
                )()
    except Exception as exc:
        _hook_problem = (
            f"adapters of this SGLang cannot be followed ({exc}): serve adapters with a tested "
            "version, or without LifeboatCache"
        )
        _log.warning("LifeboatCache: %s", _hook_problem)


def _launched() -> list[Any]:
    """The adapters of the launch."""
    from sglang.srt.runtime_context import get_lora

    paths = get_lora().lora_paths
    return [ref for ref in paths or () if hasattr(ref, "lora_id")]


def _hook_loading() -> None:
    from sglang.srt.lora.lora_manager import LoRAManager

    load = LoRAManager._load_lora_adapter
    if not hasattr(load, _MARK):

        @functools.wraps(load)
        def load_lora_adapter(self: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> Any:
            confirm = adapters.look(
                lora_ref.lora_id,
                str(lora_ref.lora_name),
                str(lora_ref.lora_path),
                not_after=time.time(),
            )
            try:
                return load(self, lora_ref, *args, **kwargs)
            finally:
                confirm()

        setattr(load_lora_adapter, _MARK, True)
        LoRAManager._load_lora_adapter = load_lora_adapter
    made = LoRAManager.load_lora_adapter_from_tensors
    if not hasattr(made, _MARK):

        @functools.wraps(made)
        def from_tensors(self: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> Any:
            adapters.unknown(lora_ref.lora_id, str(lora_ref.lora_name), "it is made of tensors")
            return made(self, lora_ref, *args, **kwargs)

        setattr(from_tensors, _MARK, True)
        LoRAManager.load_lora_adapter_from_tensors = from_tensors


def _hook_requests() -> None:
    from sglang.srt.managers.schedule_batch import Req

    original = Req.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        lora_id = getattr(self, "lora_id", None)
        if lora_id is not None and isinstance(self.extra_key, str):
            self.extra_key = adapters.extra_key(self.extra_key, lora_id)

    setattr(init, _MARK, True)
    Req.__init__ = init


def _hook_storing() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    original = UnifiedRadixCache.write_backup_storage
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def write_backup_storage(self: Any, node_id: Any, *args: Any, **kwargs: Any) -> Any:
        extra_key, _ = self.tree_core.prefetch_anchor_info(node_id)
        if not Adapters.may_store(extra_key):
            return None
        return original(self, node_id, *args, **kwargs)

    setattr(write_backup_storage, _MARK, True)
    UnifiedRadixCache.write_backup_storage = write_backup_storage

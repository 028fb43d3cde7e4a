"""The store of one model's KV in an LMCache server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.identity import FileStamp, WeightsIdentity, stamp
from lifeboat_cache.integrations.lmcache_identity import find_namespace, read_tag, weights_path
from lifeboat_cache.integrations.lmcache_keys import (
    NAMES_GROUP,
    aligned,
    object_blocks,
    read_names,
)
from lifeboat_cache.integrations.lmcache_layout import ObjectLayout, ObjectLayouts
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    Namespace,
    Outcome,
    State,
    Store,
    open_block_store,
)
from lifeboat_cache.registry import attach

__all__ = ["ModelSpace"]

_log = logging.getLogger("lifeboat_cache")

#: So many blocks of names are read at a time.
_NAMES_AT_ONCE = 256

#: Larger ones are not ours.
_MOST_NAMES_BYTES = 16 << 20


class _Facts:
    """What is published of a space. Must not refer to the store."""

    def __init__(self, model: str, version: str) -> None:
        self._model, self._version = model, version
        self.served_tokens = 0

    def __call__(self) -> dict[str, Any]:
        return {
            "engine": "lmcache",
            "version": self._version,
            "model": self._model,
            "served_tokens": self.served_tokens,
        }


class ModelSpace:
    """A block store, and what the adapter knows of the model whose KV it holds.

    Parameters
    ----------
    config
        The configuration, followed while the store is open.
    model_name
        As in LMCache's keys.
    world_size
        Shards of the KV.
    version
        Of LMCache.
    pending_bytes
        Bound of bytes that wait to be written.
    """

    def __init__(
        self,
        config: LiveConfig,
        model_name: str,
        world_size: int,
        version: str,
        pending_bytes: int,
    ) -> None:
        self.model_name = model_name
        self.world_size = world_size
        plain, tag = read_tag(model_name)
        self.layouts = ObjectLayouts(latent=tag is not None and not tag.recurrent)
        self.facts = _Facts(plain, version)
        self.named = False  # whether names were looked for since the start
        self._version = version
        self._salt = config.config.security.namespace_salt.get_secret_value()
        self._stopping = threading.Event()
        self._weights: tuple[Path, WeightsIdentity] | None = None
        self._described: set[bytes] = set()
        self.store: Store = open_block_store(config, self._identify, pending_bytes=pending_bytes)
        attach(self.store, self.facts)

    def _identify(self) -> Namespace:
        """On a thread of the store, since weights may be read."""
        namespace, weights = find_namespace(
            self.model_name, self.world_size, self._salt, self._version, self._stopping.is_set
        )
        by = namespace.identity["model"]["by"]
        if weights is not None:
            path = weights_path(self.model_name)
            # If they have gone just now, that is seen at the next look.
            self._weights = (path or Path(self.model_name), weights)
        if by == "name":
            _log.warning(
                "LifeboatCache: the weights of %s are not on this host, so its KV is told apart by "
                "that name only: use LifeboatConnector in vLLM, or give another name to other "
                "weights",
                self.model_name,
            )
        _log.info(
            "LifeboatCache: namespace %s for %s (%d shards)",
            namespace.hex[:12],
            namespace.display.get("model", ""),
            self.world_size,
        )
        return namespace

    def layouts_of(self, objects: Sequence[Any]) -> list[ObjectLayout]:
        """The layouts of objects of LMCache's, made known to the store.

        Raises
        ------
        ValueError
            If what it says of one cannot be.
        """
        layouts = [self.layouts.of_object(one) for one in objects]
        for layout in {layout.signature: layout for layout in layouts}.values():
            self.describe(layout)
        return layouts

    def describe(self, layout: ObjectLayout) -> None:
        """Make the layout of objects known to the store."""
        if layout.signature not in self._described:
            for part in layout.parts:
                self.store.describe(part)
            self._described.add(layout.signature)

    def changed(self) -> bool:
        """Whether the weights that were fingerprinted are others now. Looks at files."""
        known = self._weights
        if known is None:
            return False
        path, weights = known
        # The name of a model in the Hub cache may lead to another directory now.
        if weights_path(self.model_name) != path:
            return True
        directory = path if path.is_dir() else path.parent
        found: list[FileStamp] = []
        try:
            found += [stamp(directory / name) for name in weights.files]
        except OSError:
            return True
        return tuple(found) != weights.stamps

    def names(self) -> list[tuple[ObjectKey, ObjectLayout]]:
        """Names of the objects that are there. Reads from storage: it may wait.

        Raises
        ------
        StoreClosedError
            If the store is closed meanwhile.
        """
        keys = self.store.keys(group=NAMES_GROUP)
        sizes = self.store.sizes(keys)
        wanted = [
            (key, size)
            for key, size in zip(keys, sizes.tolist(), strict=True)
            if 0 < size <= _MOST_NAMES_BYTES
        ]
        found: dict[ObjectKey, ObjectLayout] = {}
        for first in range(0, len(wanted), _NAMES_AT_ONCE):
            self._read(wanted[first : first + _NAMES_AT_ONCE], found)
            if self._stopping.is_set():
                break
        return self._present(list(found.items()))

    def _read(self, blocks: Sequence[tuple[bytes, int]], found: dict[ObjectKey, Any]) -> None:
        memory = [aligned(size) for _, size in blocks]
        keys = [key for key, _ in blocks]
        job = self.store.load(BlockBatch(keys, BlockBuffers.from_buffers(memory)), lambda _: None)
        while not job.wait(0.2):
            if self.store.state is State.CLOSED:
                return
        for block, outcome in zip(memory, job.outcomes.tolist(), strict=True):
            if outcome != Outcome.OK:
                continue
            try:
                found.update(read_names(block, self.model_name, self.layouts))
            except ValueError as exc:
                _log.info("LifeboatCache: a list of names is left aside: %s", exc)
        self.store.touch(keys)

    def _present(
        self, named: list[tuple[ObjectKey, ObjectLayout]]
    ) -> list[tuple[ObjectKey, ObjectLayout]]:
        """Those of which every part is still there."""
        there = self.present([key for key, _ in named], [layout for _, layout in named])
        return [pair for pair, good in zip(named, there, strict=True) if good]

    def present(self, keys: Sequence[ObjectKey], layouts: Sequence[ObjectLayout]) -> list[bool]:
        """Which objects are there with all their parts; answered from memory."""
        blocks = self.blocks(keys, layouts)
        flat = [block for parts in blocks for block in parts]
        sizes = iter((self.store.sizes(flat) >= 0).tolist())
        # A list, so that every part is taken from the iterator.
        return [all([next(sizes) for _ in parts]) for parts in blocks]

    def blocks(
        self, keys: Sequence[ObjectKey], layouts: Sequence[ObjectLayout]
    ) -> list[list[bytes]]:
        """The block keys of objects, a list for each."""
        out: list[list[bytes]] = [[] for _ in keys]
        rows: dict[bytes, list[int]] = {}
        for number, layout in enumerate(layouts):
            rows.setdefault(layout.signature, []).append(number)
        for numbers in rows.values():
            found = object_blocks([keys[n] for n in numbers], layouts[numbers[0]])
            for number, blocks in zip(numbers, found, strict=True):
                out[number] = blocks
        return out

    def served(self, keys: Sequence[ObjectKey], layouts: Sequence[ObjectLayout]) -> None:
        """Count the tokens of loaded objects; all groups and ranks of a chunk hold the same."""
        chunks = {
            (key.chunk_hash, key.cache_salt): layout.tokens
            for key, layout in zip(keys, layouts, strict=True)
        }
        self.facts.served_tokens += sum(chunks.values())

    def stop(self) -> None:
        """End what the store may still be finding out about the model."""
        self._stopping.set()

    def close(self, timeout: float) -> bool:
        """Finish what is queued; whether no I/O touches the callers' memory any more."""
        self.stop()
        return self.store.close(timeout)

    def status(self) -> dict[str, Any]:
        """What the adapter reports of it."""
        store = self.store
        namespace = store.namespace
        return {
            "model_name": self.model_name,
            "world_size": self.world_size,
            "state": store.state.value,
            "reason": store.reason,
            "namespace": namespace.hex[:32] if namespace is not None else None,
            "blocks": len(store),
            **store.queue(),
        }

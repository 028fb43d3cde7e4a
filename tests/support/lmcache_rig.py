"""Drives adapters with LMCache's real keys, objects and event descriptors."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config  # noqa: F401
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.platform import consume_fd

__all__ = ["PLUGIN", "Driver", "Listener", "Memory", "desc", "keys", "plugin"]

PLUGIN = {
    "type": "plugin",
    "module_path": "lifeboat_cache.integrations.lmcache_adapter",
    "class_name": "LifeboatL2Adapter",
}

MODEL = "tests/no-such-model"


def desc(*shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    """The layout of objects with some shapes."""
    return MemoryLayoutDesc(
        shapes=[torch.Size(shape) for shape in shapes], dtypes=[dtype] * len(shapes)
    )


def keys(
    count: int,
    *,
    seed: str = "",
    model: str = MODEL,
    world: int = 1,
    rank: int = 0,
    group: int = 0,
    salt: str = "",
) -> list[ObjectKey]:
    """Keys of the chunks of one prompt."""
    from blake3 import blake3

    return [
        ObjectKey(
            chunk_hash=blake3(f"{seed} {number}".encode()).digest(),
            model_name=model,
            kv_rank=ObjectKey.ComputeKVRank(world, rank, world, rank),
            object_group_id=group,
            cache_salt=salt,
        )
        for number in range(count)
    ]


class Memory:
    """LMCache's first tier, in memory of its own."""

    def __init__(self, size: int = 256 << 20) -> None:
        self.manager = L1Manager(
            L1ManagerConfig(
                memory_config=L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
            )
        )
        self._number = 0
        self._held: list[tuple[list[ObjectKey], str]] = []

    def objects(self, of: Sequence[ObjectKey], layout: MemoryLayoutDesc) -> list[Any]:
        """Objects that hold zeros."""
        self._number += 1
        tag = f"rig-{self._number}"
        found = self.manager.reserve_write(list(of), [True] * len(of), layout, tag=tag)
        self._held.append((list(of), tag))
        out = [found[key][1] for key in of]
        assert all(one is not None for one in out), "LMCache's memory is too small for this test"
        for one in out:
            raw(one).zero_()
        return out

    def filled(self, of: Sequence[ObjectKey], layout: MemoryLayoutDesc, seed: int = 0) -> list[Any]:
        """Objects that hold numbers as KV does, different ones each."""
        out = self.objects(of, layout)
        generator = torch.Generator().manual_seed(seed)
        for one in out:
            at = 0
            for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
                values = torch.randn(shape, generator=generator)
                part = (
                    (values * 40).to(torch.int8).view(torch.uint8)
                    if dtype in (torch.uint8, torch.int8)
                    else values.to(dtype)
                )
                flat = part.contiguous().view(torch.uint8).flatten()
                raw(one)[at : at + flat.numel()] = flat
                at += flat.numel()
        return out

    def free(self) -> None:
        """Give all objects back."""
        for held, tag in self._held:
            self.manager.finish_write_and_delete(held, tag=tag)
        self._held = []

    def close(self) -> None:
        """Free all of it."""
        self.manager.close()


def raw(one: Any) -> torch.Tensor:
    """The bytes of an object (uint8, 1-D)."""
    found: torch.Tensor = one.raw_tensor.view(torch.uint8).flatten()[: one.get_size()]
    return found


class Listener(L2AdapterListener):  # type: ignore[misc]
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stored: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


def plugin(memory: Memory | None = None, **params: Any) -> L2AdapterInterface:
    """Our adapter, made as an LMCache server makes it."""
    config = PluginL2AdapterConfig.from_dict({**PLUGIN, "adapter_params": params})
    described = memory.manager.get_l1_memory_desc() if memory is not None else None
    return create_l2_adapter_from_registry(config, described)


class Driver:
    """Calls an adapter as LMCache's controllers do: submit, wait for the descriptor, ask."""

    def __init__(self, adapter: L2AdapterInterface, timeout: float = 60.0) -> None:
        self.adapter = adapter
        self._timeout = timeout
        self._stores: dict[int, Any] = {}

    def wait(self, fd: int, ask: Callable[[], Any]) -> Any:
        """Wait until a descriptor is signalled and its result is there."""
        end = time.monotonic() + self._timeout
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while time.monotonic() < end:
            if poller.poll(200):
                consume_fd(fd)
                answer = ask()
                if answer is not None:
                    return answer
        raise TimeoutError("the adapter does not signal a result")

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        """Store and wait; the result."""
        return self.stored(self.adapter.submit_store_task(keys, objects))

    def stored(self, task: int) -> Any:
        """Wait for the result of a store."""

        def ask() -> Any:
            self._stores.update(self.adapter.pop_completed_store_tasks())
            return self._stores.pop(task, None)

        early = self._stores.pop(task, None)
        return early if early is not None else self.wait(self.adapter.get_store_event_fd(), ask)

    def lookup(
        self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc], *, unlock: bool = True
    ) -> list[int]:
        """Look up; the numbers of the keys that are there."""
        adapter = self.adapter
        task = adapter.submit_lookup_and_lock_task(keys, layouts)
        found: list[int] = self.wait(
            adapter.get_lookup_and_lock_event_fd(),
            lambda: adapter.query_lookup_and_lock_result(task),
        ).get_indices_list()
        if unlock:
            adapter.submit_unlock([keys[number] for number in found])
        return found

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[int]:
        """Load and wait; the numbers of the keys that were loaded."""
        task = self.adapter.submit_load_task(keys, objects)
        found: list[int] = self.loaded(task).get_indices_list()
        return found

    def loaded(self, task: int) -> Any:
        """Wait for the result of a load."""
        early = self.adapter.query_load_result(task)
        if early is not None:
            return early
        fd = self.adapter.get_load_event_fd()
        return self.wait(fd, lambda: self.adapter.query_load_result(task))

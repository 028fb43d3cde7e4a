"""``lifeboat-cache selftest lmcache``: the canary to run after every upgrade of LMCache.

Makes the adapter as an LMCache server does, stores and restores objects of LMCache's own
memory, and compares bytes. No server is started.
"""

from __future__ import annotations

import argparse
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifeboat_cache.integrations.lmcache_arguments import ADAPTER
from lifeboat_cache.integrations.lmcache_versions import lmcache_version, refuse
from lifeboat_cache.selftest import Report, Step
from lifeboat_cache.selftest.place import KeptLog, run_trial

__all__ = ["run"]

_COUNT = 4
_SHAPE = (2, 4, 64, 128)
_WAIT_S = 60.0
_REMEDY = "Do not use LifeboatCache with this LMCache; report this with both versions."


def run(args: argparse.Namespace) -> Report:
    """Run the self-test.

    Parameters
    ----------
    args
        ``config`` and ``keep`` are looked at.
    """
    # Bytes are compared here, so they must not be stored in fewer.
    return run_trial(args, _SelfTest, engine="LMCache", module="lmcache", exactly=True)


class _SelfTest:
    """The steps, each of which needs the ones before."""

    def __init__(self, scratch: Path, log: KeptLog) -> None:
        self._log = log
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {"lmcache": lmcache_version()}
        self._config = scratch / "lifeboat.yaml"
        self._adapter: Any = None
        self._memory: Any = None
        self._stored: list[Any] = []

    def run(self) -> None:
        """Run all steps, up to the first that fails."""
        steps: list[tuple[str, Callable[[], str]]] = [
            ("version", self._version),
            ("interface", self._interface),
            ("store", self._store),
            ("restart", self._restart),
            ("layout", self._layout),
        ]
        try:
            for name, work in steps:
                try:
                    self.steps.append(Step(name, "ok", work()))
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                    lines = tuple(self._log.lines)
                    self.steps.append(Step(name, "failed", text, _REMEDY, lines))
                    return
        finally:
            if self._adapter is not None:
                self._adapter.close()

    def _version(self) -> str:
        refuse()
        return f"LMCache {lmcache_version()} is one that the adapter was tested with"

    def _interface(self) -> str:
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        self._memory = L1Manager(L1ManagerConfig(memory_config=memory))
        self._adapter = self._make()
        adapter = self._adapter
        fds = {
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        }
        if len(fds) != 3:
            raise RuntimeError("the three descriptors are not three")
        return "LMCache makes the adapter as a plugin"

    def _make(self) -> Any:
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        described = {**ADAPTER, "adapter_params": {"config": str(self._config)}}
        config = PluginL2AdapterConfig.from_dict(described)
        return create_l2_adapter_from_registry(config, self._memory.get_l1_memory_desc())

    def _store(self) -> str:
        self._stored = self._objects("store")
        for number, one in enumerate(self._stored):
            one.raw_tensor.view(-1)[:] = number + 1
        adapter = self._adapter
        task = adapter.submit_store_task(_keys(), self._stored)
        done = _wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
        if not done[task].is_successful():
            raise RuntimeError("the store failed")
        return f"{_COUNT} objects are stored"

    def _restart(self) -> str:
        import torch

        self._adapter.close()
        self._adapter = adapter = self._make()
        found = self._look_up(_desc(_SHAPE))
        if found != list(range(_COUNT)):
            raise RuntimeError(f"of {_COUNT} objects {found} are there")
        loaded = self._objects("restart")
        task = adapter.submit_load_task(_keys(), loaded)
        good = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        adapter.submit_unlock(_keys())
        if good.popcount() != _COUNT:
            raise RuntimeError(f"of {_COUNT} objects {good.popcount()} were loaded")
        pairs = zip(self._stored, loaded, strict=True)
        if not all(torch.equal(one.raw_tensor, other.raw_tensor) for one, other in pairs):
            raise RuntimeError("wrong bytes came back")
        return "another adapter finds and loads them, byte for byte"

    def _layout(self) -> str:
        found = self._look_up(_desc((2, 4, 32, 256)))
        if found:
            raise RuntimeError("objects of another layout are found")
        return "who expects another layout finds nothing"

    def _objects(self, tag: str) -> list[Any]:
        keys = _keys()
        made = self._memory.reserve_write(keys, [True] * _COUNT, _desc(_SHAPE), tag=tag)
        return [made[key][1] for key in keys]

    def _look_up(self, layout: Any) -> list[int]:
        adapter = self._adapter
        task = adapter.submit_lookup_and_lock_task(_keys(), {0: layout})
        fd = adapter.get_lookup_and_lock_event_fd()
        answer = _wait(fd, lambda: adapter.query_lookup_and_lock_result(task))
        return list(answer.get_indices_list())


def _keys() -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey(bytes([number]) * 32, "lifeboat-selftest", rank) for number in range(_COUNT)]


def _desc(shape: tuple[int, ...]) -> Any:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[torch.bfloat16])


def _wait(fd: int, ask: Callable[[], Any]) -> Any:
    """Wait until a descriptor is signalled and its result is there."""
    from lmcache.v1.platform import consume_fd

    end = time.monotonic() + _WAIT_S
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while time.monotonic() < end:
        if poller.poll(200):
            consume_fd(fd)
            answer = ask()
            if answer is not None:
                return answer
    raise TimeoutError("the adapter does not signal a result")

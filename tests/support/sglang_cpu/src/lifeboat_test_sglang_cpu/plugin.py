"""The ``sglang.srt.plugins`` entry point that makes host pools work without an accelerator.

SGLang pins the memory of its host pools with CUDA and copies between device and host
with compiled kernels. Radix tree, cache controller, host pools and storage are the same
code as on a GPU, so with plain memory and plain copies in their place tests exercise
all of them.
"""

import importlib
import os
from typing import Any

__all__ = ["register"]

_registered = False


def register() -> None:
    """Patch this process; does nothing off the CPU engine or the second time."""
    global _registered
    if _registered or os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    _registered = True
    if os.environ.get("SGLANG_USE_MLX") == "1":
        _allow_mlx()
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    from lifeboat_test_sglang_cpu import copies

    common._cuda_host_register = lambda *_args, **_kwargs: None
    for module in (mha, mla, mamba):
        for name in copies.__all__:
            setattr(module, name, getattr(copies, name))
    for pool in (mha.MHATokenToKVPoolHost, mla.MLATokenToKVPoolHost, mamba.MambaPoolHost):
        _never_pin(pool)
    # SGLang keeps 10 GiB of memory free, which a small machine does not have at all.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    _allow_activation()


def _allow_mlx() -> None:
    """Let SGLang's MLX backend run with MLX's CPU build: it asks for Metal, and needs it not.

    The scheduler has its overlapped loop for MLX on macOS only; it is the same code here.
    """
    from sglang.srt.hardware_backend.mlx import runtime

    runtime._validate_runtime = lambda: None
    from sglang.srt.hardware_backend.mlx.scheduler_mixin import SchedulerMlxOverlapMixin
    from sglang.srt.managers import scheduler

    for name, value in vars(SchedulerMlxOverlapMixin).items():
        if not name.startswith("__"):
            setattr(scheduler.SchedulerMlxOverlapMixin, name, value)


def _allow_activation() -> None:
    """Tell the adapter under test, where it is installed, that the host pools work here."""
    try:
        adapter = importlib.import_module("lifeboat_cache.integrations.sglang_plugin")
    except ImportError:
        return
    adapter.set_platform_check(lambda _launch: True)


def _never_pin(pool: Any) -> None:
    build = pool.__init__

    def build_unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **{**kwargs, "pin_memory": False})

    pool.__init__ = build_unpinned

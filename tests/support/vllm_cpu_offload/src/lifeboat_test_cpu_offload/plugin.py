"""The ``vllm.general_plugins`` entry point that opens offloading on the CPU platform.

vLLM refuses to offload on its CPU platform, only because the copy between
accelerator and host is not built there. Scheduler, tiering manager, shared
region and tiers are the same code as on a GPU, so with a plain copy in place
of the missing one, tests without a GPU exercise all of them.
"""

import importlib
from typing import Any

__all__ = ["register"]

_registered = False


def register() -> None:
    """Patch this process; does nothing on other platforms or the second time."""
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_cpu():
        return
    _registered = True
    _avoid_amx_attention()
    _allow_offloading()
    _allow_activation()


def _avoid_amx_attention() -> None:
    """Replace the AMX attention kernel, which computes wrong text in bfloat16."""
    from vllm.v1.attention.backends import cpu_attn

    choose = cpu_attn._get_attn_isa

    def choose_right(*args: Any, **kwargs: Any) -> str:
        isa: str = choose(*args, **kwargs)
        return "vec" if isa == "amx" else isa

    cpu_attn._get_attn_isa = choose_right


def _allow_offloading() -> None:
    """Drop the platform check and copy with the CPU."""
    from vllm.v1.kv_offload.cpu import spec as cpu_spec
    from vllm.v1.kv_offload.tiering import spec as tiering_spec

    from lifeboat_test_cpu_offload.host_worker import HostCopyWorker

    def get_worker(self: Any, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    cpu_spec.CPUOffloadingSpec.get_worker = get_worker
    tiering_spec.CPUOffloadingWorker = HostCopyWorker


def _allow_activation() -> None:
    """Tell the adapter under test, where it is installed, that offloading works here."""
    try:
        adapter = importlib.import_module("lifeboat_cache.integrations.vllm_plugin")
    except ImportError:
        return
    adapter.set_platform_check(lambda: True)

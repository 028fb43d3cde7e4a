"""The second process of ``lifeboat-cache selftest vllm``.

``python -m lifeboat_cache.integrations.vllm_selftest_child DIRECTORY SEED`` installs the
plugin's hooks as an engine process does, restores the prompt of ``SEED`` and leaves what
it got in the directory: ``restored.json`` and, chunk after chunk, ``restored.bin``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lifeboat_cache.integrations.vllm_selftest_engine import (
    CHUNKS,
    PretendedEngine,
    offload_keys,
    shared_memory_of,
)

__all__ = ["RequestLike", "main"]


class RequestLike:
    """What stands for vLLM's ``Request``; what is not set is ``None``."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _install_hooks() -> list[str]:
    """Register as vLLM does; a line for each hook that did not take."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    import lifeboat_vllm_entry
    from lifeboat_cache.integrations import vllm_epoch, vllm_lora, vllm_plugin

    lifeboat_vllm_entry.register()
    vllm_lora.install()
    vllm_epoch.install()
    problems = []
    if not vllm_plugin.registered():
        problems.append("the plugin did not register")
    hooks = {
        "KVConnectorFactory.create_connector": KVConnectorFactory.create_connector,
        "EngineArgs.create_engine_config": EngineArgs.create_engine_config,
        "scheduler._create_req_context": getattr(scheduler, "_create_req_context", None),
        "EngineCore.add_lora": getattr(EngineCore, "add_lora", None),
        **{f"EngineCore.{name}": getattr(EngineCore, name, None) for name in vllm_epoch.WATCHED},
    }
    for name, function in hooks.items():
        marks = getattr(getattr(function, "__func__", function), "__dict__", {})
        if not any(mark.startswith("_lifeboat_") for mark in marks):
            problems.append(f"{name} is not watched")
    if vllm_lora.hook_problem() is not None:
        problems.append(f"LoRA adapters cannot be followed: {vllm_lora.hook_problem()}")
    else:
        context = scheduler._create_req_context(RequestLike(request_id="selftest"))
        if vllm_lora.watch().key_space(context) != b"":
            problems.append("a request's context does not carry its adapter")
    return problems


def main(directory: Path, seed: int) -> None:
    """Restore, and leave the result in ``directory``."""
    import vllm

    document: dict[str, Any] = {"version": str(vllm.__version__), "file": str(vllm.__file__)}
    try:
        document["hooks"] = _install_hooks()
    except Exception as error:
        document["hooks"] = [f"{type(error).__name__}: {error}"]
    with PretendedEngine(directory / "lifeboat.yaml") as engine:
        found = engine.restore(offload_keys(CHUNKS, seed=seed))
        document["state"] = engine.tier.state.name
    with (directory / "restored.bin").open("wb") as file:
        for chunk in found.chunks.values():
            file.write(chunk.tobytes())
    document["keys"] = [key.hex() for key in found.chunks]
    document["seconds"] = found.seconds
    document["jobs"] = engine.jobs.problems()
    document["shared_memory"] = [str(path) for path in shared_memory_of(directory)]
    (directory / "restored.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

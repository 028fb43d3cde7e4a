"""Test only: stands in for SGLang's compiled kernels, of which no CPU build is published.

Every name is there, and raises when it is called: SGLang imports many, but its
layers fall back to torch on a CPU.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

__path__ = [str(Path(__file__).parent)]

_MODULES = (
    "allreduce", "attention", "elementwise", "flash_attn", "flash_mla", "gemm", "grammar",
    "kvcacheio", "mamba", "memory", "moe", "quantization", "sampling", "sparse_flash_attn",
    "speculative", "top_k", "utils",
)  # fmt: skip


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*_args: Any, **_kwargs: Any) -> NoReturn:
        msg = f"{name} is a compiled kernel, and this test environment has none"
        raise NotImplementedError(msg)

    kernel.__name__ = name.rpartition(".")[2]
    return kernel


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


for _name in _MODULES:
    _module = _Module(f"{__name__}.{_name}")
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    globals()[_name] = _module


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"{__name__}.{name}")

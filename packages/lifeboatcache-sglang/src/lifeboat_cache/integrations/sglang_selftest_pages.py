"""SGLang's host pools and our backend, without an engine, for the self-test.

The pools are SGLang's classes with memory of our own: building them as a server does
would pin memory and compile kernels. What is asked of them, where a page lies and what
its flat copy is, is SGLang's code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lifeboat_cache.config import load_config
from lifeboat_cache.interface import Namespace

__all__ = [
    "LAYOUTS",
    "PAGES",
    "PAGE_BYTES",
    "content",
    "fill",
    "hashes",
    "main",
    "open_backend",
    "pool_of",
    "taken",
    "tokens_of",
]

#: Tokens, layers, heads and head size of a page.
_TOKENS, _LAYERS, _HEADS, _DIM = 16, 4, 2, 64

PAGES = 24
PAGE_BYTES = 2 * _TOKENS * _LAYERS * _HEADS * _DIM * 2

#: The layouts that are tried.
LAYOUTS = ("page_first", "page_first_direct", "layer_first")

_WAIT_S = 60.0


def tokens_of(pages: int) -> Any:
    """Indices of the first pages, as SGLang hands them over."""
    import torch

    return torch.arange(pages * _TOKENS, dtype=torch.int64)


def content(seed: int) -> Any:
    """What the pages hold: ``(pages, page bytes)``, uint8."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)


def hashes(seed: int) -> list[str]:
    """Page hashes as SGLang makes them: 64 hexadecimal digits."""
    return [f"{seed:032x}{page:032x}" for page in range(PAGES)]


def pool_of(layout: str, dtype: str = "bfloat16") -> Any:
    """A host pool of SGLang's with memory of our own."""
    import torch
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    size = (PAGES + 1) * _TOKENS
    shape = {
        "layer_first": (2, _LAYERS, size, _HEADS, _DIM),
        "page_first": (2, size, _LAYERS, _HEADS, _DIM),
        "page_first_direct": (2, PAGES + 1, _LAYERS, _TOKENS, _HEADS, _DIM),
    }[layout]
    pool = object.__new__(MHATokenToKVPoolHost)
    vars(pool).update(
        layout=layout,
        page_size=_TOKENS,
        page_num=PAGES + 1,
        size=size,
        layer_num=_LAYERS,
        head_num=_HEADS,
        head_dim=_DIM,
        v_head_dim=_DIM,
        start_layer=0,
        dtype=getattr(torch, dtype),
        device="cpu",
        pin_memory=False,
        size_per_token=PAGE_BYTES // _TOKENS,
        kv_buffer=torch.zeros(shape, dtype=getattr(torch, dtype)),
    )
    return pool


def fill(pool: Any, pages: Any) -> None:
    """Put pages into a pool, by SGLang's own way."""
    import torch

    for number, page in enumerate(pages):
        flat = torch.from_numpy(page.copy()).view(pool.dtype)
        pool.set_from_flat_data_page(number * _TOKENS, flat)


def taken(pool: Any, count: int) -> Any:
    """The first pages of a pool, by SGLang's own way: ``(count, page bytes)``, uint8."""
    import numpy as np
    import torch

    found = [
        pool.get_data_page(number * _TOKENS, flat=True).contiguous().view(torch.uint8).numpy()
        for number in range(count)
    ]
    return np.stack(found) if found else np.zeros((0, PAGE_BYTES), dtype=np.uint8)


def open_backend(config: Path, pool: Any) -> Any:
    """Our backend with a pool, as SGLang builds it, for a namespace of the self-test."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

    from lifeboat_cache.integrations.sglang_backend import LifeboatHiCacheStorage

    storage_config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first",
        model_name="selftest",
        extra_config={},
    )
    given = {
        "config": load_config(config).config,
        "namespace": Namespace.from_identity({"kind": "sglang-selftest"}, {"model": "selftest"}),
    }
    backend = LifeboatHiCacheStorage(storage_config, given)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.on_host_pools_registered()
    if backend.store is not None:
        backend.store.wait_recovered(_WAIT_S)
    return backend


def main(directory: Path, seed: int) -> None:
    """Restore every layout's pages, and leave what was found in ``directory``."""
    import numpy as np
    import sglang

    document: dict[str, Any] = {
        "version": str(sglang.__version__),
        "file": str(sglang.__file__),
        "loaded": {},
    }
    for number, layout in enumerate(LAYOUTS):
        pool = pool_of(layout)
        backend = open_backend(directory / "lifeboat.yaml", pool)
        got = backend.batch_get_v1(hashes(seed + number), tokens_of(PAGES))
        count = got.index(False) if False in got else len(got)
        document["loaded"][layout] = count
        np.save(directory / f"{layout}.npy", taken(pool, count), allow_pickle=False)
        document.setdefault("state", backend.state.name)
        backend.close()
    (directory / "restored.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

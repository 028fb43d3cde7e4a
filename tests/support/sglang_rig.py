"""SGLang's real cache controller and host pools, without a model and its scheduler.

The pools are filled with bytes that follow from a seed; from there everything is as in
a server: the controller's threads, its storage operations, its prefetch. Needs the
environment of SGLang on a CPU (``sglang_cpu``). A process is prepared once for one model
directory (:func:`prepare`); a :class:`Rig` is one attached backend.

Run as a program it reads a list of cases as JSON from its first argument, stores or
restores each, and writes the results to its second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

__all__ = ["BACKEND", "Case", "Restored", "Rig", "prepare"]

#: What ``--hicache-storage-backend-extra-config`` says of our backend.
BACKEND = {
    "backend_name": "lifeboat",
    "module_path": "lifeboat_cache.integrations.sglang_backend",
    "class_name": "LifeboatHiCacheStorage",
}

_PATIENCE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt of some pages, and the pools that hold it.

    Attributes
    ----------
    kind
        ``mha``, ``mla``, or ``asymmetric`` (K and V of different widths).
    layout
        SGLang's layout of the KV host pool.
    tokens, pages
        Per page, and in the prompt.
    layers, heads, dim
        Of the KV.
    dtype
        torch's name of the KV's elements.
    mamba
        Whether a Mamba state belongs to the prompt's last page.
    seed
        Of all content; also of the prompt.
    salt
        The requests' cache salt.
    zero_copy
        Which interface SGLang uses.
    rank, ranks
        Tensor-parallel rank as the backend is told.
    model_name
        What SGLang calls the model.
    """

    kind: str = "mha"
    layout: str = "page_first_direct"
    tokens: int = 64
    pages: int = 40
    layers: int = 4
    heads: int = 2
    dim: int = 64
    dtype: str = "bfloat16"
    mamba: bool = False
    seed: int = 7
    salt: str | None = None
    zero_copy: bool = True
    rank: int = 0
    ranks: int = 1
    model_name: str = "org/tiny"

    def but(self, **changes: Any) -> Case:
        """The same case but for some fields."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What came back.

    Attributes
    ----------
    hit_pages
        Pages that the backend said it can restore.
    loaded_pages
        Pages that it loaded.
    same
        Whether all of these, and the state if there is one, hold what was stored.
    state
        Whether the Mamba state was loaded.
    """

    hit_pages: int
    loaded_pages: int
    same: bool
    state: bool


def prepare(model: Path) -> None:
    """Make this process one that SGLang's controller works in, for a model directory."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import torch.distributed as dist
    from lifeboat_test_sglang_cpu.plugin import register
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    register()
    # Named, as SGLang would choose by what this CPU has.
    args = ServerArgs(model_path=str(model), device="cpu", attention_backend="torch_native")
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    if not dist.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


class Rig:
    """Host pools and a controller with a storage backend attached.

    Parameters
    ----------
    case
        What for.
    backend
        Extra configuration of the backend; ours by default.
    storage_backend
        SGLang's name of the backend.
    pools_of
        A closed rig whose pools are used again.
    """

    def __init__(
        self,
        case: Case,
        *,
        backend: Mapping[str, Any] = BACKEND,
        storage_backend: str = "dynamic",
        pools_of: Rig | None = None,
    ) -> None:
        import torch
        import torch.distributed as dist
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
            HybridCacheController,
        )
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

        self.case = case
        self.kv: Any = _kv_pool(case) if pools_of is None else pools_of.kv
        self.mamba: Any = None
        if case.mamba:
            self.mamba = _mamba_pool(case) if pools_of is None else pools_of.mamba
        base = MLATokenToKVPool if case.kind == "mla" else object

        class Device(base):  # type: ignore[misc, valid-type]
            device = torch.device("cpu")
            layer_num = case.layers

            def __init__(self) -> None:
                pass

            def register_layer_transfer_counter(self, _counter: Any) -> None:
                pass

        class Allocator:
            def get_kvcache(self) -> Any:
                return Device()

        entries = [
            PoolEntry(
                PoolName.KV, self.kv, Device(), lambda layer: layer, is_primary_index_anchor=True
            )
        ]
        if self.mamba is not None:
            entries.append(PoolEntry(PoolName.MAMBA, self.mamba, None, lambda layer: layer))
        extra = dict(backend)
        if not case.zero_copy:
            extra.setdefault("interface_v1", 0)
        original = HiCacheController._generate_storage_config

        def as_rank(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = original(self, *args, **kwargs)
            config.tp_rank, config.tp_size = case.rank, case.ranks
            return config

        HiCacheController._generate_storage_config = as_rank
        try:
            self.controller = HybridCacheController(
                Allocator(),
                HostPoolGroup(entries),
                case.tokens,
                dist.group.WORLD,
                threading.Event(),
                write_policy="write_through",
                io_backend="direct",
                storage_backend=storage_backend,
                prefetch_threshold=case.tokens,
                model_name=case.model_name,
                storage_backend_extra_config=extra,
                transfer_layer_id_max=case.layers,
            )
        finally:
            HiCacheController._generate_storage_config = original
        self.backend = self.controller.storage_backend
        inner = getattr(self.backend, "_backend", self.backend)
        #: Our backend; nothing of it may be asked where another is attached.
        self.ours: Any = inner if hasattr(inner, "moves") else None

    # The prompt ---------------------------------------------------------------

    def prompt(self) -> Any:
        """The prompt as SGLang keys it."""
        from array import array

        from sglang.srt.mem_cache.radix_cache import RadixKey

        case = self.case
        first = 1000 + 7919 * case.seed
        tokens = array("q", range(first, first + case.tokens * case.pages))
        return RadixKey(tokens, extra_key=None, cache_salt=case.salt)

    def hashes(self) -> list[str]:
        """SGLang's hashes of the prompt's pages."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        found: list[str] = get_storage_hash_str(self.prompt(), None, page_size=self.case.tokens)
        return found

    def ready(self) -> None:
        """Wait until our backend knows its model and what is stored."""
        if self.ours is None:
            return
        store = self.ours.store
        if store is not None:
            assert store.wait_recovered(_PATIENCE_S)

    # Storing and restoring ------------------------------------------------------

    def store(self, pages: int | None = None) -> int:
        """Fill the pools and store the prompt's first pages; returns how many were kept."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        case = self.case
        count = case.pages if pages is None else pages
        self.ready()
        indices = self.kv.alloc(count * case.tokens)
        _fill(self.kv, _starts(indices, case.tokens), case)
        hashes = self.hashes()[:count]
        extra = None
        state = None
        if self.mamba is not None:
            state = self.mamba.alloc(1)
            _fill_state(self.mamba, int(state[0]), case)
            extra = [
                PoolTransfer(
                    PoolName.MAMBA,
                    host_indices=state,
                    keys=[hashes[-1]],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            ]
        self.controller.write_storage(
            indices, self.prompt().token_ids[: count * case.tokens], hashes, None, extra_pools=extra
        )
        operation = self.controller.ack_backup_queue.get(timeout=_PATIENCE_S)
        self.kv.free(indices)
        if state is not None and self.mamba is not None:
            self.mamba.free(state)
        return int(operation.completed_tokens) // case.tokens

    def restore(self, *, content: Case | None = None) -> Restored:
        """Restore the prompt into emptied pools.

        Parameters
        ----------
        content
            The case whose content is expected; this rig's by default.
        """
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        case = self.case
        self.ready()
        _clear(self.kv)
        hashes = self.hashes()
        extra = None
        state = None
        if self.mamba is not None:
            _clear(self.mamba)
            state = self.mamba.alloc(1)
            extra = [
                PoolTransfer(
                    PoolName.MAMBA,
                    host_indices=state,
                    keys=[hashes[-1]],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            ]
        self.controller.prefetch(
            CacheRequestHandle(f"r{time.monotonic_ns()}", 0), self.prompt(), None, extra_pools=extra
        )
        operation = self.controller.prefetch_hit_queue.get(timeout=_PATIENCE_S)
        hits = int(operation.storage_hit_count)
        loaded = 0
        pools: dict[str, int] = {}
        indices = None
        if hits:
            indices = self.controller.alloc_prefetch_host_buffers(operation, hits)
            operation.host_indices = indices
            self.controller.prefetch_buffer.put(operation)
            while True:
                ack = self.controller.ack_prefetch_queue.get(timeout=_PATIENCE_S)
                loaded = ack.completed_tokens if ack.completed_tokens is not None else loaded
                pools = ack.pool_hits if ack.pool_hits is not None else pools
                if ack.completed_req:
                    break
        got = int(loaded or 0) // case.tokens
        wanted = content or case
        same = indices is None or _same(self.kv, _starts(indices, case.tokens)[:got], wanted)
        has_state = bool(pools.get("mamba"))
        if has_state and self.mamba is not None and state is not None:
            same = same and _same_state(self.mamba, int(state[0]), wanted)
        if indices is not None:
            self.kv.free(indices)
        if state is not None and self.mamba is not None:
            self.mamba.free(state)
        return Restored(hits // case.tokens, got, bool(same), has_state)

    def close(self) -> None:
        """Detach the backend, as SGLang does."""
        self.controller.detach_storage_backend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Pools ------------------------------------------------------------------------


def _kv_pool(case: Case) -> Any:
    """A host pool with room for the prompt and two pages."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.pool_host import mha, mla

    dtype = getattr(torch, case.dtype)
    slots = case.tokens * 2
    room = case.tokens * (case.pages + 2)
    common = {"start_layer": 0, "end_layer": case.layers, "host_token_capacity": room}

    def pointers(tensors: list[Any]) -> Any:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)

    if case.kind == "mla":
        rows = [torch.zeros(slots, 1, case.dim, dtype=dtype) for _ in range(case.layers)]
        info = MLABufferInfo(
            buffers=tuple(rows),
            data_ptrs=pointers(rows),
            layer_indices=tuple(range(case.layers)),
            device_layer_num=case.layers,
            page_size=case.tokens,
            kv_lora_rank=case.dim - 16,
            qk_rope_head_dim=16,
            kv_cache_dim=case.dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        return mla.MLATokenToKVPoolHost(
            info,
            2.0,
            0,
            case.tokens,
            case.layout,
            device_capacity_tokens=slots,
            target_layer_num=case.layers,
            **common,
        )
    wide = case.dim + 32 if case.kind == "asymmetric" else case.dim
    keys = [torch.zeros(slots, case.heads, case.dim, dtype=dtype) for _ in range(case.layers)]
    values = [torch.zeros(slots, case.heads, wide, dtype=dtype) for _ in range(case.layers)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(keys),
            v=tuple(values),
            k_data_ptrs=pointers(keys),
            v_data_ptrs=pointers(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=case.tokens,
        head_num=case.heads,
        head_dim=case.dim,
        v_head_dim=wide,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return mha.get_mha_host_pool_cls(info)(
        info, 2.0, 0, case.tokens, case.layout, device_capacity_tokens=slots, **common
    )


def _mamba_pool(case: Case) -> Any:
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host import mamba

    info = MambaStateBufferInfo(
        temporal=torch.zeros(3, 8, 4, 16, 16),
        conv=(torch.zeros(3, 8, 96, 3, dtype=torch.bfloat16),),
    )
    layout = case.layout if case.layout.startswith("page_first") else "page_first_direct"
    return mamba.MambaPoolHost(info, 2.0, 0, device_capacity=8, layout=layout)


def _starts(indices: Any, tokens: int) -> list[int]:
    return [int(one) for one in indices[::tokens]]


def _page(case: Case, number: int, part: int, width: int) -> Any:
    """What a page's K (part 0) or V holds: ``(layers, tokens, heads, width)`` bytes, as uint8."""
    import numpy as np
    import torch

    item = getattr(torch, case.dtype).itemsize
    heads = 1 if case.kind == "mla" else case.heads
    shape = (case.layers, case.tokens, heads, width * item)
    random = np.random.default_rng([case.seed, case.rank, number, part])
    return random.integers(0, 256, shape, dtype=np.uint8)


def _views(pool: Any, start: int, case: Case) -> list[Any]:
    """K and V of a page (or the latent) as writable uint8 ``(layers, tokens, heads, bytes)``."""
    import torch

    if case.kind == "mla":
        buffers = [pool.kv_buffer]
    elif case.kind == "asymmetric":
        buffers = [pool.k_buffer, pool.v_buffer]
    else:
        buffers = [pool.kv_buffer[0], pool.kv_buffer[1]]
    found = []
    for buffer in buffers:
        raw = buffer.view(torch.uint8)
        if case.layout == "layer_first":
            found.append(raw[:, start : start + case.tokens])
        elif case.layout == "page_first":
            found.append(raw[start : start + case.tokens].transpose(0, 1))
        elif case.layout == "page_first_direct":
            found.append(raw[start // case.tokens])
        elif case.layout == "page_head":
            found.append(raw[start // case.tokens].permute(2, 1, 0, 3))
        else:
            raise ValueError(case.layout)
    return found


def _fill(pool: Any, starts: list[int], case: Case) -> None:
    import torch

    for number, start in enumerate(starts):
        for part, view in enumerate(_views(pool, start, case)):
            item = getattr(torch, case.dtype).itemsize
            view.copy_(torch.from_numpy(_page(case, number, part, view.shape[-1] // item)))


def _same(pool: Any, starts: list[int], case: Case) -> bool:
    import numpy as np
    import torch

    item = getattr(torch, case.dtype).itemsize
    return all(
        np.array_equal(view.numpy(), _page(case, number, part, view.shape[-1] // item))
        for number, start in enumerate(starts)
        for part, view in enumerate(_views(pool, start, case))
    )


def _clear(pool: Any) -> None:
    import torch

    buffers = pool.kv_buffer
    for buffer in buffers if isinstance(buffers, (list, tuple)) else [buffers]:
        buffer.view(torch.uint8).zero_()


def _state_parts(pool: Any, slot: int) -> list[Any]:
    import torch

    return [part.view(torch.uint8) for part in pool._iter_page_tensors(slot)]


def _state(case: Case, part: int, shape: tuple[int, ...]) -> Any:
    import numpy as np

    random = np.random.default_rng([case.seed, case.rank, 10_000, part])
    return random.integers(0, 256, shape, dtype=np.uint8)


def _fill_state(pool: Any, slot: int, case: Case) -> None:
    import torch

    for part, view in enumerate(_state_parts(pool, slot)):
        view.copy_(torch.from_numpy(_state(case, part, tuple(view.shape))))


def _same_state(pool: Any, slot: int, case: Case) -> bool:
    import numpy as np

    return all(
        np.array_equal(view.numpy(), _state(case, part, tuple(view.shape)))
        for part, view in enumerate(_state_parts(pool, slot))
    )


def model_digest(model: Path) -> str:
    """A digest of a model directory's files, to see that a test has changed them."""
    found = hashlib.sha256()
    for path in sorted(model.iterdir()):
        found.update(path.read_bytes())
    return found.hexdigest()


def _main(cases: Path, results: Path) -> None:
    task = json.loads(cases.read_text())
    prepare(Path(task["model"]))
    found = []
    for one in task["cases"]:
        case = Case(**one)
        with Rig(case) as rig:
            if task["do"] == "store":
                found.append({"kept": rig.store(), "reason": rig.ours.reason if rig.ours else ""})
            else:
                found.append(dataclasses.asdict(rig.restore()))
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Where the pages of SGLang's host pools lie, and what is in them.

A page's payload is what the pool's flat page holds, byte for byte, whatever way it is
moved: the copying interface hands that page over as a tensor, here it is taken piece by
piece from the pool itself. So a page is stored in one form only.

The order of a page's bytes follows the pool's layout where that costs nothing to change,
and is then the same for several layouts: `layer_first`, whose pieces are put in the
order of `page_first_direct`, shares its pages with it, and pages of one token are the
same in every layout. A `page_first` page of more tokens would have to be cut into
pieces of one head row each; its order is one of its own, and part of its keys.

Pools are described by what they are asked for, not by their classes: any pool qualifies
whose pages are views of its buffers, or that names their addresses, as long as these
grow evenly from page to page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.interface import BlockBuffers

__all__ = ["PoolPages", "UnusablePoolError", "describe_pool", "flat_buffers"]

_I64 = npt.NDArray[np.int64]

_DTYPES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
    "torch.float8_e4m3fn": "float8_e4m3fn",
    "torch.float8_e5m2": "float8_e5m2",
}

#: Pools whose pages do not lie at fixed places, or hold only a part of what the
#: controller addresses.
_REFUSED = frozenset({"PageInterleaveHostPool", "UnifiedPageEnvelopeHostPool"})

Role = Literal["key", "value", "latent"]


class UnusablePoolError(LifeboatError):
    """A host pool whose pages cannot be stored; the message says why."""


@dataclass(frozen=True)
class PoolPages:
    """The pages of one host pool.

    Attributes
    ----------
    name
        SGLang's name of the pool (``kv``, ``mamba``, …).
    tokens
        Indices per page: SGLang's page size, 1 for Mamba states.
    size
        Indices in the pool.
    bases, strides, sizes
        int64 ``(n_pieces,)``: address of each piece of page 0 in the order of the
        payload, its distance from page to page, and its length, in bytes.
    layout
        What the payload holds.
    facts
        JSON-able: what tells payloads of one layout apart, where the layout does not
        say it all.
    owner
        Keeps the pool's memory alive.
    """

    name: str
    tokens: int
    size: int
    bases: _I64
    strides: _I64
    sizes: _I64
    layout: KVLayout
    facts: Mapping[str, Any]
    owner: object

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 for a pool that only counts pages."""
        return self.layout.nbytes

    def starts(self, indices: Any, count: int) -> _I64:
        """Number of each page, from SGLang's indices of its tokens.

        Parameters
        ----------
        indices
            CPU tensor or array of ``count * tokens`` indices. It is not kept: SGLang
            may hand out views of memory that it uses again.
        count
            Pages.

        Raises
        ------
        ValueError
            If the indices do not name whole pages of the pool.
        """
        if indices is None:
            raise ValueError(f"{self.name}: no host indices")
        if hasattr(indices, "numpy"):
            indices = indices.cpu().numpy()
        array = np.array(indices, dtype=np.int64).reshape(-1)
        if array.shape[0] != count * self.tokens:
            raise ValueError(
                f"{self.name}: {array.shape[0]} host indices for {count} pages of {self.tokens}"
            )
        first = array[:: self.tokens]
        if count and (
            bool((first % self.tokens).any())
            or int(first.min()) < 0
            or int(first.max()) + self.tokens > self.size
        ):
            raise ValueError(f"{self.name}: host indices that are not pages of the pool")
        pages: _I64 = first // self.tokens
        return pages

    def buffers(self, pages: _I64) -> BlockBuffers:
        """The memory of some pages."""
        count, pieces = int(pages.shape[0]), int(self.bases.shape[0])
        addresses = (self.bases[None, :] + pages[:, None] * self.strides[None, :]).reshape(-1)
        return BlockBuffers(
            addresses.astype(np.uint64),
            np.tile(self.sizes.astype(np.uint64), count),
            np.arange(count + 1, dtype=np.int64) * pieces,
            self.owner,
        )


def describe_pool(pool: Any, name: str) -> PoolPages:
    """Find out where the pages of a host pool lie.

    Raises
    ------
    UnusablePoolError
        If they cannot be addressed.
    """
    kind = type(pool).__name__
    if kind in _REFUSED:
        raise UnusablePoolError(
            f"host pools of the kind {kind} are not stored yet: start SGLang without "
            "--enable-kv-cache-sharding and --enable-unified-memory"
        )
    tokens = int(getattr(pool, "page_size", 1) or 1)
    size = int(pool.size)
    if getattr(pool, "kv_buffer", None) is None and int(getattr(pool, "size_per_token", 1)) == 0:
        none = np.zeros(0, dtype=np.int64)
        return PoolPages(name, tokens, size, none, none, none, KVLayout.opaque(0), {}, pool)
    if size < 2 * tokens:
        raise UnusablePoolError(
            f"the host pool {name!r} has a single page: raise --hicache-size or --hicache-ratio"
        )
    problems = []
    for pieces in (_of_states, _of_view, _of_addresses):
        try:
            found = _evenly(pieces, pool, tokens, size)
        except Exception as exc:  # not this way
            problems.append(f"{pieces.__name__[1:]}: {exc}")
            continue
        if found is not None:
            bases, strides, sizes = found
            layout = _layout(pool, tokens, int(sizes.sum()))
            facts = _facts(pool, layout)
            return PoolPages(
                name, tokens, size, bases, strides, sizes, layout, facts, _tensors(pool)
            )
    raise UnusablePoolError(
        f"pages of the host pool {name!r} ({kind}, layout {getattr(pool, 'layout', '?')}) cannot "
        f"be addressed ({'; '.join(problems) or 'no way known'}): choose another "
        "--hicache-mem-layout"
    )


# Where pages lie -------------------------------------------------------------

_Pieces = tuple[_I64, _I64]


def _evenly(
    pieces: Callable[[Any, int, int], _Pieces | None], pool: Any, tokens: int, size: int
) -> tuple[_I64, _I64, _I64] | None:
    """Bases, strides and sizes, if the first, second and last page agree on them."""
    last = size // tokens - 1
    found = [pieces(pool, page * tokens, tokens) for page in (0, 1, last)]
    if any(one is None for one in found):
        return None
    (bases, sizes), (second, sizes_too), (end, sizes_end) = cast("list[_Pieces]", found)
    strides = second - bases
    if not (np.array_equal(sizes, sizes_too) and np.array_equal(sizes, sizes_end)):
        raise UnusablePoolError("pages differ in size")
    if not np.array_equal(bases + last * strides, end) or bool((strides <= 0).any()):
        raise UnusablePoolError("pages do not follow each other evenly")
    inside = _inside(pool, np.concatenate((bases, end)), np.concatenate((sizes, sizes)))
    if not inside:
        raise UnusablePoolError("pages lie outside the pool's memory")
    return bases, strides, sizes


def _of_states(pool: Any, index: int, _tokens: int) -> _Pieces | None:
    """A slot of a state pool: its tensors one after the other, side states too."""
    parts = getattr(pool, "_iter_page_tensors", None)
    if parts is None:
        return None
    return _joined([_of_tensor(part) for part in parts(index) if part.numel()])


def _of_view(pool: Any, index: int, _tokens: int) -> _Pieces | None:
    """The flat page as the pool itself cuts it out, if that is no copy."""
    page = pool.get_data_page(index, flat=False)
    found = _of_tensor(page)
    return found if _inside(pool, *found) else None


def _of_addresses(pool: Any, index: int, tokens: int) -> _Pieces | None:
    """As the pool names them for zero copy."""
    import torch

    meta = pool.get_page_buffer_meta(torch.arange(index, index + tokens, dtype=torch.int64))
    if not meta:
        return None
    addresses, sizes = (np.array(one, dtype=np.int64) for one in meta)
    kept = sizes > 0
    return addresses[kept], sizes[kept]


def _of_tensor(tensor: Any) -> _Pieces:
    """The contiguous pieces of a strided tensor, in the order of its elements."""
    item = int(tensor.element_size())
    axes = [
        (int(length), int(stride) * item)
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if length != 1
    ]
    piece = item
    while axes and axes[-1][1] == piece:
        piece *= axes.pop()[0]
    offsets = np.zeros(1, dtype=np.int64)
    for length, stride in axes:
        step = np.arange(length, dtype=np.int64) * stride
        offsets = (offsets[:, None] + step[None, :]).reshape(-1)
    return offsets + int(tensor.data_ptr()), np.full(offsets.shape[0], piece, dtype=np.int64)


def _joined(parts: Sequence[_Pieces]) -> _Pieces:
    return np.concatenate([one for one, _ in parts]), np.concatenate([size for _, size in parts])


def _tensors(pool: Any) -> tuple[Any, ...]:
    """The tensors that hold the pool's memory."""
    found: list[Any] = []

    def add(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        elif hasattr(value, "data_ptr"):
            found.append(value)

    for name in ("kv_buffer", "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer"):
        # Of a pool that keeps K and V in one tensor, two of these are views of it.
        add(getattr(pool, name, None))
    for name in ("index_k_with_scale_buffer", "temporal_buffer", "conv_buffer"):
        add(getattr(pool, name, None))
    add(getattr(pool, "slot_state_buffers", None))
    return tuple(found)


def _inside(pool: Any, addresses: _I64, sizes: _I64) -> bool:
    """Whether all pieces lie within the pool's tensors."""
    good = np.zeros(addresses.shape[0], dtype=bool)
    for tensor in _tensors(pool):
        storage = tensor.untyped_storage()
        begin, end = int(storage.data_ptr()), int(storage.data_ptr()) + int(storage.nbytes())
        good |= (addresses >= begin) & (addresses + sizes <= end)
    return bool(good.all())


# What is in them -------------------------------------------------------------


def _layout(pool: Any, tokens: int, nbytes: int) -> KVLayout:
    """The tensors of a page; opaque bytes where they are not known for certain."""
    try:
        tensors = list(_kv_tensors(pool, tokens, nbytes))
    except (AttributeError, KeyError, TypeError):
        tensors = []
    return KVLayout.of(nbytes, tensors)


def _facts(pool: Any, layout: KVLayout) -> dict[str, Any]:
    """What a layout does not say of a page: nothing, if it describes all of it."""
    if layout.tensors and all(tensor.role != "opaque" for tensor in layout.tensors):
        return {}
    states = getattr(pool, "_iter_page_tensors", None)
    if states is not None:
        return {"states": [[list(part.shape), str(part.dtype)] for part in states(0)]}
    return {
        "kind": type(pool).__name__,
        "layout": str(getattr(pool, "layout", None)),
        "dtype": str(getattr(pool, "dtype", None)),
        "layers": int(getattr(pool, "layer_num", 0) or 0),
    }


def _kv_tensors(pool: Any, tokens: int, nbytes: int) -> Iterable[TensorLayout]:
    """K and V, or the latent, of the layers of an attention pool.

    Other pools hold state and indices, which are stored exactly and need no description.
    """
    kinds = {base.__name__ for base in type(pool).__mro__}
    dtype = _DTYPES.get(str(pool.dtype))
    layers = int(getattr(pool, "layer_num", 0))
    if dtype is None or not layers:
        return []
    item = int(pool.dtype.itemsize)
    parts: list[tuple[Role, int, int]]
    if "MHATokenToKVPoolHost" in kinds:
        heads = int(pool.head_num)
        parts = [("key", heads, int(pool.head_dim)), ("value", heads, int(pool.v_head_dim))]
    elif "MLATokenToKVPoolHost" in kinds and not getattr(pool, "dsa_kv_cache_store_fp8", False):
        parts = [("latent", 1, int(pool.kv_cache_dim))]
    else:
        return []
    if nbytes != sum(layers * tokens * heads * dim * item for _, heads, dim in parts):
        return []
    first = int(getattr(pool, "start_layer", 0) or 0)
    found = []
    offset = 0
    for role, heads, dim in parts:
        row, head = heads * dim * item, dim * item
        by_token, by_layer, by_head = _order(str(pool.layout), row, head, layers, tokens)
        found += [
            TensorLayout(
                role=role,
                dtype=cast("Any", dtype),
                layer=first + layer,
                outer=tokens,
                inner=1,
                heads=heads,
                dim=dim,
                # One token, or one head, has no distance to the next.
                outer_stride=by_token if tokens > 1 else row,
                inner_stride=row,
                head_stride=by_head if heads > 1 else head,
                offset=offset + layer * by_layer,
            )
            for layer in range(layers)
        ]
        offset += row * layers * tokens
    return found


def _order(layout: str, row: int, head: int, layers: int, tokens: int) -> tuple[int, int, int]:
    """Distances in bytes from token to token, layer to layer and head to head of a page.

    Parameters
    ----------
    layout
        SGLang's name of the pool's layout.
    row, head
        Bytes of a token's heads in a layer, and of one of them.
    layers, tokens
        Of a page.
    """
    if layout in ("layer_first", "page_first_direct"):
        return row, row * tokens, head
    if layout == "page_first":
        return row * layers, row, head
    if layout == "page_head":
        return head * layers, head, head * layers * tokens
    raise KeyError(layout)


def flat_buffers(tensors: Iterable[Any], page_bytes: int) -> BlockBuffers:
    """The memory of flat pages, one tensor each.

    Raises
    ------
    ValueError
        If one is not of a page's size, or not contiguous.
    """
    kept = list(tensors)
    for tensor in kept:
        size = int(tensor.numel()) * int(tensor.element_size())
        if size != page_bytes or not tensor.is_contiguous():
            raise ValueError(f"a flat page has {size} bytes instead of {page_bytes}")
    addresses = np.array([tensor.data_ptr() for tensor in kept], dtype=np.uint64)
    return BlockBuffers(
        addresses,
        np.full(len(kept), page_bytes, dtype=np.uint64),
        np.arange(len(kept) + 1, dtype=np.int64),
        kept,
    )

"""What the bytes of LMCache's objects are: from shapes and dtypes to tensors.

An object is the KV of one chunk of tokens, for one object group of layers and one rank. Its
memory holds one tensor after the other, a tensor per group of layers that are alike:
``[2, layers, tokens, hidden]`` with keys and values apart, or ``[layers, tokens, hidden]``
with both in one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from blake3 import blake3

from lifeboat_cache.interface import KVLayout, TensorLayout

__all__ = ["MOST_PART_BYTES", "ObjectLayout", "ObjectLayouts"]

#: Objects are stored in parts of whole layers that are not larger (unless a layer is):
#: codecs work on one part at a time, in memory of a fixed size, and while one part is restored
#: the next are read.
MOST_PART_BYTES = 4 << 20

#: Elements that share a scale: those of a head, as far as can be told from ``hidden``.
_WIDTHS = (128, 64)

#: dtypes of torch, and as what their elements are stored. vLLM's 8-bit KV comes as uint8.
_KV_DTYPES: dict[str, Any] = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "uint8": "float8_e4m3fn",
}

_ITEM_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1,
    "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ObjectLayout:
    """The layout of objects of one kind.

    Attributes
    ----------
    shapes, dtypes
        As LMCache has them; dtypes by torch's names.
    nbytes
        Bytes of an object.
    signature
        8 bytes that tell it from every other layout.
    parts
        What is stored of an object, one block each, in order.
    tokens
        Tokens of a chunk.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int
    signature: bytes
    parts: tuple[KVLayout, ...]
    tokens: int

    @classmethod
    def of(
        cls, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], *, latent: bool = False
    ) -> ObjectLayout:
        """Describe objects.

        Parameters
        ----------
        shapes, dtypes
            One of each per tensor.
        latent
            Whether tensors of three dimensions are known to hold KV. They may also be
            recurrent state, which must come back exactly.

        Raises
        ------
        ValueError
            If they cannot be those of an object.
        """
        if not shapes or len(shapes) != len(dtypes):
            raise ValueError(f"an object of {len(shapes)} shapes and {len(dtypes)} dtypes")
        parts: list[KVLayout] = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            parts += _parts(shape, dtype, latent)
        text = json.dumps([shapes, dtypes]).encode()
        return cls(
            shapes,
            dtypes,
            sum(part.nbytes for part in parts),
            blake3(b"lmcache object 1\0" + text).digest(length=8),
            tuple(parts),
            shapes[0][-2] if len(shapes[0]) >= 2 else 0,
        )

    def to_json(self) -> dict[str, Any]:
        """As it is kept beside the data."""
        return {"shapes": self.shapes, "dtypes": self.dtypes}


def _parts(shape: tuple[int, ...], dtype: str, latent: bool) -> Iterator[KVLayout]:
    """Cut a tensor into parts of whole layers."""
    item = _ITEM_BYTES.get(dtype)
    if item is None or not shape or min(shape) < 1:
        raise ValueError(f"a tensor of {dtype} in the shape {shape}: report this with its model")
    known = _KV_DTYPES.get(dtype)
    if known is None or len(shape) not in (3, 4) or (len(shape) == 4 and shape[0] != 2):
        yield from _opaque(prod(shape) * item)
        return
    layers, tokens, hidden = shape[-3:]
    row = tokens * hidden * item
    each = max(1, MOST_PART_BYTES // row)
    planes = ("key", "value") if len(shape) == 4 else ("latent" if latent else "state",)
    rows = [(role, layer) for role in planes for layer in range(layers)]
    for first in range(0, len(rows), each):
        here = rows[first : first + each]
        tensors = [
            _tensor(role, known, layer, tokens, hidden, item, number * row)
            for number, (role, layer) in enumerate(here)
        ]
        yield KVLayout.of(len(here) * row, tensors)


def _tensor(
    role: Any, dtype: Any, layer: int, tokens: int, hidden: int, item: int, offset: int
) -> TensorLayout:
    dim = next((width for width in _WIDTHS if hidden % width == 0), hidden)
    return TensorLayout(
        role=role,
        dtype=dtype,
        layer=layer,
        outer=1,
        inner=tokens,
        heads=hidden // dim,
        dim=dim,
        outer_stride=tokens * hidden * item,
        inner_stride=hidden * item,
        head_stride=dim * item,
        offset=offset,
    )


def _opaque(nbytes: int) -> Iterator[KVLayout]:
    for first in range(0, nbytes, MOST_PART_BYTES):
        yield KVLayout.opaque(min(MOST_PART_BYTES, nbytes - first))


def _shapes_of(one: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Shapes and dtypes of an object of LMCache's; some of its tools fill in the first only."""
    meta = getattr(one, "meta", None)
    if meta is not None and meta.shapes is None:
        return [one.get_shape()], [one.get_dtype()]
    return one.get_shapes(), one.get_dtypes()


class ObjectLayouts:
    """Layouts by what LMCache says of them; each is worked out once.

    Parameters
    ----------
    latent
        See :meth:`ObjectLayout.of`.
    """

    def __init__(self, *, latent: bool = False) -> None:
        self._latent = latent
        self._known: dict[tuple[tuple[Any, ...], tuple[Any, ...]], ObjectLayout] = {}

    def of_object(self, one: Any) -> ObjectLayout:
        """The layout of an object of LMCache's; see :meth:`of`."""
        return self.of(*_shapes_of(one))

    def of(self, shapes: Sequence[Any], dtypes: Sequence[Any]) -> ObjectLayout:
        """The layout of objects with these shapes and dtypes (torch's, or as text).

        Raises
        ------
        ValueError
            See :meth:`ObjectLayout.of`.
        """
        name = tuple(map(tuple, shapes)), tuple(dtypes)
        found = self._known.get(name)
        if found is None:
            found = ObjectLayout.of(
                tuple(tuple(int(size) for size in shape) for shape in shapes),
                tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
                latent=self._latent,
            )
            self._known[name] = found
        return found

"""Loads, stores and copies by address, inside kernels.

Addresses are ``uint64``, as a pointer in an iovec is, and need no alignment.
Nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["copy", "load_u8", "load_u32", "load_u64", "stack", "store_u32", "store_u64", "zero"]

_U8 = ir.IntType(8)
_U64 = ir.IntType(64)


def _loader(kind: Any, bits: int) -> Any:
    def load(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 (numba looks at the names)
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at = context.cast(builder, arguments[0], signature.args[0], types.uint64)
            loaded = builder.load(builder.inttoptr(at, ir.IntType(bits).as_pointer()))
            loaded.align = 1
            return loaded

        return kind(address), generate

    return intrinsic(load)


def _storer(kind: Any, bits: int) -> Any:
    def store(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at = context.cast(builder, arguments[0], signature.args[0], types.uint64)
            stored = builder.store(
                context.cast(builder, arguments[1], signature.args[1], kind),
                builder.inttoptr(at, ir.IntType(bits).as_pointer()),
            )
            stored.align = 1
            return context.get_dummy_value()

        return types.void(address, value), generate

    return intrinsic(store)


#: ``load_u64(address)``: the little-endian integer there.
load_u8 = _loader(types.uint8, 8)
load_u32 = _loader(types.uint32, 32)
load_u64 = _loader(types.uint64, 64)
#: ``store_u64(address, value)``.
store_u32 = _storer(types.uint32, 32)
store_u64 = _storer(types.uint64, 64)


@intrinsic  # type: ignore[untyped-decorator]
def copy(typing_context: Any, to: Any, source: Any, length: Any) -> Any:  # noqa: ARG001
    """``copy(to, source, length)``: copy bytes between places that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to_, source_, length_ = (
            context.cast(builder, value, kind, types.uint64)
            for value, kind in zip(arguments, signature.args, strict=True)
        )
        pointer = _U8.as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to_, pointer), builder.inttoptr(source_, pointer), length_, 1
        )
        return context.get_dummy_value()

    return types.void(to, source, length), generate


@intrinsic  # type: ignore[untyped-decorator]
def zero(typing_context: Any, to: Any, length: Any) -> Any:  # noqa: ARG001
    """``zero(to, length)``: fill with zero bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to_, length_ = (
            context.cast(builder, value, kind, types.uint64)
            for value, kind in zip(arguments, signature.args, strict=True)
        )
        cgutils.memset(builder, builder.inttoptr(to_, _U8.as_pointer()), length_, 0)
        return context.get_dummy_value()

    return types.void(to, length), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def stack(typing_context: Any, length: Any) -> Any:  # noqa: ARG001
    """``stack(N)``: address of N bytes (a literal or a global) that live in the function.

    Every call of one place in the source gives the same bytes, and nothing is cleared.
    """
    if not isinstance(length, types.IntegerLiteral):
        return None
    size = length.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        place = cgutils.alloca_once(builder, ir.ArrayType(_U8, size))
        place.align = 64
        return builder.ptrtoint(place, _U64)

    return types.uint64(length), generate

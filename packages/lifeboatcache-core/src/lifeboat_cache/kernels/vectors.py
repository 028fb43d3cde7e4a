"""Vectors inside kernels: the instructions that operations on many lanes are built of.

They are written in the compiler's own language, which it maps to what the processor has. An
operation takes ``int64`` only; addresses need no alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = [
    "HAS_EXPAND",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "LANES",
    "LANES_1",
    "LANES_8",
    "LANES_16",
    "LANES_32",
    "alike",
    "bit",
    "call",
    "count_ones",
    "first_one",
    "load",
    "masked",
    "narrow",
    "operation",
    "plane",
    "plus",
    "population",
    "shifted",
    "splat",
    "spread",
    "store",
]

LANES = 64

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
LANES_1 = ir.VectorType(I1, LANES)
LANES_8 = ir.VectorType(I8, LANES)
LANES_16 = ir.VectorType(I16, LANES)
LANES_32 = ir.VectorType(I32, LANES)

#: Whether the processor spreads and gathers bytes and words under a mask in one go.
HAS_EXPAND = bool(llvm.get_host_cpu_features().get("avx512vbmi2", False))


def operation(count: int, result: Any, build: Callable[..., Any]) -> Any:
    """An operation on ``count`` integers out of a function that builds its instructions."""

    def generator(signature: Any) -> tuple[Any, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers = [
                context.cast(builder, value, kind, types.int64)
                for value, kind in zip(arguments, signature.args, strict=True)
            ]
            made = build(builder, *numbers)
            return context.get_dummy_value() if made is None else made

        return signature, generate

    def one(typing_context: Any, a: Any) -> Any:  # noqa: ARG001 (numba looks at the names)
        return generator(result(a))

    def two(typing_context: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b))

    def three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c))

    def four(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c, d))

    def five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c, d, e))

    def six(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:  # noqa: ARG001
        return generator(result(a, b, c, d, e, f))

    return intrinsic((one, two, three, four, five, six)[count - 1])


def splat(kind: Any, value: int) -> Any:
    """A constant in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load from an address."""
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder: Any, value: Any, address: Any) -> None:
    """Store at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def plus(builder: Any, address: Any, offset: int) -> Any:
    """An address so many bytes further."""
    return builder.add(address, ir.Constant(I64, offset))


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call a function of the compiler by name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def alike(builder: Any, number: Any) -> Any:
    """A byte, the lower one of a number, in all lanes."""
    first = builder.insert_element(
        ir.Constant(LANES_8, ir.Undefined), builder.trunc(number, I8), ir.Constant(I32, 0)
    )
    lanes = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(LANES_8, ir.Undefined), lanes)


def plane(builder: Any, lanes: Any) -> Any:
    """Bits of 64 lanes, as a word."""
    return builder.bitcast(lanes, I64)


def bit(builder: Any, vector: Any, bit: int) -> Any:
    """The plane of one bit of every lane."""
    kept = builder.and_(vector, splat(vector.type, 1 << bit))
    return plane(builder, builder.icmp_unsigned("!=", kept, splat(vector.type, 0)))


def spread(builder: Any, word: Any, kind: Any, value: int) -> Any:
    """``value`` in the lanes whose bit is set in a word, 0 in the others."""
    lanes = builder.bitcast(word, LANES_1)
    return builder.select(lanes, splat(kind, value), splat(kind, 0))


def population(builder: Any, word: Any) -> Any:
    """How many bits of a word are set."""
    return call(builder, "llvm.ctpop.i64", I64, [word])


def shifted(builder: Any, vector: Any, bits: int) -> Any:
    """Lanes shifted down."""
    return builder.lshr(vector, splat(vector.type, bits))


def masked(builder: Any, vector: Any, bits: int) -> Any:
    """Some bits of lanes."""
    return builder.and_(vector, splat(vector.type, bits))


def narrow(builder: Any, vector: Any, kind: Any) -> Any:
    """Lanes of at most as many bits."""
    return vector if vector.type == kind else builder.trunc(vector, kind)


#: ``count_ones(word)``.
count_ones = operation(1, types.int64, population)
#: ``first_one(word)``: the number of the lowest bit that is set.
first_one = operation(
    1,
    types.int64,
    lambda builder, word: call(builder, "llvm.cttz.i64", I64, [word, ir.Constant(I1, 0)]),
)

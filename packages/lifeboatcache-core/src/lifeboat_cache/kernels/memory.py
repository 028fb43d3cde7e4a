"""Memory by its address, inside kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["bytes_at", "float32_at", "float64_at", "int16_at", "words_at"]


def _pointer_to(element: Any) -> Any:
    def typed(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 (numba looks at the names)
        signature = types.CPointer(element)(types.int64)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, generate

    return typed


#: Pointer to the 64-bit signed integers at an address.
words_at = intrinsic(_pointer_to(types.int64))

#: Pointer to the bytes at an address.
bytes_at = intrinsic(_pointer_to(types.uint8))

#: Pointer to the 16-bit signed integers at an address.
int16_at = intrinsic(_pointer_to(types.int16))

#: Pointer to the float32 numbers at an address.
float32_at = intrinsic(_pointer_to(types.float32))

#: Pointer to the float64 numbers at an address.
float64_at = intrinsic(_pointer_to(types.float64))

"""Functions of the C library, callable from kernels."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.types import ExternalFunction

from lifeboat_cache.kernels.jit import inline

__all__ = [
    "errno",
    "memcpy",
    "memmove",
    "memset",
    "poll",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "read",
    "write",
]

_int, _size, _address = types.int32, types.uint64, types.int64

_errno_location = ExternalFunction("__errno_location", types.CPointer(_int)())
memcpy = ExternalFunction("memcpy", _address(_address, _address, _size))
memmove = ExternalFunction("memmove", _address(_address, _address, _size))
memset = ExternalFunction("memset", _address(_address, _int, _size))
poll = ExternalFunction("poll", _int(_address, _size, _int))
pread = ExternalFunction("pread", types.int64(_int, _address, _size, types.int64))
preadv = ExternalFunction("preadv", types.int64(_int, _address, _int, types.int64))
pwrite = ExternalFunction("pwrite", types.int64(_int, _address, _size, types.int64))
pwritev = ExternalFunction("pwritev", types.int64(_int, _address, _int, types.int64))
read = ExternalFunction("read", types.int64(_int, _address, _size))
write = ExternalFunction("write", types.int64(_int, _address, _size))


@inline
def errno() -> Any:
    """Error number of the last call of this thread that failed."""
    return _errno_location()[0]

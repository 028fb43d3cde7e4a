"""Functions of the C library, callable from kernels.

Only such as take a fixed number of arguments: on Apple's arm64 the others are called in
another way. Numbers that systems do not agree on come from Python's own modules.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from lifeboat_cache.kernels.jit import inline
from lifeboat_cache.kernels.syscalls import PREADV2

__all__ = [
    "errno",
    "memcpy",
    "memmove",
    "memset",
    "poll",
    "pread",
    "preadv",
    "preadv_cached",
    "pwrite",
    "pwritev",
    "read",
    "write",
]

_int, _size, _address = types.int32, types.uint64, types.int64

_errno_location = ExternalFunction(
    "__error" if sys.platform == "darwin" else "__errno_location", types.CPointer(_int)()
)
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


if PREADV2:
    _syscall = ExternalFunction("syscall", _address(*[_address] * 7))
    _number, _RWF_NOWAIT = np.int64(PREADV2), np.int64(8)

    @inline
    def preadv_cached(fd: Any, iov: Any, count: Any, position: Any) -> Any:
        """``preadv`` of what is in memory; fails rather than wait for the medium."""
        return _syscall(
            _number, np.int64(fd), iov, np.int64(count), position, np.int64(0), _RWF_NOWAIT
        )

else:

    @inline
    def preadv_cached(fd: Any, iov: Any, count: Any, position: Any) -> Any:  # noqa: ARG001
        """There is no such call: nothing is known to be in memory."""
        return np.int64(0)

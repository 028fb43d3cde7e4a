"""Access logs: which records were used, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.checksum import header_checksum

__all__ = ["ACCESS", "ACCESS_BYTES", "pack_accesses", "parse_accesses"]

#: One access: the record's writer, segment and slot, and the time in seconds.
ACCESS = np.dtype(
    [
        ("writer", "V16"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("time", "<u4"),
        ("checksum", "V4"),
    ]
)

ACCESS_BYTES = 32


def pack_accesses(accesses: npt.NDArray[Any]) -> bytes:
    """Bytes to append for an ``ACCESS`` array; the checksums are put in."""
    if kernels.ready():
        from lifeboat_cache.kernels import blake3_short

        sealed = np.array(accesses, dtype=ACCESS, order="C")
        if len(sealed):
            blake3_short.seal_accesses(sealed.ctypes.data, len(sealed))
        return sealed.tobytes()
    data = bytearray(accesses.tobytes())
    for at in range(0, len(data), ACCESS_BYTES):
        data[at + 28 : at + 32] = header_checksum(bytes(data[at : at + 28]))[:4]
    return bytes(data)


def parse_accesses(data: bytes) -> npt.NDArray[Any]:
    """The whole, intact accesses in ``data`` (after the log's header)."""
    count = len(data) // ACCESS_BYTES
    entries = np.frombuffer(data, dtype=ACCESS, count=count)
    good = np.ones(count, dtype=np.bool_)
    if kernels.ready():
        from lifeboat_cache.kernels import blake3_short

        if count:
            blake3_short.check_accesses(entries.ctypes.data, count, good)
    else:
        for number in range(count):
            at = number * ACCESS_BYTES
            if header_checksum(data[at : at + 28])[:4] != data[at + 28 : at + 32]:
                good[number] = False
    kept: npt.NDArray[Any] = entries[good]
    return kept

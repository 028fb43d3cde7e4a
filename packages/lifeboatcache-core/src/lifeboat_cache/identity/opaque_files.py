"""Checkpoints whose format is not read: torch archives, pickles, GGUF.

Nothing is ever unpickled. A torch archive is a zip file whose members are
stored uncompressed, one a storage; its directory says where each lies, and each
is sampled like a tensor. Everything else is sampled in equal strides.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity.sampling import WINDOW_BYTES, Region

__all__ = ["archive_regions", "stride_regions"]

_HEAD_BYTES = 1 << 20
_STRIDE_BYTES = 1 << 20
_MIN_STRIDES = 256
_MAX_STRIDES = 16384
_MAX_MEMBERS = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def stride_regions(size: int) -> list[Region]:
    """Regions of a file of unknown format: its head whole, then a window per stride.

    A window per MiB, at least 256 and at most 16,384 of them, the last at the
    end of the file. Files of up to 2 MiB are read whole.
    """
    if size <= 2 * _HEAD_BYTES:
        return [Region("all", 0, size, whole=True)]
    regions = [Region("head", 0, _HEAD_BYTES, whole=True)]
    rest = size - _HEAD_BYTES
    count = min(_MAX_STRIDES, max(_MIN_STRIDES, rest // _STRIDE_BYTES))
    span = rest - WINDOW_BYTES
    regions += [
        Region(f"window {number}", _HEAD_BYTES + number * span // (count - 1), WINDOW_BYTES)
        for number in range(count)
    ]
    return regions


def archive_regions(fd: int, path: Path) -> list[tuple[Region, str]] | None:
    """Regions of a torch archive: one a member, with a label that joins the digest.

    Returns
    -------
    list of (Region, str) or None
        The label holds the member's name without the archive's own name, its
        size and its CRC-32 (over all of its bytes, as its writer computed it).
        ``None`` if the file is not a zip archive.

    Raises
    ------
    IdentityError
        If the archive is damaged.
    """
    try:
        # zipfile closes what it opens, so it gets a descriptor of its own.
        with open(os.dup(fd), "rb") as file:
            if not zipfile.is_zipfile(file):
                return None
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as exc:
        raise IdentityError(
            f"{path}: damaged archive ({exc}): download or copy the file again"
        ) from exc
    if len(members) > _MAX_MEMBERS:
        raise IdentityError(
            f"{path}: an archive of {len(members)} members is no checkpoint: "
            "remove it from the model's directory"
        )
    size = os.fstat(fd).st_size
    regions = []
    for member in members:
        name = member.filename.partition("/")[2] or member.filename
        if name == ".data/serialization_id":
            continue  # names the act of saving, not what was saved
        local = os.pread(fd, _LOCAL_HEADER.size, member.header_offset)
        if len(local) < _LOCAL_HEADER.size or local[:4] != b"PK\x03\x04":
            raise IdentityError(
                f"{path}: damaged archive (member {name!r}): download or copy the file again"
            )
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local)
        start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if start + member.compress_size > size:
            raise IdentityError(
                f"{path}: truncated archive (member {name!r}): download or copy the file again"
            )
        # The pickle says which storage is which tensor: whole, however long it is.
        whole = name.endswith("data.pkl")
        region = Region(name, start, member.compress_size, whole=whole)
        regions.append((region, f"{name}\0{member.file_size}\0{member.CRC}"))
    regions.sort(key=lambda pair: pair[1])
    return regions

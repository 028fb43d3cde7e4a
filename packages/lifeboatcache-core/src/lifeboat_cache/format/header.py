"""The 4,096-byte header that every file of format 1 starts with."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lifeboat_cache.checksum import header_checksum
from lifeboat_cache.errors import ForeignDataError, FormatError, NewerFormatError

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MAGIC_ACCESS",
    "MAGIC_DEAD",
    "MAGIC_JOURNAL",
    "MAGIC_SEGMENT",
    "FileHeader",
]

#: Version written by, and the newest one readable by, this release.
FORMAT_VERSION = 1

#: Length of a header; also the alignment of payloads (a page, and the largest
#: logical block size that O_DIRECT meets in practice).
HEADER_BYTES = 4096

MAGIC_SEGMENT = b"LBSEGMNT"
MAGIC_JOURNAL = b"LBJOURNL"
MAGIC_DEAD = b"LBDEADBM"
MAGIC_ACCESS = b"LBACCESS"

_MAGICS = frozenset({MAGIC_SEGMENT, MAGIC_JOURNAL, MAGIC_DEAD, MAGIC_ACCESS})

#: magic, format, header length, namespace, writer, segment, zeros, created (s).
_FIELDS = struct.Struct("<8sII32s16sIIQ")
_CHECKSUM_AT = HEADER_BYTES - 8


@dataclass(frozen=True)
class FileHeader:
    """What a file says about itself.

    Attributes
    ----------
    magic
        One of the ``MAGIC_*`` constants.
    namespace
        32-byte namespace digest.
    writer
        16-byte identity of the writer (access logs: of the reading process).
    segment
        Segment number; 0 where it has no meaning (journals, access logs).
    created
        Seconds since 1970, UTC.
    """

    magic: bytes
    namespace: bytes
    writer: bytes
    segment: int
    created: int

    def pack(self) -> bytes:
        """The header's 4,096 bytes."""
        fields = _FIELDS.pack(
            self.magic,
            FORMAT_VERSION,
            HEADER_BYTES,
            self.namespace,
            self.writer,
            self.segment,
            0,
            self.created,
        ).ljust(_CHECKSUM_AT, b"\0")
        return fields + header_checksum(fields)

    @classmethod
    def unpack(cls, data: bytes, magic: bytes, where: str = "file") -> FileHeader:
        """Parse and verify a header.

        Raises
        ------
        ForeignDataError
            If the magic is not one of ours.
        NewerFormatError
            If a newer release wrote it.
        FormatError
            If it is cut, corrupt, or of another kind than ``magic``.
        """
        if len(data) < HEADER_BYTES:
            if len(data) < 8 or data[:8] in _MAGICS:
                raise FormatError(f"{where}: the header is cut; `lifeboat-cache purge` removes it")
            raise ForeignDataError(f"{where}: not a file of LifeboatCache; move it elsewhere")
        found, version, length, namespace, writer, segment, _, created = _FIELDS.unpack_from(data)
        if found not in _MAGICS:
            raise ForeignDataError(f"{where}: not a file of LifeboatCache; move it elsewhere")
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{where}: written in format {version}, this release reads up to "
                f"{FORMAT_VERSION}; upgrade lifeboatcache-core to use it"
            )
        stated = data[_CHECKSUM_AT:HEADER_BYTES]
        if version < 1 or length != HEADER_BYTES or header_checksum(data[:_CHECKSUM_AT]) != stated:
            raise FormatError(f"{where}: the header is corrupt; `lifeboat-cache purge` removes it")
        if found != magic:
            raise FormatError(f"{where}: holds {found!r} where {magic!r} belongs; it is skipped")
        return cls(found, namespace, writer, segment, created)

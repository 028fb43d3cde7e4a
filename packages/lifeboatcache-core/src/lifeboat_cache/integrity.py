"""The integrity key: who has it can tell whether stored KV was tampered with.

With ``security.integrity_key``, or a key in the environment, payload checksums are keyed
(algorithm 3), and the identity of every namespace names the key: processes with other keys, or
with none, use other namespaces and never meet.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from lifeboat_cache.config.paths import ENV_INTEGRITY_KEY
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.files import close_file

if TYPE_CHECKING:
    from lifeboat_cache.config import Config

__all__ = [
    "IDENTITY_FIELD",
    "IntegrityKey",
    "configured_integrity_key",
    "integrity_key",
    "load_integrity_key",
    "namespace_with_integrity",
]

#: Where the identity document of a namespace names the key.
IDENTITY_FIELD = "integrity_key"

_KEY_CONTEXT = "lifeboatcache 2026 integrity key v1"
_ID_CONTEXT = "lifeboatcache 2026 integrity key id v1"

#: Fewer bytes could be guessed.
_LEAST_BYTES = 32
#: A longer file is something else.
_MOST_BYTES = 1 << 16

_HEX = re.compile(rb"\s*((?:[0-9a-fA-F]{2})+)\s*")

_NEW_KEY = "a new one is made by: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True)
class IntegrityKey:
    """A key and its name.

    Attributes
    ----------
    secret
        32 bytes, for keyed BLAKE3; never shown.
    id
        16 hexadecimal digits that name the key and do not give it away.
    """

    secret: bytes = field(repr=False)
    id: str

    @classmethod
    def from_content(cls, content: bytes) -> IntegrityKey:
        """The key that a file's content stands for: at least 32 bytes, or hexadecimal digits."""
        written = _HEX.fullmatch(content)
        material = content
        if written is not None and len(written[1]) >= 2 * _LEAST_BYTES:
            material = bytes.fromhex(written[1].decode())
        secret = blake3(material, derive_key_context=_KEY_CONTEXT).digest()
        name = blake3(secret, derive_key_context=_ID_CONTEXT).digest(length=8)
        return cls(secret, name.hex())


def configured_integrity_key(config: Config) -> IntegrityKey | None:
    """The key that the configuration names; ``None`` if it names none.

    Raises
    ------
    ConfigError
        As :func:`load_integrity_key`.
    """
    return integrity_key(config.security.integrity_key)


def integrity_key(path: Path | None) -> IntegrityKey | None:
    """The key in the environment if there is one, or in a file if one is named.

    Raises
    ------
    ConfigError
        As :func:`load_integrity_key`; also if the environment holds something else.
    """
    written = os.environ.get(ENV_INTEGRITY_KEY, "").encode(errors="surrogateescape")
    if not written:
        return None if path is None else load_integrity_key(path)
    digits = _HEX.fullmatch(written)
    if digits is None or len(digits[1]) < 2 * _LEAST_BYTES:
        raise ConfigError(
            f"{ENV_INTEGRITY_KEY} does not hold {2 * _LEAST_BYTES} or more hexadecimal digits: "
            "make a key with: openssl rand -hex 32"
        )
    return IntegrityKey.from_content(written)


def load_integrity_key(path: Path) -> IntegrityKey:
    """Read a key file.

    Raises
    ------
    ConfigError
        If it cannot be read, others could read or change it, or it is too short.
    """
    try:
        # A pipe in the place of the file must not hold anybody up.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"security.integrity_key: {path} cannot be read ({error.strerror}): make it readable "
            f"for this user, or name another file; {_NEW_KEY}"
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"security.integrity_key: {path} is not a file: name the key's file")
        if found.st_mode & 0o077:
            raise ConfigError(
                f"security.integrity_key: the mode {found.st_mode & 0o7777:04o} of {path} lets "
                f"others use it: run: chmod 600 {path}"
            )
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"security.integrity_key: {path} belongs to user {found.st_uid}: "
                f"run: chown {os.geteuid()} {path}"
            )
        content = os.read(fd, _MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"security.integrity_key: {path} cannot be read ({error.strerror}): check its disk"
        ) from error
    finally:
        close_file(fd)
    if not _LEAST_BYTES <= len(content) <= _MOST_BYTES:
        size = f"{len(content)}" if len(content) < _LEAST_BYTES else f"more than {_MOST_BYTES:,}"
        raise ConfigError(
            f"security.integrity_key: {path} has {size} bytes, and a key has {_LEAST_BYTES} or "
            f"more: name another file; {_NEW_KEY}"
        )
    return IntegrityKey.from_content(content)


def namespace_with_integrity(namespace: Namespace, key: IntegrityKey | None) -> Namespace:
    """The namespace of the processes that have the key; unchanged without one."""
    if key is None:
        return namespace
    return Namespace.from_identity(
        {**namespace.identity, IDENTITY_FIELD: key.id}, namespace.display
    )

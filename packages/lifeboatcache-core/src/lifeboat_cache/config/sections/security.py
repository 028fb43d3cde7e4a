"""Who may share KV, and how it is protected."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr

from lifeboat_cache.config.sections.base import Key, Section
from lifeboat_cache.config.sections.values import to_path

__all__ = ["Security"]


class Security(Section):
    """Who may share KV, and how it is protected."""

    namespace_salt: Annotated[
        SecretStr,
        Key(allowed="text (put it in quotes)", example='"..."', secret=True),
    ] = Field(
        default=SecretStr(""),
        description="Engines share stored KV only if their salts are equal. Shown masked and "
        "never logged. The environment variable `LIFEBOAT_CACHE_NAMESPACE_SALT` overrides it.",
    )

    integrity_key: (
        Annotated[
            Path,
            BeforeValidator(to_path),
            Key(
                allowed="an absolute path; ~, $NAME and ${NAME} are expanded",
                example="/etc/lifeboat/integrity.key",
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="A file of mode 0600 with 32 random bytes or more, or 64 hexadecimal digits or "
        "more. With it stored KV is protected against tampering: checksums are keyed (BLAKE3, "
        "slower than the default, which guards against accidents only), and only engines with the "
        "same key share KV. Make one with: `(umask 077; openssl rand -hex 32 > FILE)`. The "
        "environment variable `LIFEBOAT_CACHE_INTEGRITY_KEY` overrides it.",
    )

    @property
    def salt_bytes(self) -> bytes:
        """The salt in UTF-8, empty if there is none."""
        return self.namespace_salt.get_secret_value().encode()

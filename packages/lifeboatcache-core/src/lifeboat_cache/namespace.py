"""Namespaces: whose KV a block is.

A namespace is the set of blocks that may be exchanged: same model, weights,
layout and sizes. It is named by the BLAKE3 digest of an identity document, which
is kept as JSON beside the data so that a person can see why two runs do or do
not share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import FormatError, IdentityError

__all__ = ["Namespace", "canonical_json"]

#: Separates namespace digests from every other BLAKE3 digest of this project.
_CONTEXT = "lifeboatcache 2026 namespace identity v1"


def canonical_json(value: object) -> bytes:
    """Encode ``value`` as JSON with exactly one spelling.

    Keys are sorted, no whitespace, ASCII only. Non-string keys and non-finite
    numbers are refused, because their spelling is not unique.

    Raises
    ------
    IdentityError
        If ``value`` holds something that JSON cannot say unambiguously.
    """
    plain = _plain(value, "identity")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _plain(value: object, where: str) -> object:
    """``value`` in dicts and lists of its own, or an error."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise IdentityError(f"{where} is {value}: write non-finite numbers as strings")
        return value
    if isinstance(value, Mapping):
        out = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise IdentityError(f"{where} has the key {key!r}: turn keys into strings")
            out[key] = _plain(item, f"{where}.{key}")
        return out
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise IdentityError(
        f"{where} is of type {type(value).__name__}: turn it into text, numbers, lists or mappings"
    )


@dataclass(frozen=True, eq=False)
class Namespace:
    """An identity document and its digest.

    Attributes
    ----------
    identity
        The JSON-able document that the digest covers.
    digest
        32 bytes, BLAKE3 of the canonical JSON of ``identity``.
    display
        Human-readable facts that do **not** enter the digest (model name, path).
    """

    identity: Mapping[str, Any]
    digest: bytes
    display: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_identity(
        cls, identity: Mapping[str, Any], display: Mapping[str, Any] | None = None
    ) -> Namespace:
        """Name an identity document.

        Raises
        ------
        IdentityError
            If the document is empty or not JSON-able without ambiguity.
        """
        if not identity:
            raise IdentityError("the identity is empty: say at least which engine and model it is")
        text = canonical_json(identity)
        digest = blake3(text, derive_key_context=_CONTEXT).digest()
        # Read back, so that the caller's later changes do not reach the document.
        return cls(identity=dict(json.loads(text)), digest=digest, display=dict(display or {}))

    @property
    def hex(self) -> str:
        """The digest as 64 hexadecimal digits."""
        return self.digest.hex()

    @property
    def directory(self) -> str:
        """Name of the namespace's directory: the first 32 hexadecimal digits."""
        return self.hex[:32]

    def to_json(self) -> str:
        """The document as it is kept in ``namespace.json``."""
        return json.dumps(
            {
                "format": 1,
                "digest": self.hex,
                "identity": self.identity,
                "display": self.display,
            },
            indent=2,
            sort_keys=True,
            default=str,  # only for people, in `display`
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Namespace:
        """Read ``namespace.json`` back and check the digest.

        Raises
        ------
        FormatError
            If the text is not such a document or the digest does not match.
        """
        try:
            document = json.loads(text)
            namespace = cls.from_identity(document["identity"], document.get("display"))
            stated = document["digest"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
            raise FormatError(
                f"not a namespace document ({exc}): purge its directory, or restore the file"
            ) from exc
        if stated != namespace.hex:
            raise FormatError(
                "the namespace document does not match its digest: purge its directory, "
                "or restore the file"
            )
        return namespace

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

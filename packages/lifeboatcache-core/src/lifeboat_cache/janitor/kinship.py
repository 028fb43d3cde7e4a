"""Which namespaces hold parts of the same blocks: those of the ranks of one engine."""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.namespace import Namespace, canonical_json

__all__ = ["kinship"]

#: The field of an identity that tells the ranks of one engine apart.
_RANK = "rank"


def kinship(namespace: Namespace | None, digest: bytes) -> int:
    """A number that namespaces share if their identities differ in ``rank`` only.

    Parameters
    ----------
    namespace
        The namespace's document, if it is known.
    digest
        Its digest.
    """
    text = digest
    if namespace is not None:
        try:
            text = canonical_json(_without_rank(namespace.identity))
        except (IdentityError, RecursionError):
            text = digest
    return int.from_bytes(blake3(text).digest(length=8), "little")


def _without_rank(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_rank(item) for key, item in value.items() if key != _RANK}
    if isinstance(value, (list, tuple)):
        return [_without_rank(item) for item in value]
    return value

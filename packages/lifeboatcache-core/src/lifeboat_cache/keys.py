"""Block keys: 32-byte BLAKE3 digests of an engine's full keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3

__all__ = ["KEY_BYTES", "block_keys", "salt_tag", "tag"]

#: Length of a block key in bytes.
KEY_BYTES = 32

#: Separates block keys from every other BLAKE3 digest of this project.
_CONTEXT = "lifeboatcache 2026 block key v1"

_PREFIX = blake3(derive_key_context=_CONTEXT)

_SALT_CONTEXT = "lifeboatcache 2026 cache salt tag v1"


def block_keys(engine_keys: Iterable[bytes], *, space: bytes = b"") -> list[bytes]:
    """Derive store keys from an engine's keys.

    Parameters
    ----------
    engine_keys
        The engine's full keys, of any length.
    space
        Name of the key space (a pool, an adapter's content, …). Equal engine
        keys in different spaces never meet.

    Returns
    -------
    list of bytes
        One 32-byte key per engine key, in order.
    """
    base = _PREFIX.copy()
    # The length goes first so that (space, key) pairs cannot run into each other.
    base.update(len(space).to_bytes(4, "little") + space)
    copy = base.copy
    return [copy().update(key).digest() for key in engine_keys]


def tag(value: bytes | None) -> int:
    """An 8-byte tag of ``value`` as an integer; 0 means unknown.

    Tags relate records to each other (parent, family, salt). They are hints for
    eviction and display, never a reason to serve a block.
    """
    if value is None:
        return 0
    number = int.from_bytes(blake3(value).digest(length=8), "little")
    return number or 1


def salt_tag(salt: str | None) -> int:
    """The tag of a request's cache salt, as records hold it; 0 for none.

    ``lifeboat-cache purge --salt`` makes the same one. Who guesses a salt can tell from the
    tag that it was right.
    """
    if not salt:
        return 0
    name = blake3(salt.encode(errors="surrogatepass"), derive_key_context=_SALT_CONTEXT)
    return int.from_bytes(name.digest(length=8), "little") or 1


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise ``ValueError`` unless every key has 32 bytes."""
    for size in set(map(len, keys)):
        if size != KEY_BYTES:
            raise ValueError(
                f"a block key has {size} bytes instead of {KEY_BYTES}: derive keys with "
                "lifeboat_cache.interface.block_keys"
            )

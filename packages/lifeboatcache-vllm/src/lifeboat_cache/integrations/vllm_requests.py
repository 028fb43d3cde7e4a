"""What the tier remembers of each request: its keys, and where they were found."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.interface import Lookup, block_keys, tag

__all__ = ["KeyFacts", "RequestKeys", "split_key"]

#: An answer older than so many seconds is asked for again (a request that waits
#: or was preempted may meanwhile find more).
_FRESH_S = 1.0

#: vLLM's offload key is a block hash and four bytes of group index.
_GROUP_BYTES = 4


def split_key(key: bytes) -> tuple[bytes, int]:
    """Block hash and group index of an offload key."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class KeyFacts:
    """Positions, groups and relations of a job's keys, as far as vLLM tells them.

    Attributes
    ----------
    positions
        End of each block in its prompt, in tokens; 0 = unknown.
    groups
        KV cache group of each block.
    families
        Tags shared by all groups' blocks of the same tokens.
    parents
        Tags of the block before, in the same group; 0 = unknown or none.
    """

    __slots__ = ("families", "groups", "parents", "positions")

    def __init__(self, keys: Sequence[bytes], known: dict[bytes, int]) -> None:
        self.positions = [known.get(key, 0) for key in keys]
        hashes, groups = zip(*map(split_key, keys), strict=True) if keys else ((), ())
        self.groups = list(groups)
        self.families = [tag(value) for value in hashes]
        self.parents = [0] * len(keys)
        order: dict[int, list[tuple[int, bytes]]] = {}
        for key, position in known.items():
            value, group = split_key(key)
            order.setdefault(group, []).append((position, value))
        before: dict[bytes, bytes] = {}
        for members in order.values():
            members.sort()
            for (_, parent), (_, child) in pairwise(members):
                before[child] = parent
        for number, value in enumerate(hashes):
            parent_hash = before.get(value)
            if parent_hash is not None:
                self.parents[number] = tag(parent_hash)


class RequestKeys:
    """One request's keys in the store.

    Parameters
    ----------
    context
        vLLM's ``ReqContext``.
    space
        Key space of the request (an adapter's content).
    """

    __slots__ = (
        "_answers",
        "_asked",
        "_context",
        "_open",
        "_step",
        "_store_keys",
        "space",
        "started",
    )

    def __init__(self, context: Any, space: bytes) -> None:
        self._context = context
        self.space = space
        self.started = time.monotonic()
        self._store_keys: dict[bytes, bytes] = {}
        self._answers: dict[bytes, int] = {}
        self._asked = 0.0
        self._step = -1
        self._open = True  # whether some answer was not final

    def positions(self) -> dict[bytes, int]:
        """Every key of the request with its end position, as far as vLLM recorded them.

        The attribute is private in vLLM, hence the guard; without it each key is
        looked up on its own.
        """
        found = getattr(self._context, "_offload_key_positions", None)
        return found if isinstance(found, dict) else {}

    def store_keys(self, keys: Collection[bytes]) -> list[bytes]:
        """Store keys of vLLM's keys; each is derived once per request."""
        missing = [key for key in keys if key not in self._store_keys]
        if missing:
            derived = block_keys(missing, space=self.space)
            self._store_keys.update(zip(missing, derived, strict=True))
        return [self._store_keys[key] for key in keys]

    def answer(
        self, key: bytes, step: int, ask: Callable[[list[bytes]], npt.NDArray[np.uint8]]
    ) -> int:
        """Answer for one key; asks the store once for all keys of the request.

        Parameters
        ----------
        key
            vLLM's key.
        step
            Number of the engine step. Within a step an answer stands.
        ask
            The store's lookup.
        """
        now = time.monotonic()
        known = self._answers.get(key)
        stale = step != self._step and (self._open or now - self._asked > _FRESH_S)
        self._step = step
        if known is None or stale:
            wanted = list(self.positions())
            if key not in self.positions():
                wanted.append(key)
            found = ask(self.store_keys(wanted)).tolist()
            self._answers = dict(zip(wanted, found, strict=True))
            self._asked, self._open = now, Lookup.RETRY in found
            known = self._answers[key]
        return known

    def forget(self, keys: Collection[bytes]) -> None:
        """These could not be loaded: they are misses for the rest of the request."""
        for key in keys:
            if key in self._answers:
                self._answers[key] = int(Lookup.MISS)

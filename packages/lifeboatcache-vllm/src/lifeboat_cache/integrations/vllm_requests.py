"""What the tier remembers of each request: its keys, and where they were found."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.vllm_promotions import Promotions
from lifeboat_cache.interface import Lookup, block_keys, tag

__all__ = ["KeyFacts", "RequestKeys", "split_key"]

#: An answer older than so many seconds is asked for again (a request that waits
#: or was preempted may meanwhile find more).
_FRESH_S = 1.0

#: The same while some answer is not final: steps without work follow each other fast.
_OPEN_FRESH_S = 0.02

#: vLLM's offload key is a block hash and four bytes of group index.
_GROUP_BYTES = 4


def split_key(key: bytes) -> tuple[bytes, int]:
    """Block hash and group index of an offload key."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


@dataclass(frozen=True, slots=True)
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

    positions: list[int]
    groups: list[int]
    families: list[int]
    parents: list[int]


class RequestKeys:
    """One request's keys in the store.

    Parameters
    ----------
    context
        vLLM's ``ReqContext``.
    space
        Key space of the request (an adapter's content).
    slots
        Chunks that the CPU tier holds.

    Attributes
    ----------
    promotions
        What vLLM was offered for the request.
    """

    __slots__ = (
        "_answers",
        "_asked",
        "_context",
        "_open",
        "_parents",
        "_related",
        "_step",
        "_store_keys",
        "promotions",
        "space",
        "started",
    )

    def __init__(self, context: Any, space: bytes, slots: int) -> None:
        self._context = context
        self.space = space
        self.promotions = Promotions(slots)
        self.started = time.monotonic()
        self._store_keys: dict[bytes, bytes] = {}
        self._parents: dict[bytes, bytes] = {}
        self._related = 0  # how many keys _parents was made from
        self._answers: dict[bytes, int] = {}
        self._asked = -_FRESH_S
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

    def facts(self, keys: Sequence[bytes]) -> KeyFacts:
        """What is known about some of the request's keys."""
        known = self.positions()
        if len(known) != self._related:  # once per prompt: vLLM knows all of its blocks early
            self._relate(known)
        split = [split_key(key) for key in keys]
        parents = [self._parents.get(key) for key in keys]
        return KeyFacts(
            positions=[known.get(key, 0) for key in keys],
            groups=[group for _, group in split],
            families=[tag(value) for value, _ in split],
            parents=[0 if parent is None else tag(parent) for parent in parents],
        )

    def _relate(self, known: dict[bytes, int]) -> None:
        """Find the block before each block of a group."""
        order: dict[int, list[tuple[int, bytes]]] = {}
        for key, position in known.items():
            order.setdefault(split_key(key)[1], []).append((position, key))
        self._parents = {}
        for members in order.values():
            members.sort()
            for (_, parent), (_, child) in pairwise(members):
                self._parents[child] = split_key(parent)[0]
        self._related = len(known)

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
        fresh = _OPEN_FRESH_S if self._open else _FRESH_S
        stale = step != self._step and now - self._asked > fresh
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
        self.promotions.failed(keys)
        for key in keys:
            if key in self._answers:
                self._answers[key] = int(Lookup.MISS)

"""What the tier remembers of each request: its keys, and where they were found."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.vllm_promotions import Promotions
from lifeboat_cache.interface import Lookup, block_keys, tag

__all__ = ["KeyFacts", "RequestKeys", "split_key"]

#: A miss older than so many seconds is asked for again (a request that waits or was
#: preempted may meanwhile find more).
_FRESH_S = 1.0

#: The same while some answer is not final: steps without work follow each other fast.
_OPEN_FRESH_S = 0.02

#: vLLM's offload key is a block hash and four bytes of group index.
_GROUP_BYTES = 4


_HIT, _RETRY = int(Lookup.HIT), int(Lookup.RETRY)


def split_key(key: bytes) -> tuple[bytes, int]:
    """Block hash and group index of an offload key."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def _alone(key: bytes) -> tuple[int, int, int]:
    """Group, family and unknown parent of a key."""
    value, group = split_key(key)
    return group, tag(value), 0


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
        "_facts",
        "_lasts",
        "_lost",
        "_open",
        "_related",
        "_settled",
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
        self._facts: dict[bytes, tuple[int, int, int]] = {}  # group, family, parent
        self._lasts: dict[int, tuple[int, int]] = {}  # of each group: position and family
        self._related = 0  # how many of vLLM's keys are in _facts
        self._answers: dict[bytes, int] = {}
        self._lost: set[bytes] = set()  # could not be loaded
        self._asked = 0.0
        self._step = -1
        self._settled = True  # whether all answers are hits: these stay
        self._open = False  # whether some answer was not final

    def positions(self) -> dict[bytes, int]:
        """Every key of the request with its end position, as far as vLLM recorded them.

        The attribute is private in vLLM, hence the guard; without it each key is
        looked up on its own.
        """
        found = getattr(self._context, "_offload_key_positions", None)
        return found if isinstance(found, dict) else {}

    def store_keys(self, keys: Collection[bytes]) -> list[bytes]:
        """Store keys of vLLM's keys; each is derived once per request."""
        names = self._store_keys
        try:
            return [names[key] for key in keys]
        except KeyError:
            missing = [key for key in keys if key not in names]
        names.update(zip(missing, block_keys(missing, space=self.space), strict=True))
        return [names[key] for key in keys]

    def facts(self, keys: Sequence[bytes]) -> KeyFacts:
        """What is known about some of the request's keys."""
        known = self.positions()
        if len(known) != self._related:  # once per prompt: vLLM knows all of its blocks early
            self._relate(known)
        related = self._facts
        rows = [related.get(key) or _alone(key) for key in keys]
        return KeyFacts(
            positions=[known.get(key, 0) for key in keys],
            groups=[row[0] for row in rows],
            families=[row[1] for row in rows],
            parents=[row[2] for row in rows],
        )

    def _relate(self, known: dict[bytes, int]) -> None:
        """Find the block before each block of a group; only of keys that are new."""
        if len(known) < self._related or not self._extend(
            islice(known.items(), self._related, None)
        ):
            # Not in the order of the prompt: once more, in that order.
            self._facts, self._lasts = {}, {}
            self._extend(sorted(known.items(), key=itemgetter(1)))
        self._related = len(known)

    def _extend(self, items: Iterable[tuple[bytes, int]]) -> bool:
        """Take in keys in the order of the prompt; false if they are not."""
        facts, lasts = self._facts, self._lasts
        for key, position in items:
            group, family, _ = _alone(key)
            before, parent = lasts.get(group, (0, 0))
            if position < before:
                return False
            facts[key] = (group, family, parent)
            lasts[group] = (position, family)
        return True

    def answer(
        self, key: bytes, step: int, ask: Callable[[list[bytes]], npt.NDArray[np.uint8]]
    ) -> int:
        """Answer for one key.

        The store is asked once for all keys of the request. Hits stand for the rest
        of it; the others are asked for again in a later step after a while.

        Parameters
        ----------
        key
            vLLM's key.
        step
            Number of the engine step. Within a step an answer stands.
        ask
            The store's lookup.
        """
        if step != self._step:
            self._step = step
            if not self._settled:
                self._renew(ask)
        known = self._answers.get(key)
        if known is None:
            wanted = [one for one in self.positions() if one not in self._answers]
            if key not in self.positions():
                wanted.append(key)
            self._ask(wanted, ask)
            known = self._answers[key]
        return known

    def _renew(self, ask: Callable[[list[bytes]], npt.NDArray[np.uint8]]) -> None:
        """Ask again for what was no hit, if that was long ago."""
        if time.monotonic() - self._asked > (_OPEN_FRESH_S if self._open else _FRESH_S):
            wanted = [
                key
                for key, answer in self._answers.items()
                if answer != _HIT and key not in self._lost
            ]
            self._settled, self._open = True, False
            self._ask(wanted, ask)

    def _ask(
        self, wanted: list[bytes], ask: Callable[[list[bytes]], npt.NDArray[np.uint8]]
    ) -> None:
        found = ask(self.store_keys(wanted)).tolist()
        self._answers.update(zip(wanted, found, strict=True))
        self._asked = time.monotonic()
        self._open = self._open or _RETRY in found
        self._settled = self._settled and found.count(_HIT) == len(found)

    def forget(self, keys: Collection[bytes]) -> None:
        """These could not be loaded: they are misses for the rest of the request."""
        self.promotions.failed(keys)
        lost = [key for key in keys if key in self._answers]
        self._lost.update(lost)
        self._answers.update(dict.fromkeys(lost, int(Lookup.MISS)))

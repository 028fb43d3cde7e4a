"""What vLLM was offered for one request, so that a prompt does not evict itself.

vLLM takes a slot of its CPU tier for each chunk that it is offered, and may take
it from a chunk of the same request that has been loaded and not been used yet. It
starts the request only when it finds all chunks at once, so a prompt larger than
the CPU tier would be loaded round and round, and never start.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Promotions"]


class Promotions:
    """Chunks of one request in the order in which they were first offered.

    Parameters
    ----------
    slots
        Chunks that the CPU tier holds.
    """

    __slots__ = ("_limit", "_loaded", "_order", "_shrunk", "_slots")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        """The request begins anew: it was preempted, or the CPU tier was emptied."""
        self._order: dict[bytes, int] = {}
        self._loaded: set[bytes] = set()
        self._limit = self._slots
        self._shrunk = -1  # the step in which the limit was last lowered

    def offer(self, key: bytes, step: int) -> bool:
        """Whether to offer a chunk that is on storage.

        The first chunks are offered, as many as the CPU tier holds. When a loaded
        one is asked for again, it was evicted before its use: from then on half as
        many are offered, so that the asking comes to an end.
        """
        if key in self._loaded:
            self._loaded.remove(key)
            if self._shrunk != step:
                self._shrunk = step
                self._limit = min(self._limit, len(self._order)) // 2
        return self._order.setdefault(key, len(self._order)) < self._limit

    def loading(self, keys: Iterable[bytes]) -> None:
        """These are being loaded for the request."""
        self._loaded.update(keys)

    def failed(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded."""
        self._loaded.difference_update(keys)

"""What an engine's adapter adds to the document of its store."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["attach", "facts_of"]

_facts: weakref.WeakKeyDictionary[Any, Callable[[], Mapping[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
_guard = threading.Lock()


def attach(store: object, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Have ``facts`` published with the document of ``store``.

    Parameters
    ----------
    store
        The block store.
    facts
        Called every few seconds on a thread of the store. Gives the texts ``engine``,
        ``version`` and ``model`` and numbers that only grow, as
        :class:`~lifeboat_cache.engines.prompts.PromptCounts` counts them, as far as they are
        known. It must not refer to the store, which it would keep from being freed.
    """
    with _guard:
        _facts[store] = facts


def facts_of(store: object) -> Mapping[str, Any]:
    """What the adapter of ``store`` says; nothing if there is none, or it fails."""
    with _guard:
        facts = _facts.get(store)
    try:
        return {} if facts is None else facts()
    except Exception:  # an adapter's fault: the rest is published
        return {}

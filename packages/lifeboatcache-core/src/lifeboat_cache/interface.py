"""The surface that adapters build on.

Everything an adapter needs from core is here, under one version. A release that
removes or changes something raises the major number; one that adds raises the
minor number.
"""

from __future__ import annotations

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.engines.prompts import PromptCounts
from lifeboat_cache.errors import InterfaceError
from lifeboat_cache.job import Job
from lifeboat_cache.keys import block_keys, salt_tag, tag
from lifeboat_cache.latency import JOB_BOUNDS
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Lookup, Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.counters import CounterSnapshot
from lifeboat_cache.store.opening import open_block_store
from lifeboat_cache.store.protocol import State, Store, TargetStatus
from lifeboat_cache.version import __version__

__all__ = [
    "INTERFACE_VERSION",
    "JOB_BOUNDS",
    "BlockBatch",
    "BlockBuffers",
    "BlockStore",
    "CounterSnapshot",
    "Job",
    "KVLayout",
    "Lookup",
    "Namespace",
    "Outcome",
    "PromptCounts",
    "State",
    "Store",
    "TargetStatus",
    "TensorLayout",
    "block_keys",
    "open_block_store",
    "require_interface",
    "salt_tag",
    "tag",
]

#: (major, minor) of this module.
INTERFACE_VERSION = (1, 4)


def require_interface(major: int, minor: int, adapter: str) -> None:
    """Make sure that this core offers what an adapter was built for.

    Raises
    ------
    InterfaceError
        If it does not; the message says which distribution to change.
    """
    have = INTERFACE_VERSION
    if have[0] == major and have[1] >= minor:
        return
    older = (have[0], have[1]) < (major, minor)
    upgrade = "lifeboatcache-core" if older else adapter
    raise InterfaceError(
        f"{adapter} needs interface {major}.{minor} of lifeboatcache-core, version {__version__} "
        f"has {have[0]}.{have[1]}: upgrade {upgrade}"
    )

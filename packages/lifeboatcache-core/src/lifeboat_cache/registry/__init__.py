"""The registry: which processes use this home directory, and what they are doing.

Every process that opens a store, and the agent, publishes a document of its own
under ``$LIFEBOAT_CACHE_HOME/run/`` and holds a lock as long as it lives. Nobody has to
be asked, and whoever is killed is noticed.
"""

from lifeboat_cache.registry.counts import Counts
from lifeboat_cache.registry.document import TargetFacts, agent_document
from lifeboat_cache.registry.extra import attach
from lifeboat_cache.registry.notice import stands_down
from lifeboat_cache.registry.processes import ProcessEntry, processes
from lifeboat_cache.registry.publisher import StorePublisher
from lifeboat_cache.registry.registration import Registration, Role
from lifeboat_cache.registry.totals import Snapshot, fold, snapshot

__all__ = [
    "Counts",
    "ProcessEntry",
    "Registration",
    "Role",
    "Snapshot",
    "StorePublisher",
    "TargetFacts",
    "agent_document",
    "attach",
    "fold",
    "processes",
    "snapshot",
    "stands_down",
]

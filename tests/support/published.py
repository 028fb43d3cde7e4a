"""Documents as engines and agents publish them: read, and made up for tests and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifeboat_cache.registry import Registration, TargetFacts, agent_document, snapshot

__all__ = ["MadeUpHome", "agent_facts", "engine_facts", "published_targets"]

GB = 10**9


def published_targets(home: Path) -> dict[str, dict[str, Any]]:
    """What the running server of a home directory publishes of its targets, by name."""
    found = snapshot(home)
    assert found is not None
    alive = [entry.document for entry in found.entries if entry.alive and entry.document]
    documents = [one for one in alive if one.get("kind") == "store"]
    return {item["name"]: item for document in documents for item in document.get("targets", ())}


def engine_facts(number: int = 0, *, of: int = 1, scale: float = 1.0, **changes: Any) -> Any:
    """The document of the engine with this number, which uses one ``of`` so many targets."""
    target = f"nvme{number % of}" if of > 1 else "nvme"
    lookups = round(20_000 * scale)
    hits = round(15_400 * scale)
    loaded = round(12_800 * scale)
    counts = {
        "lookups": lookups,
        "lookup_hits": hits,
        "loaded_blocks": loaded,
        "loaded_bytes": loaded * 3_145_728,
        "load_seconds": loaded * 0.0031,
        "stored_blocks": round(6_000 * scale),
        "stored_bytes": round(6_000 * scale) * 3_145_728,
        "store_seconds": round(6_000 * scale) * 0.009,
        "prompt_tokens": round(9_100_000 * scale),
        "cached_tokens": loaded * 256 + round(1_700_000 * scale),
        "served_tokens": loaded * 256,
        "saved_seconds": loaded * 256 / 5_200,
        "prefill_tokens": round(2_600_000 * scale),
        "prefill_seconds": 500.0 * scale,
        "recovered_blocks": 4_000,
        "recovery_seconds": 0.4,
        "bad_journal_entries": 0,
        "store_outcome:ok": round(6_000 * scale),
        "store_outcome:present": round(900 * scale),
        "load_outcome:ok": loaded,
        "encoded_blocks:fp8": round(6_000 * scale),
        "encoded_raw_bytes:fp8": round(6_000 * scale) * 3_145_728,
        "encoded_bytes:fp8": round(6_000 * scale) * 1_597_000,
        "decoded_blocks:fp8": loaded,
        "decoded_raw_bytes:fp8": loaded * 3_145_728,
        "decoded_bytes:fp8": loaded * 1_597_000,
    }
    counts.update(changes.pop("counts", {}))
    timed = {
        "tier_load_bucket:fp8:0.025": round(1_500 * scale),
        "tier_load_bucket:fp8:0.05": round(980 * scale),
        "tier_load_bucket:fp8:0.25": round(40 * scale),
        "tier_load_seconds:fp8": 61.0 * scale,
        "tier_store_bucket:fp8:0.1": round(1_400 * scale),
        "tier_store_bucket:fp8:0.5": round(90 * scale),
        "tier_store_seconds:fp8": 130.0 * scale,
    }
    looked_up = {
        "lookup_bucket:0.0001": round(2_900 * scale),
        "lookup_bucket:0.001": round(30 * scale),
        "lookup_seconds": 0.2 * scale,
    }
    name = f"{number:x}a7c51e90d34"[:12]
    return {
        "kind": "store",
        "state": "ready",
        "reason": "",
        "engine": {"name": "vllm", "version": "0.33.0", "model": "Llama-3.1-70B-Instruct"},
        "namespace": {"name": name, "model": "Llama-3.1-70B-Instruct"},
        "target": {"name": target, "location": f"/kv/{target}", "capacity_bytes": 400 * GB},
        "index": {"blocks": 62_500},
        "queue": {"jobs": 3, "pending_bytes": 64_000_000, "limit_bytes": 10 * GB},
        "recovery": {"done": True, "blocks": 61_000, "seconds": 0.42, "bad_entries": 0},
        "recent": {"seconds": 600.0, "store_dropped": {}, "load_failed": {}},
        "codecs": {
            "mode": "ladder",
            "rung": "local",
            "choices": [
                {"layout": "1", "codec": "fp8", "reason": "compression.ladder.local is fp8"}
            ],
            "guard": [
                {
                    "layout": "1",
                    "codec": "fp8",
                    "samples": 210,
                    "error": 0.0132,
                    "attention": 0.002,
                    "output": 0.004,
                    "ruled_out": False,
                }
            ],
        },
        "config": {"problem": "", "restart": []},
        "counters": [
            {"labels": {"namespace": name, "engine": "vllm", "target": target}, "values": counts},
            {"labels": {"tier": target}, "values": timed},
            {"labels": {"engine": "vllm"}, "values": looked_up},
        ],
    } | changes


def agent_facts(targets: int = 1, **changes: Any) -> dict[str, Any]:
    """The document of an agent that looks after so many targets."""
    found = []
    for number in range(targets):
        facts: dict[str, Any] = {
            "name": f"nvme{number}" if targets > 1 else "nvme",
            "location": f"/kv/nvme{number}" if targets > 1 else "/kv/nvme",
            "used_bytes": 311 * GB,
            "capacity_bytes": 400 * GB,
            "free_bytes": 1_290 * GB,
            "reserve_bytes": 20 * GB,
            "blocks": 125_000,
            "read": 6.4e9,
            "codecs": {
                "fp8": (120_000, 377 * GB, 191 * GB),
                "lossless": (5_000, 15 * GB, 10_600_000_000),
            },
            "counters": {
                "evicted_bytes": 55 * GB,
                "evicted_blocks": 22_000,
                "reclaimed_bytes": 57 * GB,
            },
        }
        found.append(TargetFacts(**facts | changes))
    return agent_document(found)


class MadeUpHome:
    """A home directory in which this process publishes for others.

    Parameters
    ----------
    home
        The directory.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._made: list[Registration] = []

    def publish(
        self, document: Mapping[str, Any], role: Any = "engine", *, since: float = 0.0
    ) -> Registration:
        """Publish a document, as a process that started so many seconds ago."""
        entry = Registration(self.home, role, describe=lambda: document)
        entry._started = time.time() - since
        entry.publish()
        self._made.append(entry)
        return entry

    def beat(self) -> None:
        """Publish again, as processes do every 2 s."""
        for entry in self._made:
            entry.publish()

    def close(self) -> None:
        """End all that publish."""
        for entry in self._made:
            entry.close()

"""One node: ``node_process.py ROOT SETTINGS``, told what to do by lines of JSON.

It has a host name of its own, a wall clock of its own, and leases that pass in seconds.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

SETTINGS = json.loads(sys.argv[2])

_NEW_UTS = 0x04000000
_libc = ctypes.CDLL(None, use_errno=True)


def _name_host(name: str) -> None:
    if _libc.unshare(_NEW_UTS) == 0:
        socket.sethostname(name)
    else:  # not allowed here: only what asks by way of Python sees the name
        socket.gethostname = lambda: name


def _set_clock(offset: float) -> None:
    now = time.time
    time.time = lambda: now() + offset


_name_host(SETTINGS["name"])
_set_clock(SETTINGS["clock"])

from lifeboat_cache.janitor import Janitor, JanitorPolicy, lease  # noqa: E402
from lifeboat_cache.janitor import catalogue as _catalogue  # noqa: E402
from lifeboat_cache.namespace import Namespace  # noqa: E402
from lifeboat_cache.store import keeper, storage  # noqa: E402
from lifeboat_cache.store.block_store import BlockStore  # noqa: E402
from lifeboat_cache.targets import (  # noqa: E402
    filesystem,
    journal_reader,
    segment_writer,
    server_clock,
    writer_lock,
)
from lifeboat_cache.targets.filesystem import FilesystemTarget  # noqa: E402
from lifeboat_cache.testing import StoreDriver  # noqa: E402

# Everything that takes minutes takes seconds; how the times relate to each other stays.
SCALE: float = SETTINGS["scale"]
for module, names in (
    (writer_lock, ("BEAT_S", "FENCE_S", "LEASE_S", "_WATCH_S", "_CERTAIN_S")),
    (lease, ("JANITOR_LEASE_S", "_BEAT_S")),
    (server_clock, ("_ASK_AGAIN_S",)),
    (journal_reader, ("_VISIBLE_S", "_FIRST_PROBE_S", "_LAST_PROBE_S")),
    (_catalogue, ("_VISIBLE_S", "_PATIENCE_S")),
    (keeper, ("_TAIL_S",)),
    (storage, ("_WRITER_RETRY_S",)),
):
    for name in names:
        setattr(module, name, getattr(module, name) * SCALE)
filesystem._REFUSAL_AGE_S = 0.1
segment_writer.SEGMENT_BYTES = SETTINGS.get("segment_bytes", segment_writer.SEGMENT_BYTES)

root = Path(sys.argv[1])
target = FilesystemTarget(root, kind="nfs", capacity=SETTINGS.get("capacity"))
namespace = Namespace.from_identity({"engine": "test", "model": "small"})
store = BlockStore(namespace, [target], io_workers=2)
store.wait_recovered(60)
driver = StoreDriver(store, size=SETTINGS["size"])
stopping = threading.Event()
reports: list[dict[str, Any]] = []


def look_after(settings: dict[str, Any]) -> None:
    """Run a janitor again and again, as an agent does."""
    policy = JanitorPolicy(margin_bytes=0, summary_s=1.0, **settings)
    one = Janitor(target, policy=policy)
    while not stopping.wait(0.2):
        report = one.run_once().to_json()
        wanted = ("busy", "holder", "evicted_blocks", "merged_segments", "writers_removed")
        reports.append({name: report[name] for name in (*wanted, "problems", "corrupt_blocks")})
    one.close()


def answer(command: str, given: Any) -> object:
    if command == "store":
        return [outcome.name for outcome in driver.store(range(*given))]
    if command == "load":
        return [outcome.name for outcome in driver.load(given)]
    if command == "lookup":
        return [found.name for found in driver.lookup(given)]
    if command == "janitor":
        threading.Thread(target=look_after, args=(given,), daemon=True).start()
        return None
    if command == "reports":
        return reports[given:]
    if command == "writers":
        (info,) = target.namespaces()
        return {writer.owner.split()[-1]: writer.alive for writer in info.writers}
    if command == "counters":
        found = store.counters()
        return {
            "bad": found.bad_entries,
            "load": found.load_outcomes,
            "store": found.store_outcomes,
        }
    if command == "hostname":
        return socket.gethostname()
    if command == "close":
        stopping.set()
        return store.close()
    raise ValueError(command)


print(json.dumps(store.state.value), flush=True)
for line in sys.stdin:
    command, given = json.loads(line)
    print(json.dumps(answer(command, given)), flush=True)

"""An engine process as far as the agent is concerned: ``agent_engine.py HOME LEASE``.

It is there in the registry, and asks for an agent when it is told to. Reads one
command a line from stdin and answers each with one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lifeboat_cache import kernels
from lifeboat_cache.agent import ensure_agent
from lifeboat_cache.registry import Registration

home, lease = Path(sys.argv[1]), float(sys.argv[2])
document: dict[str, object] = {"kind": "store"}
registration = Registration(home, "engine", describe=lambda: document)


def answer(command: str, rest: str) -> object:
    if command == "ensure":
        hung_after = float(rest or 60)
        status = ensure_agent(home, None, lease_s=lease, hung_after_s=hung_after)
        return [status.state.value, status.reason]
    if command == "target":
        document["target"] = json.loads(rest)
        return registration.publish()
    if command == "open":
        os.open(rest, os.O_RDWR | os.O_CREAT)
        os.set_inheritable(os.open(rest, os.O_RDWR), True)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return None
    if command == "kernels":
        return kernels.load(home)
    if command == "children":
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    raise ValueError(command)


print(json.dumps("there"), flush=True)
for line in sys.stdin:
    command, _, rest = line.strip().partition(" ")
    print(json.dumps(answer(command, rest)), flush=True)
registration.close()

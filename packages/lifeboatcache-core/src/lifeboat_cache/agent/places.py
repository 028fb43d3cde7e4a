"""Where an agent's files are, and for which node they stand.

::

    $LIFEBOAT_CACHE_HOME/run/agent-<node>.lock         locked by the agent of the node
    $LIFEBOAT_CACHE_HOME/run/agent-<node>.json         what it published last
    $LIFEBOAT_CACHE_HOME/run/agent-<node>.start        locked while one is being started
    $LIFEBOAT_CACHE_HOME/run/agent-<node>.starts.json  when it was started lately
    $LIFEBOAT_CACHE_HOME/agent.log                     its log, and agent.log.1 before that
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.agent.lock import AgentLock
from lifeboat_cache.registry.files import run_directory
from lifeboat_cache.registry.host import boot_id, pid_namespace

__all__ = ["AgentPlaces", "node_key"]

_NAME = re.compile(r"agent-(?P<node>[0-9a-f]{16})\.(?:lock|json|start|starts\.json)")

#: Files of a node that was not heard of for so many seconds are left behind.
_LEFT_BEHIND_S = 7 * 86400.0


def node_key() -> str:
    """A name for what one agent can look after (16 hexadecimal digits).

    That is one boot of one kernel and one view of its processes and mounts: a path
    of another container may be another directory here.
    """
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = ""
    node = "\0".join((boot_id() or socket.gethostname(), pid_namespace(), mounts))
    return hashlib.blake2b(node.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class AgentPlaces:
    """Paths of the agent of one home and node."""

    home: Path
    node: str

    @classmethod
    def of(cls, home: Path) -> AgentPlaces:
        """The places of this node below a home directory."""
        return cls(Path(home), node_key())

    @property
    def run(self) -> Path:
        """The directory that processes publish in."""
        return run_directory(self.home)

    @property
    def lock(self) -> Path:
        """Held by the agent. Whose file lies here is the agent, whoever holds a lock."""
        return self.run / f"agent-{self.node}.lock"

    @property
    def document(self) -> Path:
        """What the agent says about itself."""
        return self.run / f"agent-{self.node}.json"

    @property
    def start(self) -> Path:
        """Held by a process that starts the agent."""
        return self.run / f"agent-{self.node}.start"

    @property
    def history(self) -> Path:
        """When the agent was started lately."""
        return self.run / f"agent-{self.node}.starts.json"

    @property
    def log(self) -> Path:
        """The agent's log."""
        return self.home / "agent.log"

    def make(self) -> None:
        """Make the directories that are missing. Raises ``OSError``."""
        run_directory(self.home, create=True)

    def claim(self, *, replace: bool = False) -> AgentLock | None:
        """Become the agent; ``None`` if another one is.

        Parameters
        ----------
        replace
            Take the place of one that hangs.

        Raises
        ------
        OSError
            If the files cannot be made.
        """
        self.make()
        lock = AgentLock.acquire(self.lock, replace=replace)
        if lock is not None:
            # What the one before has published would be taken for this one's.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.document)
        return lock

    def remove_left_behind(self) -> None:
        """Remove files of nodes (boots, containers) that are long gone."""
        with contextlib.suppress(OSError):
            files: dict[str, list[os.DirEntry[str]]] = {}
            with os.scandir(self.run) as listing:
                for entry in listing:
                    match = _NAME.fullmatch(entry.name)
                    if match is not None and match["node"] != self.node:
                        files.setdefault(match["node"], []).append(entry)
            for entries in files.values():
                # A living agent writes its document every few seconds.
                newest = max(entry.stat(follow_symlinks=False).st_mtime for entry in entries)
                if time.time() - newest > _LEFT_BEHIND_S:
                    for entry in entries:
                        os.unlink(entry.path)

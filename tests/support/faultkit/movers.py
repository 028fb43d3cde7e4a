"""Movers of a test, and stores that use them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home, gone, until

from lifeboat_cache.agent.places import AgentPlaces
from lifeboat_cache.agent.starter import spawn
from lifeboat_cache.config.schema import Config, Tier
from lifeboat_cache.mover.places import MoverPlaces, target_key
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.registry.files import read_json
from lifeboat_cache.testing import StoreDriver

__all__ = ["Movers", "movers"]


class Movers:
    """Opens stores as an engine does, and starts movers as the agent does."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.namespace = Namespace.from_identity({"engine": "test", "model": "small"})
        self.stores: list[RemoteStore] = []

    def close(self) -> None:
        """Close all stores."""
        for store in self.stores:
            store.close(1.0)
        self.stores.clear()

    def tier(self, root: Path, **options: Any) -> Tier:
        """A tier on a directory."""
        name = options.pop("name", "share")
        settings = {"min_free_gb": 0.0, "timeout_s": 0.5, **options}
        return Tier.model_validate(
            {"name": name, "type": "filesystem", "path": str(root), **settings}
        )

    def open(
        self, tier: Tier, *, start: bool = True, wait: bool = True, **options: Any
    ) -> StoreDriver:
        """A driven store on a tier, whose mover is started."""
        size = options.pop("size", 8192)
        of = options.pop("of", self.namespace)
        config = Config.model_validate(options.pop("config", {}))
        store = RemoteStore(of, tier, home=self.home, config=config, **options)
        self.stores.append(store)
        if start:
            self.start(tier)
        if wait:
            assert store.wait_recovered(60), store.reason
        return StoreDriver(store, size=size)

    def start(self, tier: Tier, lease: float = 30.0) -> None:
        """Start the mover of a tier, if there is none. Somebody wants it."""
        places = self.places(tier)
        until(places.wanted, "somebody who wants the mover")
        arguments = ["--mover", target_key(tier), "--lease", str(lease)]
        problem = spawn(AgentPlaces.of(self.home), arguments, None)
        assert not problem, problem

    def places(self, tier: Tier) -> MoverPlaces:
        """Where the mover's files are."""
        return MoverPlaces.of(self.home, target_key(tier))

    def pid(self, tier: Tier) -> int:
        """The pid of the mover, once it has published it."""

        def published() -> int:
            found = read_json(self.places(tier).document)
            pid = found[0].get("pid", 0) if found else 0
            return 0 if gone(pid) else int(pid)

        return int(until(published, "a mover"))

    def kill(self, tier: Tier) -> None:
        """Kill the mover as the out-of-memory killer does."""
        pid = self.pid(tier)
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid), "the end of the mover")

    @contextlib.contextmanager
    def stopped(self, tier: Tier) -> Iterator[None]:
        """Meanwhile the mover does nothing at all."""
        pid = self.pid(tier)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def movers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_home: Path) -> Iterator[Movers]:
    """Movers of a home of their own; all are killed in the end."""
    with agent_home(tmp_path, monkeypatch, kernel_home) as home:
        rig = Movers(home)
        try:
            yield rig
        finally:
            rig.close()

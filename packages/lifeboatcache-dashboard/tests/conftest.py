"""A home directory with made-up processes, and the dashboard in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from devkit.shell import heed_interrupts
from fastapi.testclient import TestClient
from published import MadeUpHome

from lifeboat_cache.dashboard.access import Access
from lifeboat_cache.dashboard.app import create_app
from lifeboat_cache.dashboard.history import History
from lifeboat_cache.dashboard.source import Source

heed_interrupts()

Dashboard = Callable[..., TestClient]

SECRET = b"s" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def made(home: Path) -> Iterator[MadeUpHome]:
    """Publishes made-up documents."""
    made = MadeUpHome(home)
    yield made
    made.close()


@pytest.fixture
def dashboard(home: Path) -> Iterator[Dashboard]:
    """Starts a dashboard in this process; what it answers comes without a network."""
    clients: list[TestClient] = []

    def start(
        host: str = "127.0.0.1", token: str = "", base: str = "http://localhost:9400"
    ) -> TestClient:
        source = Source(home, None, History(home / "dashboard" / "history"))
        app = create_app(source, Access(host, 9400, token, SECRET))
        client = TestClient(
            app, base_url=base, follow_redirects=False, raise_server_exceptions=False
        )
        client.__enter__()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__()

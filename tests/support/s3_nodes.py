"""Nodes that share a bucket: each has a home directory, a mover and stores of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import agent_home, until
from faultkit.movers import Movers
from s3_server import ACCESS_KEY, S3Server

from lifeboat_cache.config.schema import Tier
from lifeboat_cache.mover.remote_store import RemoteStore
from lifeboat_cache.testing import StoreDriver

__all__ = ["S3Node", "facts", "s3_node"]


class S3Node(Movers):
    """One node.

    Parameters
    ----------
    home
        Its home directory.
    bucket, endpoint
        What it shares with others.
    """

    def __init__(self, home: Path, bucket: str, endpoint: str) -> None:
        super().__init__(home)
        self._bucket, self._endpoint = bucket, endpoint

    def archive(self, **options: Any) -> Tier:
        """The tier on the bucket."""
        return Tier.model_validate(
            {
                "name": "archive",
                "type": "s3",
                "bucket": self._bucket,
                "endpoint_url": self._endpoint,
                "path": str(self.home / "s3"),
                "min_free_gb": 0.0,
                "timeout_s": 20.0,
                **options,
            }
        )

    def waits(self) -> bool:
        """Whether blocks wait to be uploaded."""
        return any((self.home / "s3" / "staging").rglob("*.segment"))

    def upload(self) -> None:
        """Wait until everything that was stored is in the bucket."""
        until(lambda: not self.waits(), "everything in the bucket")


def facts(driver: StoreDriver) -> dict[str, Any]:
    """What the store says of its target."""
    store = driver.driven
    assert isinstance(store, RemoteStore)
    return dict(store.facts())


@contextlib.contextmanager
def s3_node(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel_home: Path,
    s3: S3Server,
    bucket: str,
    *,
    endpoint: str = "",
    key: str = ACCESS_KEY,
) -> Iterator[S3Node]:
    """A node; its processes are killed in the end."""
    place.mkdir(parents=True, exist_ok=True)
    for name, value in s3.environment(key).items():
        monkeypatch.setenv(name, value)
    with agent_home(place, monkeypatch, kernel_home) as home:
        node = S3Node(home, bucket, endpoint or s3.endpoint)
        # Credentials are handed on where the configuration has a bucket.
        config = {
            "storage": {
                "tiers": [node.archive().model_dump(mode="json", exclude_defaults=True)],
                "fallback_local": {"enabled": False},
            },
            "telemetry": {"prometheus": {"port": 0}},
            "dashboard": {"enabled": False},
        }
        (home / "lifeboat.yaml").write_text(json.dumps(config))  # JSON is YAML
        try:
            yield node
        finally:
            node.close()

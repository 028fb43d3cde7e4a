"""Settings and fixtures of core's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("lifeboat_cache.testing.target")

from lifeboat_cache.namespace import Namespace  # noqa: E402
from lifeboat_cache.store.block_store import BlockStore  # noqa: E402
from lifeboat_cache.targets.base import Target  # noqa: E402
from lifeboat_cache.targets.filesystem import FilesystemTarget  # noqa: E402
from lifeboat_cache.testing import StoreDriver  # noqa: E402

# The quick profile gives the same verdict every time; the full one looks further.
settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "full", parent=settings.get_profile("quick"), derandomize=False, max_examples=1000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture
def namespace() -> Namespace:
    return Namespace.from_identity({"engine": "test", "model": "small"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the target is; not made yet."""
    return tmp_path / "kv"


@pytest.fixture
def open_driver(root: Path, namespace: Namespace) -> Iterator[Callable[..., StoreDriver]]:
    """Opens a recovered store on the root, as a new process would; closes it at the end."""
    opened: list[BlockStore] = []

    def make(
        *,
        target: Target | None = None,
        size: int = 8192,
        cuts: tuple[int, ...] = (),
        layout: int = 0,
        of: Namespace = namespace,
        io_workers: int = 2,
    ) -> StoreDriver:
        store = BlockStore(of, [target or FilesystemTarget(root)], io_workers=io_workers)
        opened.append(store)
        assert store.wait_recovered(60)
        return StoreDriver(store, size=size, cuts=cuts, layout=layout)

    yield make
    for store in opened:
        store.close()

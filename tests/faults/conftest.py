"""Fixtures of the fault suite: real disks, real processes, the public interface only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faultkit.disks import Disk, FaultyDisk, faulty_disk, loop_disk, memory_disk
from hypothesis import HealthCheck, settings

from lifeboat_cache import kernels
from lifeboat_cache.interface import BlockStore, Namespace
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

# The same verdict every time; tests marked `full` look further.
settings.register_profile(
    "faults",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("faults")


#: Set to `off`, the whole suite runs with the twins of the kernels.
TEST_KERNELS = "LIFEBOAT_TEST_KERNELS"

_LOAD = kernels.load


@pytest.fixture(autouse=True)
def _kernels(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels as in production, in this process and its children, or nowhere."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    how = parameters.get("both_kernels", os.environ.get(TEST_KERNELS, "on"))
    on = how != "off"
    home = request.getfixturevalue("kernel_home") if on else tmp_path_factory.mktemp("no-kernels")
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.setattr(kernels, "load", _LOAD if on else lambda home=None: False)
    monkeypatch.setattr(kernels, "_ready", on)


@pytest.fixture(params=["on", "off"])
def both_kernels(request: pytest.FixtureRequest) -> None:
    """The test runs with kernels and without."""


@pytest.fixture
def namespace() -> Namespace:
    return Namespace.from_identity({"engine": "test", "model": "small"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the target is; not made yet."""
    return tmp_path / "kv"


@pytest.fixture
def open_driver(
    request: pytest.FixtureRequest, root: Path, namespace: Namespace
) -> Iterator[Callable[..., StoreDriver]]:
    """Opens a recovered store, as a new process would; closes it at the end."""
    for disk in ("loop", "small_disk", "faulty"):
        if disk in request.fixturenames:  # so that it is unmounted after the stores are closed
            request.getfixturevalue(disk)
    opened: list[BlockStore] = []

    def make(
        target: Target | Path | None = None,
        *,
        size: int = 8192,
        cuts: tuple[int, ...] = (),
        io_workers: int = 2,
    ) -> StoreDriver:
        if target is None or isinstance(target, Path):
            target = FilesystemTarget(target or root)
        store = BlockStore(namespace, [target], io_workers=io_workers)
        opened.append(store)
        assert store.wait_recovered(60)
        return StoreDriver(store, size=size, cuts=cuts)

    yield make
    for store in opened:
        store.close()


@pytest.fixture(params=["ext4", "xfs"])
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A real filesystem with O_DIRECT on a loop device; small, but not for XFS."""
    size = (24 << 20) if request.param == "ext4" else (300 << 20)
    with loop_disk(tmp_path, request.param, size) as disk:
        yield disk


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A disk of about 16 MiB."""
    if request.param == "tmpfs":
        with memory_disk(tmp_path, 16 << 20) as disk:
            yield disk
    else:
        with loop_disk(tmp_path, "ext4", 24 << 20) as disk:
            yield disk


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyDisk]:
    """A disk whose calls fail or hang on demand."""
    with faulty_disk(tmp_path) as disk:
        yield disk

"""Settings and fixtures of core's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("lifeboat_cache.testing.target")

from lifeboat_cache.namespace import Namespace  # noqa: E402
from lifeboat_cache.store.block_store import BlockStore  # noqa: E402
from lifeboat_cache.targets.base import Target  # noqa: E402
from lifeboat_cache.targets.filesystem import FilesystemTarget  # noqa: E402
from lifeboat_cache.testing import StoreDriver  # noqa: E402

# The same verdict every time; tests marked `full` look further.
settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("quick")


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


class DrivenStore:
    """A store in a process of its own, asked with :meth:`ask`."""

    def __init__(self, root: Path, size: int) -> None:
        program = Path(__file__).parent / "children" / "driven_store.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(root), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, numbers: Iterable[int] = ()) -> None:
        assert self.process.stdin is not None
        print(command, *numbers, file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process died with {self.process.wait()}"
        return json.loads(line)

    def ask(self, command: str, numbers: Iterable[int] = ()) -> Any:
        self.tell(command, numbers)
        return self.hear()

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_process(root: Path) -> Iterator[Callable[..., DrivenStore]]:
    """Starts stores on the root in processes of their own; kills them at the end."""
    started: list[DrivenStore] = []

    def start(size: int = 8192) -> DrivenStore:
        started.append(DrivenStore(root, size))
        return started[-1]

    yield start
    for driven in started:
        for stream in (driven.process.stdin, driven.process.stdout):
            if stream is not None:
                stream.close()
        driven.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    if os.geteuid():
        pytest.skip("mounting a small filesystem needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)

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
from devkit.shell import heed_interrupts
from hypothesis import HealthCheck, settings
from suites import compiled_kernels

pytest.register_assert_rewrite("lifeboat_cache.testing.target")

from lifeboat_cache import kernels  # noqa: E402
from lifeboat_cache.agent import AgentState, AgentStatus  # noqa: E402
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

heed_interrupts()


#: Set to `off`, the whole suite runs with the twins of the kernels.
TEST_KERNELS = "LIFEBOAT_TEST_KERNELS"

_LOAD = kernels.load


@pytest.fixture(scope="session")
def kernel_home(pytestconfig: pytest.Config) -> Path:
    """A home directory with compiled kernels, kept from one run of pytest to the next."""
    return compiled_kernels(pytestconfig)


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are on, as they are in production, unless a test or the caller wants them off."""
    wanted = not {"kernels_off", "both_kernels"}.intersection(request.fixturenames)
    if wanted and os.environ.get(TEST_KERNELS) != "off":
        _switch(request, monkeypatch, on=True)
    else:
        _switch(request, monkeypatch, on=False)


def _switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, *, on: bool) -> None:
    if on:
        monkeypatch.setattr(kernels, "load", _LOAD)
        request.getfixturevalue("kernel_home")
        monkeypatch.setattr(kernels, "_ready", True)
    else:
        monkeypatch.setattr(kernels, "load", lambda home=None: False)
        monkeypatch.setattr(kernels, "_ready", False)


@pytest.fixture(autouse=True)
def _no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of this process start no agent; tests of agents do so in others."""
    there = AgentStatus(AgentState.RUNNING)
    monkeypatch.setattr("lifeboat_cache.agent.ensure_agent", lambda home, **options: there)


@pytest.fixture
def kernels_off() -> None:
    """The test runs without kernels, as until an agent has compiled them."""


@pytest.fixture
def kernels_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs with kernels, whatever the caller wants for the suite."""
    _switch(request, monkeypatch, on=True)


@pytest.fixture(params=["kernels", "twins"])
def both_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The test runs twice: with kernels and without; whether they are on."""
    on = bool(request.param == "kernels")
    _switch(request, monkeypatch, on=on)
    return on


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


class RegistryProcess:
    """A process that uses the registry of a home directory; see its program."""

    def __init__(self, mode: str, home: Path) -> None:
        program = Path(__file__).parent / "children" / "registry_process.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program), mode, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process died with {self.process.wait()}"
        return line.strip()

    def ask(self, line: object) -> str:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.hear()

    def kill(self) -> None:
        """As the out-of-memory killer does."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_registry_process() -> Iterator[Callable[[str, Path], RegistryProcess]]:
    """Starts processes that use the registry of a home directory; kills them at the end."""
    started: list[RegistryProcess] = []

    def start(mode: str, home: Path) -> RegistryProcess:
        started.append(RegistryProcess(mode, home))
        return started[-1]

    yield start
    for process in started:
        process.kill()


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

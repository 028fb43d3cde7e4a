"""Fixtures of the tests across packages and against real engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from devkit.shell import heed_interrupts
from sglang_server import SglangServer, StartSglang
from suites import compiled_kernels
from vllm_server import StartServer, VllmServer

if TYPE_CHECKING:
    from s3_server import S3Server

heed_interrupts()


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of the small real model that ``dev.py`` made."""
    directory = os.environ.get("LIFEBOAT_TEST_MODEL")
    if directory is None:
        pytest.skip("needs a real engine: run `python3 tools/dev.py test`")
    return Path(directory)


@pytest.fixture(scope="session")
def kernel_home(pytestconfig: pytest.Config) -> Path:
    """A home directory with compiled kernels, kept from one run of pytest to the next."""
    return compiled_kernels(pytestconfig)


@pytest.fixture
def home(tmp_path: Path, kernel_home: Path) -> Path:
    """A home directory for servers, with the kernels that an agent would have compiled."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "kernels").symlink_to(kernel_home / "kernels")
    return home


@pytest.fixture
def start_server(model: Path, tmp_path: Path) -> Iterator[StartServer]:
    """A function that starts servers; what it started is stopped in the end."""
    with ExitStack() as stack:
        count = 0

        def start(**options: Any) -> VllmServer:
            nonlocal count
            count += 1
            options.setdefault("log", tmp_path / f"server-{count}.log")
            return stack.enter_context(VllmServer(options.pop("model", model), **options))

        yield start


@pytest.fixture
def start_sglang(model: Path, tmp_path: Path) -> Iterator[StartSglang]:
    """A function that starts SGLang servers; what it started is stopped in the end."""
    with ExitStack() as stack:
        count = 0

        def start(**options: Any) -> SglangServer:
            nonlocal count
            count += 1
            options.setdefault("log", tmp_path / f"server-{count}.log")
            return stack.enter_context(SglangServer(options.pop("model", model), **options))

        yield start


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for all tests; each makes buckets of its own."""
    from s3_server import s3_server  # what it needs is in one environment only

    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server

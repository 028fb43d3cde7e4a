"""Commands on a ladder of which one target hangs: they say so, and go on with the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faultkit.disks import EVERYTHING_HANGS, FaultyDisk

from lifeboat_cache.testing import StoreDriver

#: Runs ``lifeboat-cache`` with less patience.
_CLI = (
    "import sys\n"
    "from lifeboat_cache.mover import apart\n"
    "apart.PATIENCE_S = 1.0\n"
    "from lifeboat_cache.cli.main import main\n"
    "sys.exit(main())\n"
)

#: All is well but for the payloads.
PAYLOADS = [{"op": "read", "match": "segment$", "do": "hang", "bytes": [4096, 1 << 40]}]

SILENT = "has not answered for 1 s"


@pytest.fixture
def ladder(tmp_path: Path, faulty: FaultyDisk, open_driver: Callable[..., StoreDriver]) -> Path:
    """The configuration of a ladder whose first target is on the FUSE filesystem."""
    for place in (faulty.root, tmp_path / "local"):
        driver = open_driver(place)
        assert all(outcome.good for outcome in driver.store(range(8)))
        driver.driven.close()
    config = tmp_path / "lifeboat.yaml"
    config.write_text(
        "storage:\n"
        "  fallback_local: {enabled: false}\n"
        "  tiers:\n"
        f"    - {{name: share, type: filesystem, path: {faulty.root}, min_free_gb: 0}}\n"
        f"    - {{name: near, type: filesystem, path: {tmp_path / 'local'}, min_free_gb: 0}}\n"
    )
    return config


def run(config: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # It ends, and so does whoever holds its output: not only its own process.
    return subprocess.run(
        [sys.executable, "-c", _CLI, command[0], "--config", str(config), *command[1:]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_commands_while_all_is_well(ladder: Path) -> None:
    for command, said in (
        ("ls", "near: "),
        ("check", "8 blocks verified"),
        ("gc", "near: evicted 0 blocks"),
    ):
        done = run(ladder, command)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count(said.replace("near", "share")) == done.stdout.count(said) > 0
    assert run(ladder, "purge", "--all", "--yes").returncode == 0
    assert "BLOCKS" not in run(ladder, "ls").stdout


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("ls",), 2, "BLOCKS"),
        (("ls", "--json"), 2, '"blocks": 8'),
        (("check",), 2, "8 blocks verified"),
        (("gc",), 2, "near: evicted 0 blocks"),
        (("gc", "--dry-run"), 2, "near: would evict 0 blocks"),
        (("purge", "--all", "--yes"), 2, "removed 3 files, 8 blocks"),
        (("doctor",), 1, "near: writable"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_command_on_a_ladder_whose_first_target_hangs(
    ladder: Path, faulty: FaultyDisk, command: tuple[str, ...], code: int, said: str
) -> None:
    faulty.rules(*EVERYTHING_HANGS)
    done = run(ladder, *command)
    assert done.returncode == code
    assert SILENT in (done.stdout if command == ("doctor",) else done.stderr)
    assert str(faulty.root) in done.stdout + done.stderr
    assert said in done.stdout


def test_target_that_hangs_while_it_is_checked(ladder: Path, faulty: FaultyDisk) -> None:
    faulty.rules(*PAYLOADS)
    done = run(ladder, "check", "--json")
    assert done.returncode == 2
    share, near, _ = json.loads(done.stdout)["targets"]
    assert SILENT in share["problem"]
    assert near["namespaces"][0]["records"]["verified"] == 8


def test_server_that_takes_no_calls_any_more(ladder: Path, faulty: FaultyDisk) -> None:
    with faulty.dead():
        done = run(ladder, "ls")
    assert done.returncode == 2
    assert SILENT in done.stderr
    assert "BLOCKS" in done.stdout

"""Commands on a ladder of which one target hangs: they say so, and go on with the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import until
from faultkit.disks import EVERYTHING_HANGS, FaultyDisk

from lifeboat_cache.testing import StoreDriver

#: Runs ``lifeboat-cache`` with less patience.
_CLI = (
    "import sys\n"
    "from lifeboat_cache.mover import apart\n"
    "apart.PATIENCE_S = float(sys.argv.pop(1))\n"
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


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start(config: Path, *command: str, patience: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            _CLI,
            str(patience),
            command[0],
            "--config",
            str(config),
            *command[1:],
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(config: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # It ends, and so does whoever holds its output: not only its own process.
    with start(config, *command) as process:
        try:
            output, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


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


SMALL = ("--size", "1MiB", "--block-size", "256KiB", "--no-compile", "--json")


def test_bench_of_a_ladder_whose_first_target_hangs(ladder: Path, faulty: FaultyDisk) -> None:
    faulty.rules(*EVERYTHING_HANGS)
    done = run(ladder, "bench", *SMALL, "--quick")
    assert done.returncode == 0, done.stderr
    assert "hot load, throughput" in {
        json.loads(line)["metric"] for line in done.stdout.splitlines()
    }
    for more in (("--target", "share"), ("--path", str(faulty.root))):
        done = run(ladder, "bench", *SMALL, "--quick", *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert SILENT in done.stderr


@pytest.mark.parametrize("interrupted", [False, True], ids=["hangs", "is-interrupted"])
def test_bench_in_the_middle(ladder: Path, faulty: FaultyDisk, interrupted: bool) -> None:
    # Who works on for long is seen to do so every two seconds.
    command = ("bench", *SMALL, "--rounds", "100000", "--target", "share")
    with start(ladder, *command, patience=10) as process:

        def at_work() -> bool:
            assert process.poll() is None, process.communicate()
            return bool(list(faulty.backing.glob("kv/.bench-*/raw")))

        until(at_work, "the benchmark to be at work")
        if interrupted:
            process.send_signal(signal.SIGTERM)
        else:
            faulty.rules(*EVERYTHING_HANGS)
        _, errors = process.communicate(timeout=100)
    if interrupted:
        assert process.returncode == 130
        assert not list(faulty.root.glob(".bench-*"))
    else:
        assert process.returncode == 2
        assert "has not answered for 10 s" in errors


_SELFTEST = """
import argparse, json, sys
from lifeboat_cache.selftest.place import run_trial

class Trial:
    def __init__(self, scratch, log):
        self.scratch, self.steps, self.facts = scratch, [], {}

    def run(self):
        self.facts["settings"] = (self.scratch / "lifeboat.yaml").read_text()

args = argparse.Namespace(config=sys.argv[1], keep=False)
print(json.dumps(run_trial(args, Trial, engine="none", module="json").to_json()))
"""


def test_selftest_keeps_away_from_a_target_that_hangs(ladder: Path, faulty: FaultyDisk) -> None:
    faulty.rules(*EVERYTHING_HANGS)
    done = subprocess.run(
        [sys.executable, "-c", _SELFTEST, str(ladder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    facts = json.loads(done.stdout)["facts"]
    assert facts["target"] == "share"
    assert not facts["on_file_system_of_target"]
    assert str(faulty.mount) not in facts["settings"]


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

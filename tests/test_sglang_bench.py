"""The benchmarks of SGLang print the same JSON lines as the others; with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_llama
from bench_rows import conforms

ROOT = Path(__file__).parents[1]
NAME = "sglang_backend"


def test_backend(tmp_path: Path) -> None:
    paths = (ROOT / "tools", ROOT / "tests" / "support", ROOT / "bench" / "support")
    options = ["--json", "--sizes", "128KiB", "--mib", "2", "--rounds", "7", "--codecs", "raw"]
    root = tmp_path / "root"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "bench" / "sglang_backend.py"), *options,
            "--root", str(root), "--no-compile",
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LIFEBOAT_CACHE_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        conforms(row)
        assert row["bench"] == NAME
    # A further limit has a row of its own, without the peer.
    beside = {row["metric"] for row in rows if row["peer_name"] == "HiCacheFile"}
    assert beside >= {"set", "get cold", "get hot", "stored"}
    assert beside == {row["metric"] for row in rows}
    assert {row["peer_name"] for row in rows} <= {"HiCacheFile", None}
    assert not list(root.iterdir())


@pytest.mark.engine
@pytest.mark.full
def test_restart_of_the_mlx_backend(tmp_path: Path, home: Path) -> None:
    paths = (ROOT / "tools", ROOT / "tests" / "support", ROOT / "bench" / "support")
    tiny_llama.write(tmp_path / "tiny")
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "bench" / "sglang_mlx.py"), "--json", "--rounds", "7",
            "--model", str(tmp_path / "tiny"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)]),
            "LIFEBOAT_CACHE_HOME": str(home),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    (row,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    conforms(row)
    assert row["bench"] == "sglang_mlx"
    assert row["peer_name"] == "computed again"

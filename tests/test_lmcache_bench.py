"""The benchmark of LMCache's adapters prints the same JSON lines as the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_rows import conforms

ROOT = Path(__file__).parents[1]
NAME = "lmcache_adapter"


@pytest.mark.full
def test_adapter(tmp_path: Path) -> None:
    paths = (ROOT / "tools", ROOT / "tests" / "support", ROOT / "bench" / "support")
    root = tmp_path / "root"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "bench" / "lmcache_adapter.py"), "--json", "--rounds", "7",
            "--sizes", "1MiB", "--in-flight", "4", "--parties", "raw", "fs",
            "--root", str(root), "--no-compile",
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)]),
            "LIFEBOAT_CACHE_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows
    for row in rows:
        conforms(row)
        assert row["bench"] == NAME
    assert not list(root.iterdir())

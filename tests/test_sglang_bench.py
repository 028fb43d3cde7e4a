"""The benchmark of SGLang's backend prints the same JSON lines as the others; with a tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
        assert row["peer_name"] == "HiCacheFile"
    assert {row["metric"] for row in rows} >= {"set", "get cold", "get hot", "stored"}
    assert not list(root.iterdir())

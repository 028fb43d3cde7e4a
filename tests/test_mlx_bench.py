"""The benchmark of prompt caches prints the same JSON lines as the others; with a tiny size."""

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


def test_prompt_cache(tmp_path: Path) -> None:
    paths = (ROOT / "tools", ROOT / "tests" / "support", ROOT / "bench" / "support")
    root = tmp_path / "root"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "bench" / "mlx_prompt_cache.py"), "--json",
            "--tokens", "128", "--rounds", "7", "--root", str(root), "--no-compile",
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)]),
            "LIFEBOAT_CACHE_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        conforms(row)
        assert row["bench"] == "mlx_prompt_cache"
    stored = next(row for row in rows if row["metric"] == "stored")
    assert stored["ours"] < stored["peer"]
    assert not list(root.iterdir())


@pytest.mark.full
def test_first_token(tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "root"
    tiny_llama.write(model)
    paths = (ROOT / "tools", ROOT / "tests" / "support", ROOT / "bench" / "support")
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "bench" / "mlx_first_token.py"), "--json", "--rounds", "7",
            "--tokens", "100", "--model", str(model), "--root", str(root), "--no-compile",
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)]),
            "LIFEBOAT_CACHE_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["peer_name"] for row in rows} == {"computed", "load_prompt_cache"}
    for row in rows:
        conforms(row)
        assert row["bench"] == "mlx_first_token"
        assert "100 tokens, 64 restored" in row["case"]
    assert not list(root.iterdir())

"""SGLang's real controller and host pools: what one process stores another restores."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sglang_rig
import tiny_llama
from sglang_rig import Case

from lifeboat_cache import kernels

#: What a prompt's pages may lie in; each process attaches to all of them, one by one.
CASES = (
    Case(pages=300, mamba=True, seed=1),
    Case(pages=300, mamba=True, layout="page_first", seed=2),
    Case(pages=300, layout="layer_first", seed=3),
    Case(kind="mla", dim=80, pages=200, seed=4),
    Case(kind="mla", dim=80, pages=200, layout="layer_first", seed=5),
    Case(kind="mla", dim=80, pages=200, mamba=True, layout="page_first", seed=6),
    Case(tokens=1, pages=4000, layout="page_first", seed=7),
    Case(tokens=1, pages=4000, layout="layer_first", mamba=True, seed=8),
    Case(pages=100, zero_copy=False, seed=9),
)

CONFIG = """\
agent: {autostart: false}
storage:
  fallback_local: {min_free_gb: 1}
compression: {ladder: {local: raw}}
"""


@pytest.fixture
def home(tmp_path: Path, kernel_home: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "kernels").symlink_to(kernel_home / "kernels")
    (home / "lifeboat.yaml").write_text(CONFIG)
    return home


def run(
    home: Path, model: Path, do: str, cases: tuple[Case, ...], **variables: str
) -> list[dict[str, Any]]:
    """Store or restore cases in a process of their own."""
    task, results = home.parent / f"{do}.json", home.parent / f"{do}-results.json"
    task.write_text(
        json.dumps(
            {"do": do, "model": str(model), "cases": [dataclasses.asdict(one) for one in cases]}
        )
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LIFEBOAT_")},
        "LIFEBOAT_CACHE_HOME": str(home),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **variables,
    }
    subprocess.run(
        [sys.executable, sglang_rig.__file__, str(task), str(results)],
        env=environment,
        check=True,
        timeout=900,
    )
    found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


def everything(case: Case) -> dict[str, Any]:
    return {
        "hit_pages": case.pages,
        "loaded_pages": case.pages,
        "same": True,
        "state": case.mamba,
    }


def test_thousands_of_pages_are_the_same_bytes_in_another_process(
    home: Path, tmp_path: Path
) -> None:
    assert kernels.ready()
    model = tmp_path / "tiny"
    tiny_llama.write(model)
    time.sleep(1.0)  # clocks of files and of processes are coarse, and it must be the older one
    stored = run(home, model, "store", CASES)
    assert [one["kept"] for one in stored] == [case.pages for case in CASES], stored
    # The other interface, and where pages are alike the other layout.
    others = tuple(
        case.but(
            zero_copy=not case.zero_copy if case.kind != "mla" else case.zero_copy,
            layout={"layer_first": "page_first_direct"}.get(case.layout, case.layout)
            if not case.mamba
            else case.layout,
        )
        for case in CASES
    )
    found = run(home, model, "restore", (*CASES, *others))
    assert found == [everything(case) for case in (*CASES, *others)]
    # Weights that changed at the same path, under the same name: nothing.
    tiny_llama.write(model, seed=1)
    found = run(home, model, "restore", CASES)
    assert {one["hit_pages"] for one in found} == {0}

"""The benchmark of a tier's calls runs, and its lines can be read by a program."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from devkit import bench


def test_each_call_is_measured_beside_the_peer(
    tmp_path: Path,
    model: Path,
    kernel_home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "bench" / "home"
    home.mkdir(parents=True)
    (home / "kernels").symlink_to(kernel_home / "kernels")
    here = SimpleNamespace(make=lambda: Path(sys.executable))
    monkeypatch.setattr(bench, "recipes", SimpleNamespace(vllm=lambda: here))
    monkeypatch.setattr(bench, "make_model", lambda: model)
    monkeypatch.setattr(bench, "dev_home", lambda: tmp_path)
    options = ["--json", "--chunks", "16", "--rounds", "7", "--root", str(tmp_path / "root")]
    code = bench.run_bench("vllm_submit", options)
    out, err = capfd.readouterr()
    assert code == 0, err
    rows = {row["metric"]: row for row in map(json.loads, out.splitlines())}
    for name in ("first look, stored prompt", "submit_store", "submit_load", "end of request"):
        row = rows[f"{name}, CPU per chunk"]
        assert row["ours"] > 0
        low, high = row["interval"]["ratio_peer"]
        assert 0 < low <= row["ratio_peer"] <= high
    assert rows["second look, CPU per chunk"]["limit_name"] == "a call that does nothing"
    assert not list((tmp_path / "root").glob("*"))

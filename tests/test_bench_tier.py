"""The engine-free benchmark runs, and its lines can be read by a program."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from devkit import bench


def test_names_are_those_of_the_files() -> None:
    assert {"vllm_overhead", "vllm_restore", "vllm_tier"} <= set(bench.bench_names())


@pytest.mark.full
def test_a_small_run_measures_ours_beside_the_peer_and_the_limits(
    tmp_path: Path,
    kernel_home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    home = tmp_path / "bench" / "home"
    home.mkdir(parents=True)
    (home / "kernels").symlink_to(kernel_home / "kernels")
    # Nothing is set up here, and a benchmark that somebody runs is not waited for.
    here = SimpleNamespace(make=lambda: Path(sys.executable))
    monkeypatch.setattr(bench, "recipes", SimpleNamespace(vllm=lambda: here))
    monkeypatch.setattr(bench, "make_model", lambda: tmp_path)
    monkeypatch.setattr(bench, "dev_home", lambda: tmp_path)
    options = [
        "--json",
        "--sizes",
        "64KiB",
        "--mib",
        "1",
        "--rounds",
        "7",
        "--prompts",
        "1",
        "--no-compile",
    ]
    code = bench.run_bench("vllm_tier", [*options, "--root", str(tmp_path / "root")])
    out, err = capfd.readouterr()
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    throughput = [row for row in rows if row["metric"].endswith("throughput")]
    limits = {(row["case"].split(", ")[0], row["limit_name"]) for row in throughput}
    assert len(limits) == 6
    assert ("shm", "preadv and pwritev") in limits
    assert ("disk", "preadv from the page cache") in limits
    assert ("disk", "memcpy") in limits
    for metric in ("store", "cold load", "hot load", "cold load once asked", "hot load once asked"):
        # On both media, with the main thread idle and busy.
        found = [row for row in throughput if row["metric"] == f"{metric}, throughput"]
        assert len(found) == (8 if metric.startswith("hot") else 4)
        if metric.endswith("once asked"):  # the same bytes in less time, beside the same limit
            whole = [
                row
                for row in throughput
                if row["metric"] == f"{metric.removesuffix(' once asked')}, throughput"
            ]
            for part, all_of_it in zip(found, whole, strict=True):
                assert part["ours"] > all_of_it["ours"]
                assert part["limit"] == all_of_it["limit"]
    for row in rows:
        assert row["peer_name"] == "vLLM's fs tier"
        if row["peer"]:
            low, high = row["interval"]["ratio_peer"]
            assert 0 < low <= row["ratio_peer"] <= high
    kept = [row for row in rows if row["metric"].endswith("keeps")]
    assert {row["metric"] for row in kept} == {
        f"{what}, main thread keeps" for what in ("store", "cold load", "hot load")
    }
    assert all("main busy" in row["case"] for row in kept)
    first = [row for row in rows if row["metric"].endswith("answered at the first call")]
    assert [row["ours"] for row in first] == [1.0] * 8
    assert not list((tmp_path / "root").iterdir())


def test_the_steps_of_a_load_come_one_after_the_other(
    tmp_path: Path,
    kernel_home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    home = tmp_path / "bench" / "home"
    home.mkdir(parents=True)
    (home / "kernels").symlink_to(kernel_home / "kernels")
    here = SimpleNamespace(make=lambda: Path(sys.executable))
    monkeypatch.setattr(bench, "recipes", SimpleNamespace(vllm=lambda: here))
    monkeypatch.setattr(bench, "make_model", lambda: tmp_path)
    monkeypatch.setattr(bench, "dev_home", lambda: tmp_path)
    options = ["--json", "--sizes", "64KiB", "--mib", "1", "--rounds", "7", "--main", "busy"]
    place = tmp_path / "root"
    code = bench.run_bench("vllm_timeline", [*options, "--no-compile", "--root", str(place)])
    out, err = capfd.readouterr()
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["metric"] for row in rows] == [
        "load handed over",
        "planning",
        "first reads",
        "last reads",
        "reads done",
        "scheduler knows",
    ]
    reached = [row["ours"] for row in rows]
    assert reached == sorted(reached)
    assert rows[-1]["limit_name"] == "preadv"
    assert rows[-1]["ratio_limit"] > 0
    assert not list(place.iterdir())

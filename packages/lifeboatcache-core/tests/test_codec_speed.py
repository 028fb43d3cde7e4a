"""Measured speeds of codecs and targets."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from lifeboat_cache import kernels
from lifeboat_cache.codecs import speed
from lifeboat_cache.codecs.layout import DType
from lifeboat_cache.codecs.names import CODEC_NAMES, FP8, LBQ3, LOSSLESS, RAW
from lifeboat_cache.codecs.rates import CodecRate, Rates
from lifeboat_cache.codecs.speed import (
    codecs_measured,
    probe_target,
    read_codec_rates,
    read_target_rate,
    write_codec_rates,
    write_target_rate,
)
from lifeboat_cache.kernels import cache
from lifeboat_cache.targets.direct import supports_direct


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cache, "key", lambda: "f" * 32)
    monkeypatch.setattr(kernels, "_ready", True)
    return "f" * 32


def segment(root: Path, size: int, number: int = 0) -> Path:
    path = root / ("a" * 64) / f"{'0' * 32}.{number:08d}.segment"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def all_rates() -> dict[tuple[DType, int], CodecRate]:
    return {
        (dtype, codec): CodecRate(1e9 + codec, 1.0)
        for dtype in speed.MEASURED_DTYPES
        for codec in range(len(CODEC_NAMES))
    }


# --- codecs ----------------------------------------------------------------------------------


def test_raw_costs_its_checksum(both_kernels: bool) -> None:
    rates = speed.measure_codecs((RAW,))
    assert set(rates) == {(dtype, RAW) for dtype in speed.MEASURED_DTYPES}
    for rate in rates.values():
        assert rate.ratio == 1.0
        assert rate.decode > 1e6


def test_the_sample_looks_like_kv() -> None:
    layout, payload = speed._layout("bfloat16"), speed._sample("bfloat16")
    assert payload.nbytes == layout.nbytes == 4 << 20
    assert all(tensor.role in ("key", "value") for tensor in layout.tensors)
    values = (payload.view("<u2").astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all()
    exponents = np.bincount(payload.view("<u2") >> 7 & 0xFF, minlength=256) / (payload.nbytes / 2)
    used = exponents[exponents > 0]
    # As measured on KV of real models: 2.8 to 2.9 bits.
    assert 2 < -(used * np.log2(used)).sum() < 4


def test_they_are_measured_once_for_each_kernel(
    home: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_codec_rates(home) == {}
    assert not codecs_measured(home)
    some = {("bfloat16", FP8): CodecRate(5e9, 1.97), ("float16", LOSSLESS): CodecRate(2e9, 1.1)}
    monkeypatch.setattr(speed, "measure_codecs", lambda: some)
    write_codec_rates(home)
    assert read_codec_rates(home) == some
    assert not codecs_measured(home), "not all of them"
    found = all_rates()
    monkeypatch.setattr(speed, "measure_codecs", lambda: found)
    speed.ensure_codec_rates(home)
    assert read_codec_rates(home) == found
    assert codecs_measured(home)
    monkeypatch.setattr(speed, "measure_codecs", lambda: pytest.fail("a second time"))
    speed.ensure_codec_rates(home)
    (file,) = (home / "speeds").iterdir()
    assert file.name == f"codecs-{key}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(kernels, "_ready", False)
    assert read_codec_rates(home) == {}, "what serves without kernels is slower"
    monkeypatch.setattr(kernels, "_ready", True)
    monkeypatch.setattr(cache, "key", lambda: "e" * 32)
    assert read_codec_rates(home) == {}, "of another machine or release"


def test_what_was_measured_of_another_recipe_does_not_count(
    home: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "measure_codecs", all_rates)
    write_codec_rates(home)
    original = speed._recipe

    def another(dtype: DType, codec: int) -> list[list[int]]:
        return [[9, 9]] if codec == LBQ3 else original(dtype, codec)

    monkeypatch.setattr(speed, "_recipe", another)
    known = set(all_rates()) - {(dtype, LBQ3) for dtype in speed.MEASURED_DTYPES}
    assert set(read_codec_rates(home)) == known
    assert not codecs_measured(home)


@pytest.mark.parametrize(
    "document",
    [
        {"format": 2, "rates": {"bfloat16:fp8": {"decode": 1, "ratio": 2}}},
        {"format": 1},
        {"format": 1, "rates": [1]},
        {"format": 1, "rates": {"bfloat16:fp8": 5, "bfloat16": {}, "bfloat16:gzip": {}}},
        {"format": 1, "rates": {"bfloat16:raw": {"decode": 1e9, "ratio": 1}}},
        *(
            {"format": 1, "rates": {"bfloat16:raw": {"recipe": [[0, 0]], **item}}}
            for item in (
                {"decode": 0, "ratio": 2},
                {"decode": "fast", "ratio": 2},
                {"decode": 1e9, "ratio": True},
            )
        ),
    ],
)
def test_what_cannot_be_read_was_not_measured(home: Path, key: str, document: object) -> None:
    file = home / "speeds" / f"codecs-{key}.json"
    file.parent.mkdir(parents=True)
    good = {"decode": 1e9, "ratio": 1, "recipe": [[0, 0]]}
    file.write_text(json.dumps({"format": 1, "rates": {"bfloat16:raw": good}}))
    assert read_codec_rates(home) == {("bfloat16", RAW): CodecRate(1e9, 1.0)}
    file.write_text(json.dumps(document))
    assert read_codec_rates(home) == {}
    file.write_text("{")
    assert read_codec_rates(home) == {}


def test_restores_are_as_fast_as_the_slower_of_disk_and_cores() -> None:
    rates = Rates({("bfloat16", FP8): CodecRate(3e9, 2.0)}, read=2e9, read_measured=True, cores=2)
    assert rates.restore(FP8, "bfloat16") == 4e9
    rates = Rates({("bfloat16", FP8): CodecRate(3e9, 2.0)}, read=8e9, read_measured=True, cores=2)
    assert rates.restore(FP8, "bfloat16") == 6e9
    assert rates.explain(FP8, "bfloat16") == (
        "the target reads 8 GB/s, x 2.00; 2 cores decode 6 GB/s"
    )
    assert rates.restore(LOSSLESS, "float64") > 0, "not measured: as if it was raw"


# --- targets ---------------------------------------------------------------------------------


def test_the_median_of_the_last_probes_counts(home: Path) -> None:
    assert read_target_rate(home, "/kv") is None
    for rate, median in ((3e9, 3e9), (1e9, 2e9), (2e9, 2e9), (9e9, 2.5e9), (2.5e9, 2.5e9)):
        assert write_target_rate(home, "/kv", rate) == median
    assert write_target_rate(home, "/kv", 9e9) == 2.5e9  # the first one is forgotten
    assert read_target_rate(home, "/kv") == 2.5e9
    assert read_target_rate(home, "/other") is None


def test_a_link_to_a_target_is_that_target(home: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    write_target_rate(home, str(tmp_path / "kv"), 1e9)
    assert read_target_rate(home, str(tmp_path / "link")) == 1e9


def test_a_restarted_machine_is_measured_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target_rate(home, "/kv", 1e9)
    monkeypatch.setattr(speed, "boot_id", lambda: "another")
    assert read_target_rate(home, "/kv") is None


def test_files_of_machines_that_are_gone_are_removed(home: Path) -> None:
    write_target_rate(home, "/kv", 1e9)
    (old,) = (home / "speeds").iterdir()
    long_ago = time.time() - 31 * 86400
    os.utime(old, (long_ago, long_ago))
    write_target_rate(home, "/other", 1e9)
    assert old not in (home / "speeds").iterdir()


@pytest.mark.parametrize("direct", [False, True])
def test_a_target_is_probed_by_reading_its_segments(tmp_path: Path, direct: bool) -> None:
    for number in range(3):
        segment(tmp_path, 20 << 20, number)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    if direct and not supports_direct(tmp_path, "auto"):
        pytest.skip("no O_DIRECT here")
    rate = probe_target(tmp_path, direct=direct)
    assert rate is not None
    assert rate > 1e6
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_too_little_is_no_measure(tmp_path: Path) -> None:
    assert probe_target(tmp_path, direct=False) is None
    segment(tmp_path, 8 << 20)
    (tmp_path / "usage.json").write_text("{}")
    assert probe_target(tmp_path, direct=False) is None
    with pytest.raises(OSError, match="No such file"):
        probe_target(tmp_path / "nowhere", direct=False)


def test_holes_are_not_taken_for_a_fast_disk(tmp_path: Path) -> None:
    path = segment(tmp_path, 4096)
    os.truncate(path, 256 << 20)
    assert probe_target(tmp_path, direct=False) is None


def test_what_vanishes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        segment(tmp_path, 40 << 20, number)
    paths = speed._segments(tmp_path)
    paths[0].unlink()
    monkeypatch.setattr(speed, "_segments", lambda root: paths)
    probe = speed.Probe(tmp_path, direct=False)
    assert len({fd for fd, _ in probe._pieces}) == 1
    probe.close()


def test_an_error_of_the_disk_is_not_a_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment(tmp_path, 160 << 20)

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output"):
        probe_target(tmp_path, direct=False)

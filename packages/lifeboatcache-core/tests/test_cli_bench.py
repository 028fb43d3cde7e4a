"""``lifeboat-cache bench`` with small sizes: its lines, its refusals, what it leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lifeboat_cache import kernels
from lifeboat_cache.bench import Report, compare
from lifeboat_cache.bench.place import PREFIX, bench_place, undisturbed
from lifeboat_cache.bench.raw import RawFile
from lifeboat_cache.cli.main import main
from lifeboat_cache.testing import aligned_memory

FIELDS = {
    "bench", "case", "metric", "unit", "ours", "peer", "peer_name", "limit", "limit_name",
    "ratio_peer", "ratio_limit", "interval",
}  # fmt: skip
SMALL = ("--size", "1MiB", "--block-size", "64KiB,256KiB", "--no-compile")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    (home / "lifeboat.yaml").write_text(
        "storage:\n"
        "  tiers:\n"
        "    - {name: one, type: filesystem, path: $LIFEBOAT_CACHE_HOME/one, min_free_gb: 0}\n"
        "    - {name: two, type: filesystem, path: $LIFEBOAT_CACHE_HOME/two, min_free_gb: 0,\n"
        "       capacity_gb: 0.1}\n"
        "  fallback_local: {min_free_gb: 0}\n"
        "engine: {io_workers: 2}\n"
    )
    return home


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert main(["bench", "--json", *args]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def left(root: Path) -> list[Path]:
    return list(root.glob(f"{PREFIX}*"))


def test_each_case_is_measured_beside_the_limits(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, *SMALL, "--rounds", "7")
    assert all(row.keys() == FIELDS for row in found)
    assert {row["case"].removesuffix(", without kernels") for row in found} == {
        "64 KiB blocks, 1 MiB in 1 job", "256 KiB blocks, 1 MiB in 1 job",
    }  # fmt: skip
    for row in found:
        assert row["bench"] == "lifeboat-cache bench"
        assert row["peer"] is row["peer_name"] is row["ratio_peer"] is None
        assert row["ours"] > 0
        if row["limit_name"] is None:
            assert row["metric"].startswith("submit")
        else:
            low, high = row["interval"]["ratio_limit"]
            assert 0 < low <= row["ratio_limit"] <= high
    limits = {(row["metric"], row["limit_name"]) for row in found}
    assert ("hot load, throughput", "preadv from the page cache") in limits
    assert ("hot load, throughput", "memcpy") in limits
    assert left(home / "one") == []


def test_a_home_that_is_made_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = tmp_path / "fresh"
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(fresh))
    assert rows(capsys, "--quick", *SMALL)
    assert fresh.stat().st_mode & 0o777 == 0o700


def test_a_quick_run_gives_no_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *SMALL, "--quick", "--jobs", "4")
    assert any(row["case"].startswith("64 KiB blocks, 1 MiB in 4 jobs") for row in found)
    assert all(row["interval"] == {} for row in found)
    assert any(row["ratio_limit"] for row in found)


@pytest.mark.usefixtures("kernels_off")
def test_kernels_are_compiled_first_and_their_absence_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(kernels, "compile_all", lambda: asked.append(True))
    quick = ("--size", "1MiB", "--block-size", "256KiB", "--quick")
    assert main(["bench", *quick]) == 0
    assert asked == [True]
    out, err = capsys.readouterr()
    assert "compiling kernels" in err
    assert "without compiled kernels: " in err
    assert "1 MiB in 1 job, without kernels" in out
    assert main(["bench", *quick, "--no-compile"]) == 0
    assert asked == [True]


def test_people_get_a_table_and_the_target_is_left_as_it_was(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *SMALL, "--quick", "--target", "two"]) == 0
    out, err = capsys.readouterr()
    assert "cold load, throughput" in out
    assert "peer" not in out  # nothing is compared with one here
    assert "target two, 2 I/O threads" in err
    assert sorted(path.name for path in (home / "two").iterdir()) == ["lifeboat-cache.json"]
    assert main(["check"]) == 0


def test_a_directory_needs_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "somebody's").write_text("file")
    assert rows(capsys, *SMALL, "--quick", "--path", str(place))
    assert [path.name for path in place.iterdir()] == ["somebody's"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "three"], "no enabled target is called 'three'; there are: one, two"),
        (["--path", "/nowhere/at/all"], "is not a directory"),
        (["--block-size", "5000"], "multiple of 4096"),
        (["--size", "64KiB", "--block-size", "1MiB"], "not larger than --size"),
        (["--size", "big"], "Write for example 256MiB"),
        (["--rounds", "3"], "at least 7 rounds"),
        (["--jobs", "0"], "at least one job"),
        (["--target", "two", "--size", "64MiB"], "its capacity leaves less"),
        (["--size", "1Pi"], "of memory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_reserve_that_would_be_touched_is_respected(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (home / "lifeboat.yaml").read_text()
    (home / "lifeboat.yaml").write_text(
        text.replace("one, min_free_gb: 0", "one, min_free_gb: 900000")
    )
    assert main(["bench", *SMALL, "--target", "one"]) == 2
    assert "above the reserve of the file system" in capsys.readouterr().err
    assert left(home / "one") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing_behind(home: Path, number: signal.Signals) -> None:
    code = "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "bench", *SMALL, "--rounds", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        try:
            while b"rounds" not in process.stderr.readline():
                assert process.poll() is None
            assert left(home / "one")
            time.sleep(0.2)  # somewhere in the middle
            process.send_signal(number)
            assert process.wait(300) == 130
        finally:
            process.kill()
    assert left(home / "one") == []


def test_an_interruption_of_what_must_be_whole_comes_afterwards() -> None:
    steps = []

    def work() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            steps.append("done")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["done"]


def test_who_ignores_interruptions_goes_on_doing_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_a_killed_run_left_is_removed_and_what_runs_is_not(tmp_path: Path) -> None:
    long_ago = time.time() - 3600
    for name in ("dead", "busy"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / "in-use").touch()
    (tmp_path / f"{PREFIX}other").mkdir()
    (tmp_path / f"{PREFIX}other" / "file").touch()
    for path in left(tmp_path):
        os.utime(path, (long_ago, long_ago))
    # Another process holds the lock: locks of one's own process do not count.
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / f"{PREFIX}busy" / "in-use")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with bench_place(tmp_path) as place:
            assert {path.name for path in left(tmp_path)} == {
                f"{PREFIX}busy", f"{PREFIX}other", place.name,
            }  # fmt: skip
            with (place / "in-use").open("r+") as file:
                fcntl.lockf(file, fcntl.LOCK_UN)
        process.communicate()
    assert not place.exists()


def test_wrong_bytes_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(np, "array_equal", lambda *_: False)
    assert main(["bench", *SMALL, "--quick"]) == 2
    assert "what was loaded is not what was stored" in capsys.readouterr().err


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 4096])
@pytest.mark.parametrize("wave", [None, 256 << 10, 1 << 19])
def test_raw_files_move_every_byte(
    tmp_path: Path, direct: bool, size: int, wave: int | None
) -> None:
    source, target = aligned_memory(size), aligned_memory(size)
    source[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    raw = RawFile(
        tmp_path / "raw", source, target, block=64 << 10, depth=3, direct=direct, wave=wave
    )
    try:
        assert raw.write() > 0
    except OSError:
        pytest.skip("no O_DIRECT here")
    assert (tmp_path / "raw").read_bytes() == source.tobytes()
    for move in (raw.read, raw.read_cached, raw.copy):
        target[:] = 0
        assert move() > 0
        assert np.array_equal(source, target)
    os.truncate(tmp_path / "raw", 4096)
    with pytest.raises(OSError, match="short read"):
        raw.read()
    raw.close()
    assert not (tmp_path / "raw").exists()


def test_no_call_of_a_wave_begins_before_the_last_wave_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = aligned_memory(1 << 20), aligned_memory(1 << 20)
    wave = 256 << 10
    raw = RawFile(
        tmp_path / "raw", source, target, block=64 << 10, depth=4, direct=False, wave=wave
    )
    raw.write()
    read, done = os.preadv, deque[int]()

    def slowly(fd: int, pieces: list[memoryview], at: int) -> int:
        assert len(done) >= at // wave * (wave >> 16), "a wave began before the last one was done"
        moved = read(fd, pieces, at)
        time.sleep(0.001 * (at >> 16 & 3))
        done.append(at)
        return moved

    monkeypatch.setattr(os, "preadv", slowly)
    raw.read()
    assert sorted(done) == list(range(0, 1 << 20, 64 << 10))
    raw.close()


def test_a_table_without_rows_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Report().close()
    assert capsys.readouterr().out == ""
    report = Report(progress=False)
    report.add(compare("b", "c", "m", "s", [1.0, 2.0], limit=("l", [2.0, 2.0])))
    report.close()
    out, err = capsys.readouterr()
    assert "0.75" in out
    assert "[" not in out
    assert err == ""

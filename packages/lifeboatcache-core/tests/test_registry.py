"""The registry: who is alive, and what happens to the entries of who is not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.registry import Registration, fold, processes, snapshot
from lifeboat_cache.registry.host import this_process

# Of the package, that name is the function.
processes_module = importlib.import_module("lifeboat_cache.registry.processes")

Start = Callable[..., Any]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path, start_registry_process: Callable[[str, Path], Any]) -> Start:
    return lambda mode="publish": start_registry_process(mode, home)


def counted(number: float, **labels: str) -> dict[str, Any]:
    return {"counters": [{"labels": labels or {"target": "t"}, "values": {"x": number}}]}


def total(home: Path) -> float:
    found = snapshot(home)
    assert found is not None
    return found.counts.total("x")


def names(home: Path) -> list[str]:
    return sorted(os.listdir(home / "run"))


# --- who is alive ----------------------------------------------------------------------------


def test_an_entry_lives_until_its_process_is_killed(home: Path, start: Start) -> None:
    child = start()
    name = child.hear()
    child.ask(7)
    (entry,) = processes(home)
    assert (entry.id, entry.alive, entry.pid) == (name, True, child.process.pid)
    assert entry.role == "engine"
    assert entry.counts.total("x") == 7
    assert 0 <= entry.age < 60
    assert entry.identity.here
    child.kill()
    (entry,) = processes(home)
    assert not entry.alive
    assert entry.counts.total("x") == 7, "what it counted is there until it is folded"


def test_an_entry_is_over_when_it_is_closed(home: Path) -> None:
    entry = Registration(home, "cli", describe=lambda: counted(1))
    assert [(found.alive, found.role) for found in processes(home)] == [(True, "cli")]
    entry.close()
    entry.close()
    assert [found.alive for found in processes(home)] == [False]
    assert not entry.publish(), "nothing is published after the end"


def test_looking_does_not_drop_ones_own_lock(home: Path, start: Start) -> None:
    entry = Registration(home, describe=dict)
    for _ in range(3):
        assert [found.alive for found in processes(home)] == [True]
    # Through another path to the same directory as well.
    alias = home.parent / "alias"
    alias.symlink_to(home)
    assert [found.alive for found in processes(alias)] == [True]
    code = (
        "import sys; from pathlib import Path; from lifeboat_cache.registry import processes; "
        "print([e.alive for e in processes(Path(sys.argv[1]))])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, home], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[True]"
    entry.close()


def test_a_forked_child_is_not_its_parent(home: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from lifeboat_cache.registry import Registration, processes
home = Path(sys.argv[1])
entry = Registration(home, describe=dict)
child = os.fork()
if child == 0:
    alive = [found.alive for found in processes(home)]
    published = entry.publish()
    entry.close()
    os._exit(0 if alive == [True] and not published else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, [(found.alive, found.id == entry.id) for found in processes(home)], entry.publish())
"""
    run = subprocess.run(
        [sys.executable, "-c", code, home], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "0 [(True, True)] True", run.stderr


def test_modes_are_private(home: Path) -> None:
    entry = Registration(home, describe=dict)
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "run").stat().st_mode & 0o777 == 0o700
    assert len(names(home)) == 2
    for name in names(home):
        assert (home / "run" / name).stat().st_mode & 0o777 == 0o600, name
    entry.close()


def write_entry(home: Path, name: str, age_s: float = 0.0, **changes: Any) -> Path:
    """An entry of somebody who holds no lock."""
    run = home / "run"
    run.mkdir(parents=True, exist_ok=True)
    me = this_process()
    process = {
        "pid": me.pid,
        "born": me.born,
        "host": me.host,
        "boot": me.boot,
        "namespace": me.namespace,
        "role": "engine",
        "core": "0.1.0",
        "started": 5.0,
        "locked": True,
    } | changes
    document = {"format": 1, "process": process, "published": 6.0, "document": counted(3)}
    for kind, value in (("lock", process), ("json", document)):
        path = run / f"{name}.{kind}"
        path.write_text(json.dumps(value))
        then = time.time() - age_s
        os.utime(path, (then, then))
    return run / f"{name}.json"


A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.mark.parametrize(
    ("changes", "age_s", "alive"),
    [
        ({}, 0.0, False),  # its lock is free: whoever has its pid now is somebody else
        ({"boot": "another"}, 0.0, True),  # locks of another machine may not be seen here
        ({"boot": "another"}, 3600.0, False),
        ({"boot": "another"}, -3600.0, False),  # a clock that was wrong
        ({"locked": False}, 3600.0, True),  # no locks there: this very process, and it runs
        ({"locked": False, "born": 1}, 0.0, False),  # another process has its pid
        ({"locked": False, "pid": 2**22 + 1}, 0.0, False),
        ({"locked": False, "namespace": "pid:[1]"}, 0.0, True),  # another container
        ({"locked": False, "namespace": "pid:[1]"}, 3600.0, False),
    ],
)
def test_who_is_alive_without_a_lock(
    home: Path, changes: dict[str, Any], age_s: float, alive: bool
) -> None:
    write_entry(home, A, age_s, **changes)
    assert [entry.alive for entry in processes(home)] == [alive]


def test_a_filesystem_without_locks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    entry = Registration(home, describe=lambda: counted(4))
    write_entry(home, A, born=1)
    monkeypatch.setattr(processes_module, "is_own", lambda name: False)
    assert [(found.id == entry.id, found.alive) for found in processes(home)] == [
        (False, False),
        (True, True),
    ]
    assert fold(home) == 1
    assert total(home) == 7
    entry.close()


def test_a_clock_that_jumps_does_not_make_a_process_silent(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Registration(home, describe=dict)
    now = time.time()
    for jump in (-86400.0, 86400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        (found,) = processes(home)
        assert found.alive
        assert found.age < 60
    entry.close()


def test_damaged_and_strange_files(home: Path, start: Start) -> None:
    child = start()
    name = child.hear()
    run = home / "run"
    (run / f"{name}.json").write_bytes(b'{"format": 1, "proc')
    (run / f"{name}.lock").write_bytes(b"")  # in place: it is the file that is locked
    write_entry(home, A).write_bytes(b"\xff\0")
    (run / f"{A}.lock").write_bytes(b"[")
    os.mkfifo(run / f"{B}.json")
    (run / f"{C}.lock").symlink_to("/dev/zero")
    (run / ("d" * 32 + ".json")).write_text("[" * 100_000)
    (run / "notes.json").write_text("{}")
    (run / ("e" * 32 + ".json")).write_text(
        json.dumps(
            {
                "process": {"pid": "7", "started": "then", "role": 3},
                "published": [],
                "document": {"counters": [3, {"labels": {}, "values": {"x": float("nan")}}]},
            }
        )
    )
    found = {entry.id: entry for entry in processes(home)}
    assert found[name].alive
    assert found[name].pid == 0, "it is there, whoever it is"
    assert not any(found[one].alive for one in (A, B, "d" * 32, "e" * 32))
    assert found["e" * 32].started == 0.0
    assert total(home) == 0
    fold(home)
    left = [name for name in names(home) if not name.startswith("totals")]
    assert f"{name}.lock" in left
    assert "notes.json" in left
    assert not any(one.startswith((A, B)) for one in left)
    # It goes on, and is whole again.
    child.ask(5)
    assert total(home) == 5


# --- publishing ------------------------------------------------------------------------------


def test_publishing_is_off_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entry = Registration(tmp_path / "file" / "home", describe=dict)
    assert not entry.publish()
    assert "cannot be written" in entry.reason
    assert "correct its owner and mode" in entry.reason
    entry.close()
    assert processes(tmp_path / "file" / "home") == []
    # It is tried again.
    entry = Registration(tmp_path / "file" / "home", describe=lambda: counted(2))
    (tmp_path / "file").unlink()
    assert entry.publish()
    assert entry.reason == ""
    assert total(tmp_path / "file" / "home") == 2
    entry.close()


def test_a_full_disk(small_disk: Path) -> None:
    entry = Registration(small_disk, describe=lambda: counted(1))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert not entry.publish(counted(2) | {"text": "x" * 100_000})
    assert "No space left" in entry.reason
    assert [(found.alive, found.counts.total("x")) for found in processes(small_disk)] == [
        (True, 1)
    ]
    late = Registration(small_disk, describe=lambda: counted(8) | {"text": "x" * 100_000})
    filler.unlink()
    assert entry.publish(counted(3))
    assert late.publish()
    assert total(small_disk) == 11
    assert all(found.alive for found in processes(small_disk))
    for one in (entry, late):
        one.close()


def test_a_read_only_home_can_be_looked_at(small_disk: Path, tmp_path: Path) -> None:
    entry = Registration(small_disk, describe=lambda: counted(1))
    write_entry(small_disk, A)
    view = tmp_path / "view"
    view.mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(view)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        other = Registration(view, describe=dict)
        assert "Read-only" in other.reason
        assert [found.alive for found in processes(view)] == [False, True]
        assert fold(view) == 0
        assert total(view) == 4
        other.close()
    finally:
        subprocess.run(["umount", "--lazy", str(view)], check=True)
    entry.close()


def test_a_fault_of_ours_stops_nothing(home: Path) -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("nothing")

    entry = Registration(home, describe=broken)
    assert entry.reason == "internal error: KeyError: 'nothing'"
    assert entry.publish({"what": object()}), "what is not JSON is written as text"
    entry.close()


def test_the_directory_is_removed_underneath(home: Path) -> None:
    entry = Registration(home, describe=lambda: counted(4))
    for name in names(home):
        (home / "run" / name).unlink()
    (home / "run").rmdir()
    assert entry.publish()
    assert [found.alive for found in processes(home)] == [True]
    assert total(home) == 4
    entry.close()


def test_a_process_that_was_taken_for_dead_comes_back_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Registration(home, describe=lambda: counted(4))
    first = entry.id
    # As another machine does that does not see the lock.
    monkeypatch.setattr(processes_module, "_lock_held", lambda *args: False)
    assert fold(home) == 1
    monkeypatch.undo()
    assert total(home) == 4
    assert entry.publish()
    assert entry.id != first
    assert total(home) == 4
    assert entry.publish(counted(6))
    assert total(home) == 6
    # A document that it wrote in that very moment is not counted either.
    write_entry(home, first)
    assert total(home) == 6
    entry.close(counted(6))
    fold(home)
    assert total(home) == 6
    assert not any(first in name for name in names(home))


def test_counts_that_start_again_go_on(home: Path) -> None:
    entry = Registration(home, describe=dict)
    for number, expected in ((5, 5), (2, 7), (3, 8)):
        entry.publish(counted(number))
        assert total(home) == expected
    entry.publish({})  # nothing any more
    assert total(home) == 8
    entry.publish(counted(1))
    assert total(home) == 9
    entry.close()


# --- folding ---------------------------------------------------------------------------------


def test_dead_entries_are_folded_and_removed(home: Path, start: Start) -> None:
    children = [start() for _ in range(3)]
    for number, child in enumerate(children):
        child.hear()
        child.ask(10**number)
    children[0].kill()
    children[1].ask("close")
    assert total(home) == 111
    assert fold(home) == 2
    assert total(home) == 111
    assert [entry.pid for entry in processes(home)] == [children[2].process.pid]
    assert len(names(home)) == 2 + 2, "the totals, their lock, and one entry"
    children[2].kill()
    assert fold(home) == 1
    assert fold(home) == 0
    assert total(home) == 111


@pytest.mark.parametrize("before", [False, True])
def test_each_count_is_added_once_wherever_the_folding_process_is_killed(
    home: Path, start: Start, before: bool
) -> None:
    folder = start("fold")
    expected = 0
    if before:
        write_entry(home, C)
        fold(home)
        expected = 3
    number = 0
    code = -9
    while code == -9:
        number += 1
        for name in (A, B):
            write_entry(home, name)
        (home / "run" / "totals.json").unlink(missing_ok=True)
        if before:
            write_entry(home, C)
            fold(home)
        write_entry(home, A)
        write_entry(home, B)
        if before:  # what was folded above is named: tell them apart
            document = json.loads((home / "run" / "totals.json").read_text())
            document["folded"] = {C: time.time()}
            document["series"][0]["values"]["x"] = 3
            (home / "run" / "totals.json").write_text(json.dumps(document))
        code = int(folder.ask(number))
        assert total(home) == expected + 6, f"killed at operation {number}"
        fold(home)
        assert total(home) == expected + 6, f"folded again after operation {number}"
        assert [name for name in names(home) if not name.startswith((".", "totals"))] == []
    assert code == 0
    assert number > 12, "it was killed at every operation in turn"


def test_wherever_a_publishing_process_is_killed_its_last_counts_stay(
    home: Path, start: Start
) -> None:
    folder = start("fold")
    expected = number = 0
    code = "-9"
    while code == "-9":
        number += 1
        said = 0
        code = folder.ask(f"publish {number}")
        while code.startswith("+"):
            said = int(code)
            code = folder.hear()
        seen = total(home) - expected
        assert seen in (said, said + 1), f"killed at operation {number}"
        assert [entry.alive for entry in processes(home)] in ([False], [])
        fold(home)
        assert total(home) - expected == seen
        left = [name for name in names(home) if not name.startswith((".", "totals"))]
        assert left == [], "all that is left of it is what it had not finished to write"
        expected += int(seen)
    assert code == "0"
    assert seen == 5
    assert number > 15, "it was killed at every operation in turn"


def test_totals_never_fall_while_processes_come_and_go(home: Path, start: Start) -> None:
    folder = start("fold")
    stop = threading.Event()
    faults: list[str] = []
    seen = 0

    def watch() -> None:
        nonlocal seen
        highest = 0.0
        while not stop.is_set():
            found = snapshot(home, wait_s=10)
            if found is None:
                continue
            seen += 1
            now = found.counts.total("x")
            if now < highest:
                faults.append(f"{now} after {highest}")
            highest = max(highest, now)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    expected = 0
    try:
        for round_ in range(6):
            looping = [int(folder.ask("loop")) for _ in range(2)]
            child = start()
            child.hear()
            for number in range(1, 15 + round_):
                child.ask(number)
            expected += number
            if round_ % 2:
                child.kill()
            else:
                child.ask("close")
            for pid in looping:  # in the middle of whatever they are doing
                os.kill(pid, 9)
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()
    assert faults == []
    assert seen > 10
    fold(home)
    assert total(home) == expected


def test_a_stopped_process_that_folds_holds_nobody_up(home: Path, start: Start) -> None:
    write_entry(home, A)
    holder = start("idle")
    assert holder.hear() == "True"
    assert fold(home, wait_s=0.0) == 0
    assert snapshot(home, wait_s=0.0) is None
    assert [entry.alive for entry in processes(home)] == [False]
    holder.kill()
    assert fold(home) == 1
    assert total(home) == 3


def test_damaged_totals_start_again_and_newer_ones_are_left(home: Path) -> None:
    write_entry(home, A)
    path = home / "run" / "totals.json"
    path.write_text('{"format": 1, "fol')
    assert fold(home) == 1
    assert total(home) == 3
    newer = '{"format": 2, "sums": {}}'
    path.write_text(newer)
    write_entry(home, B)
    assert fold(home) == 0
    assert path.read_text() == newer
    assert (home / "run" / f"{B}.json").exists()
    assert total(home) == 3, "what can be seen is shown"
    path.unlink()
    path.mkdir()  # cannot be read: nothing is lost
    assert fold(home) == 0
    assert (home / "run" / f"{B}.json").exists()


def test_what_killed_processes_left_half_written_is_removed(home: Path) -> None:
    entry = Registration(home, describe=dict)
    old, new = home / "run" / ".old.json.tmp", home / "run" / ".new.json.tmp"
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (1, 1))
    fold(home)
    assert not old.exists()
    assert new.exists()
    entry.close()


def test_labels_are_bounded_and_no_count_is_lost(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache.registry import totals as module

    monkeypatch.setattr(module, "MAX_SERIES", 10)
    shown = set()
    for number in range(30):
        entry = Registration(home, describe=lambda: counted(1, namespace=f"n{number}"))  # noqa: B023
        found = snapshot(home)
        assert found is not None
        shown |= {labels for labels, _ in found.counts.groups()}
        assert found.counts.total("x") == number + 1
        entry.close()
        fold(home)
        found = snapshot(home)
        assert found is not None
        assert found.counts.total("x") == number + 1
        shown |= {labels for labels, _ in found.counts.groups()}
    assert len(shown) == 11, "ten of their own, and one for all others"
    assert (("namespace", "other"),) in shown
    # Who has not been seen for a day makes room; the sum over everything stays.
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    entry = Registration(home, describe=lambda: counted(1, namespace="late"))
    entry.close()
    fold(home)
    found = snapshot(home)
    assert found is not None
    assert (("namespace", "late"),) in {labels for labels, _ in found.counts.groups()}
    assert found.counts.total("x") + found.retired.total("x") == 31
    assert found.retired.total("x") == 1


def test_nothing_is_there(home: Path) -> None:
    assert processes(home) == []
    assert fold(home) == 0
    assert total(home) == 0
    assert not home.exists(), "looking makes nothing"
    write_entry(home, A)
    before = names(home)
    assert total(home) == 3
    assert names(home) == before, "nor does adding up"

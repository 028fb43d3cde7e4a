"""``lifeboat-cache status``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.agent import AgentState, AgentStatus
from lifeboat_cache.cli import status_command
from lifeboat_cache.cli.main import main
from lifeboat_cache.registry import (
    Registration,
    TargetFacts,
    agent_document,
    measured,
    stands_down,
)
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.version import __version__

GB = 10**9

Publish = Callable[..., Registration]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    return home


@pytest.fixture
def publish(home: Path) -> Iterator[Publish]:
    """Has this process publish a document as an engine or an agent."""
    made: list[Registration] = []

    def make(document: Mapping[str, Any], role: Any = "engine", since: float = 0.0) -> Registration:
        entry = Registration(home, role, describe=lambda: document)
        entry._started -= since
        entry.publish()
        made.append(entry)
        return entry

    yield make
    for entry in made:
        entry.close()


def width(text: str) -> int:
    """The longest line, but for the one that holds a path."""
    return max(len(line) for line in text.splitlines() if "Home directory" not in line)


def store(**changes: Any) -> dict[str, Any]:
    counts = {
        "lookups": 2000,
        "lookup_hits": 1500,
        "loaded_bytes": 3 * GB,
        "stored_bytes": 7 * GB,
        "served_tokens": 1_234_567,
        "store_outcome:ok": 30,
        "store_outcome:present": 3,
        "store_outcome:full": 2,
    }
    return {
        "kind": "store",
        "state": "ready",
        "reason": "",
        "engine": {"name": "vllm", "version": "0.32.0", "model": "small"},
        "namespace": {"name": "0123456789ab", "model": "small"},
        "target": {"name": "nvme", "location": "/kv"},
        "index": {"blocks": 12345},
        "queue": {"jobs": 3, "pending_bytes": 64_000_000},
        "recovery": {"done": True, "blocks": 12000, "seconds": 0.1, "bad_entries": 0},
        "recent": {"seconds": 600.0, "store_dropped": {}, "load_failed": {}},
        "counters": [
            {
                "labels": {"namespace": "0123456789ab", "engine": "vllm", "target": "nvme"},
                "values": counts,
            }
        ],
    } | changes


def agent(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": "nvme",
        "location": "/kv",
        "used_bytes": 90 * GB,
        "capacity_bytes": 100 * GB,
        "free_bytes": 500 * GB,
        "reserve_bytes": 10 * GB,
        "blocks": 5,
        "counters": {"evicted_bytes": 5 * GB, "evicted_blocks": 70, "reclaimed_bytes": 6 * GB},
    }
    return agent_document([TargetFacts(**facts | changes)])


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: str) -> tuple[int, str]:
        code = main(["status", *args])
        return code, capsys.readouterr().out

    return call


def test_nobody_is_there(home: Path, run: Run) -> None:
    code, text = run()
    assert code == 0
    assert "healthy" in text
    assert "No engine is running." in text
    assert not home.exists(), "looking makes nothing"
    code, text = run("--json")
    assert code == 0
    document = json.loads(text)
    assert document["healthy"] is True
    assert document["processes"] == []
    assert document["agent"] is None


def test_everything_is_shown(run: Run, publish: Publish) -> None:
    publish(store(), since=3600)
    publish(agent(), "agent", since=3600)
    code, text = run()
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0].endswith(": healthy")
    rows = [line.split() for line in lines]
    pid = str(os.getpid())
    assert [pid, "engine", __version__, "1.0", "h", "now", "ready", "vllm", "0.32.0"] in rows
    assert [pid, "agent", __version__, "1.0", "h", "now", "active", "-"] in rows
    assert f"{pid} 0123456789ab nvme 12.3k 75 % 3.0 GB 7.0 GB 64.0 MB".split() in rows
    sizes = ("90.0", "100.0", "500.0", "10.0", "5.0", "6.0")
    assert ["nvme", *(part for size in sizes for part in (size, "GB"))] in rows
    assert "In all: 2.0k lookups, 75 % hits; 3.0 GB loaded, 7.0 GB stored" in lines
    assert "Tokens that were not computed: 1.2M" in lines
    assert "Not stored (blocks): full 2" in lines
    assert width(text) <= 80


def test_json_has_all_numbers(run: Run, publish: Publish) -> None:
    publish(store())
    publish(agent(), "agent")
    code, text = run("--json")
    assert code == 0
    found = json.loads(text)
    assert found["healthy"] is True
    assert found["problems"] == []
    assert found["core"] == __version__
    (engine,) = found["processes"]
    assert engine["pid"] == os.getpid()
    assert engine["engine"]["version"] == "0.32.0"
    assert engine["counts"]["hit_rate"] == 0.75
    assert engine["counts"]["store_dropped"] == {"full": 2}
    assert engine["queue"] == {"jobs": 3, "pending_bytes": 64_000_000}
    assert engine["recovery"]["blocks"] == 12000
    assert engine["heartbeat_s"] < 60
    assert found["agent"]["state"] == "active"
    (target,) = found["targets"]
    assert target["capacity_bytes"] == 100 * GB
    assert target["evicted_blocks"] == 70
    assert found["totals"]["served_tokens"] == 1_234_567
    assert found["totals"]["evicted_bytes"] == 5 * GB


def test_what_ended_processes_counted_is_in_the_totals(run: Run, publish: Publish) -> None:
    publish(store()).close()
    publish(store())
    publish(agent(), "agent")
    _, text = run("--json")
    found = json.loads(text)
    assert found["totals"]["lookups"] == 4000
    assert len(found["processes"]) == 1


@pytest.mark.parametrize("heard", [False, True])
def test_a_broken_configuration_hides_nothing(
    run: Run, publish: Publish, home: Path, heard: bool
) -> None:
    file = home / "lifeboat.yaml"
    home.mkdir(exist_ok=True)
    file.write_text("engine: {io_workers: many}\n")
    wrong = f"{file}:1: engine.io_workers: 'many' is not allowed."
    said = f"the configuration cannot be used: {wrong} Allowed: a whole number from 1 to 64."
    said += " Write for example io_workers: 8."
    # An engine that has noticed says so itself.
    problem = f"{said} Until then the values from before stay in effect."
    publish(store(config={"problem": problem if heard else ""}))
    publish(agent(), "agent")
    code, text = run("--json")
    assert code == 1
    found = json.loads(text)
    assert len(found["processes"]) == 1
    assert len(found["targets"]) == 1
    (shown,) = found["problems"]
    assert wrong in shown
    assert shown.startswith("vllm (pid") == heard
    code, text = run()
    assert code == 1
    assert "ready" in text


def test_a_home_that_cannot_be_known_is_2(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", "$NOT_SET_ANYWHERE/x")
    assert main(["status"]) == 2
    assert "is not set" in capsys.readouterr().err


CODED = {
    "encoded_blocks:fp8": 3000,
    "encoded_raw_bytes:fp8": 7 * GB,
    "encoded_bytes:fp8": 3.5 * GB,
    "decoded_blocks:fp8": 1000,
    "decoded_raw_bytes:fp8": 3 * GB,
    "decoded_bytes:fp8": 1.5 * GB,
    "decoded_blocks:raw": 1,
    "decoded_raw_bytes:raw": 1000,
    "decoded_bytes:raw": 1000,
    "encoded_blocks:of-a-newer-release": 5,
}


def coded(**changes: Any) -> dict[str, Any]:
    """A store that puts KV through a codec."""
    document = store()
    document["counters"][0]["values"].update(CODED)
    document["codecs"] = {
        "mode": "ladder",
        "rung": "local",
        "choices": [
            {"layout": "ab", "codec": "fp8", "reason": "so it was configured " * 5},
            {"layout": "cd", "codec": "raw", "reason": "nothing is known"},
        ],
        "guard": [
            {"layout": "ab", "codec": "fp8", "samples": 9, "error": 0.021, "ruled_out": ""},
            {"layout": "cd", "codec": "fp8", "samples": 9, "error": 0.014, "ruled_out": ""},
            {"layout": "ab", "codec": "lbq4", "samples": 9, "error": 0.5, "ruled_out": "too much"},
        ],
    }
    return document | changes


def test_codecs_are_shown(run: Run, publish: Publish) -> None:
    publish(coded(config={"problem": "", "restart": ["storage.tiers", "engine.io_workers"]}))
    kept = {"fp8": (9000, 177 * GB, 90 * GB), "raw": (1, 1000, 1000)}
    publish(agent(codecs=kept), "agent")
    code, text = run()
    assert code == 0, "a lossy codec that gives way to another is no fault"
    rows = [line.split() for line in text.splitlines()]
    lines = [" ".join(row) for row in rows]
    assert "nvme fp8 9.0k 177.0 GB 90.0 GB 1.97" in lines
    assert "nvme raw 1 1.0 kB 1.0 kB 1.00" in lines
    assert "fp8 7.0 GB 3.5 GB 2.00 3.0 GB 1.5 GB 2.1 %" in lines
    assert "raw 0 B 0 B 1.00 1.0 kB 1.0 kB -" in lines
    flat = " ".join(text.split())
    pid = os.getpid()
    assert f"pid {pid} stores KV as fp8: so it was configured so it" in flat
    assert f"pid {pid} stores KV as raw: nothing is known" in flat
    assert f"pid {pid}: restart required to apply storage.tiers, engine.io_workers" in flat
    assert "newer-release" not in text
    assert width(text) <= 80
    found = json.loads(run("--json")[1])
    fp8 = found["totals"]["codecs"]["fp8"]
    assert fp8["ratio"] == 2.0
    assert fp8["decoded_bytes"] == 1.5 * GB
    assert found["targets"][0]["codecs"]["fp8"]["blocks"] == 9000
    (engine,) = found["processes"]
    assert engine["codecs"]["mode"] == "ladder"
    assert engine["counts"]["codecs"]["raw"]["decoded_blocks"] == 1


@pytest.mark.parametrize("strange", [None, 5, "x", [], {"choices": 5, "guard": {}, "restart": 1}])
def test_codecs_of_other_releases(run: Run, publish: Publish, strange: Any) -> None:
    publish(coded(codecs=strange, config=strange))
    code, text = run()
    assert code == 0
    assert "stores KV as" not in text
    assert "restart required" not in text


@pytest.mark.parametrize(
    ("engine", "keeper", "said"),
    [
        (
            {"state": "disabled", "reason": "no storage target is usable: run x"},
            {},
            "vllm (pid PID) stands down: no storage target is usable: run x",
        ),
        (
            {"config": {"problem": "the configuration cannot be used: x.yaml:1: correct it"}},
            {},
            "vllm (pid PID): the configuration cannot be used: x.yaml:1: correct it",
        ),
        (
            {"codecs": {"guard": [{"codec": "lossless", "ruled_out": "bits are lost"}]}},
            {},
            "vllm (pid PID): lossless does not give back what was stored",
        ),
        ({"recent": {"store_dropped": {"full": 7}}}, {}, "7 blocks were not stored (full)"),
        ({"recent": {"store_dropped": {"reserve": 7}}}, {}, "(reserve): free space"),
        (
            {"recent": {"load_failed": {"corrupt": 1}}},
            {},
            "in the last 10 minutes 1 block was not loaded (corrupt): run `lifeboat-cache check`",
        ),
        ({"recent": {"load_failed": {"failed": 1}}}, {}, "see the engine's log"),
        ({}, {"used_bytes": 102 * GB}, "target nvme holds 102.0 GB, more than its capacity"),
        ({}, {"free_bytes": 10 * GB}, "target nvme has 10.0 GB free, its reserve is 10.0 GB"),
        ({}, {"problem": "the disk is gone: mount it"}, "target nvme: the disk is gone: mount it"),
    ],
)
def test_what_is_wrong_is_said_and_is_1(
    run: Run, publish: Publish, engine: Any, keeper: Any, said: str
) -> None:
    publish(store(**engine), since=3600)
    publish(agent(**keeper), "agent", since=3600)
    code, text = run()
    assert code == 1
    assert text.splitlines()[0].endswith(": unhealthy")
    assert said.replace("PID", str(os.getpid())) in " ".join(text.split())
    assert width(text) <= 80
    code, text = run("--json")
    assert code == 1
    (problem,) = json.loads(text)["problems"]
    assert said.replace("PID", str(os.getpid())) in problem


def test_what_is_normal_is_not_wrong(run: Run, publish: Publish) -> None:
    # Evicted between lookup and load; a target that nobody has measured yet.
    publish(store(recent={"store_dropped": {}, "load_failed": {"missing": 3}}), since=3600)
    publish(agent(used_bytes=0, free_bytes=0, blocks=None), "agent", since=3600)
    assert run()[0] == 0


def test_several_writers_may_go_a_little_beyond_the_capacity(run: Run, publish: Publish) -> None:
    publish(agent(used_bytes=100 * GB + 10_000_000), "agent", since=3600)
    assert run()[0] == 0


def test_what_the_agent_has_not_measured_yet_is_measured(
    home: Path, run: Run, publish: Publish
) -> None:
    FilesystemTarget(home / "kv").probe()
    facts = agent(location=str(home / "kv"), blocks=None)
    publish(facts, "agent", since=3600)
    (target,) = json.loads(run("--json")[1])["targets"]
    assert target["name"] == "nvme"
    assert target["used_bytes"] >= 0
    assert target["free_bytes"] > 0
    assert target["capacity_bytes"] == 100 * GB


def test_an_agent_that_is_not_there(
    home: Path, run: Run, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = publish(store())
    assert run()[0] == 0, "an engine that starts is starting it"
    entry._started -= 3600
    entry.publish()
    code, text = run()
    assert code == 1
    assert "no agent runs beside the engines" in text

    def dead(*args: Any, **kwargs: Any) -> AgentStatus:
        return AgentStatus(AgentState.DIED, "the agent (pid 7) has died")

    monkeypatch.setattr(status_command, "agent_status", dead)
    assert "(the agent (pid 7) has died)" in " ".join(run()[1].split())

    def starting(*args: Any, **kwargs: Any) -> AgentStatus:
        return AgentStatus(AgentState.STARTING)

    monkeypatch.setattr(status_command, "agent_status", starting)
    assert run()[0] == 0
    monkeypatch.undo()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    (home / "lifeboat.yaml").write_text("agent: {autostart: false}\n")
    assert run()[0] == 0, "the operator does not want one"


@pytest.mark.parametrize(("role", "said"), [("engine", "vllm (pid"), ("agent", "the agent (pid")])
def test_who_says_nothing_hangs(
    run: Run, publish: Publish, monkeypatch: pytest.MonkeyPatch, role: str, said: str
) -> None:
    late = time.clock_gettime
    with monkeypatch.context() as patch:
        patch.setattr(
            time, "clock_gettime", lambda clock: late(clock) - (100 if role == "engine" else 0)
        )
        publish(store(), since=3600)
    with monkeypatch.context() as patch:
        patch.setattr(
            time, "clock_gettime", lambda clock: late(clock) - (100 if role == "agent" else 0)
        )
        publish(agent(), "agent", since=3600)
    code, text = run()
    assert code == 1
    assert f"{said} {os.getpid()}) has published nothing for 1.7 m" in " ".join(text.split())


def test_an_engine_that_runs_without_the_cache_is_shown(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys, pathlib; from lifeboat_cache.registry import stands_down; "
        "home = pathlib.Path(sys.argv[1]); "
        "stands_down(home, 'no room: free some', engine='vllm').join(); "
        "stands_down(home, 'no memory: add some', engine='vllm').join(); "
        "print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    # It says so once; that it says nothing more is no fault.
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    boot = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: boot(clock) + 3600)
    code, text = run("--json")
    assert code == 1
    assert json.loads(text)["problems"] == [
        f"vllm (pid {child.pid}) stands down: no memory: add some"
    ]
    text = run()[1]
    assert f"{child.pid}  engine" in text
    child.communicate()
    assert run()[0] == 0


def test_a_notice_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    thread = stands_down(tmp_path / "file", "no room", engine="vllm")
    thread.join(60)
    assert not thread.is_alive()


def test_a_killed_engine_is_not_there(home: Path, run: Run) -> None:
    child = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "children/registry_process.py", "publish", home],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline()
    assert str(child.pid) in run()[1]
    child.kill()
    child.communicate()
    code, text = run()
    assert code == 0
    assert str(child.pid) not in text


def test_recovery_is_shown(run: Run, publish: Publish) -> None:
    publish(store(state="recovering", recovery={"done": False, "blocks": 5000}))
    assert f"pid {os.getpid()} is reading the index: 5.0k blocks so far" in run()[1]
    publish(store(state="opening", recovery={"done": False, "blocks": 0}))
    assert f"pid {os.getpid()} is finding out which model it serves" in run()[1]


def test_nothing_steers_the_terminal_or_is_too_wide(run: Run, publish: Publish) -> None:
    publish(
        store(
            state="\x1b[2Jready",
            engine={"name": "e" * 100, "version": "\n", "model": "m"},
            namespace={"name": "n" * 100},
            target={"name": "\x1b]0;t" + "t" * 100},
        )
    )
    publish(agent(name="t" * 64), "agent")
    _, text = run()
    assert "\x1b" not in text
    assert width(text) <= 80


def test_documents_of_other_releases(run: Run, publish: Publish) -> None:
    publish({})
    publish({"kind": "novel", "engine": 3, "index": None, "queue": [], "recent": 5, "target": "x"})
    publish({"targets": {"no": "list"}}, "agent")
    code, text = run()
    assert code in (0, 1)
    assert str(os.getpid()) in text
    json.loads(run("--json")[1])


def test_space_is_measured_without_an_agent(home: Path, run: Run) -> None:
    FilesystemTarget(home / "kv").probe()
    _, text = run("--json")
    (target,) = json.loads(text)["targets"]
    assert target["name"] == "fallback_local"
    assert target["used_bytes"] >= 0
    assert target["free_bytes"] > 0
    assert target["capacity_bytes"] == 50 * GB


def test_a_dead_mount_holds_nothing_up(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    FilesystemTarget(home / "kv").probe()
    release = threading.Event()
    monkeypatch.setattr(FilesystemTarget, "usage", lambda self: release.wait(60))
    monkeypatch.setattr(measured, "_PATIENCE_S", 0.1)
    code, text = run()
    release.set()
    assert code == 1
    assert "has not answered for 0.1 s" in " ".join(text.split())


@pytest.mark.parametrize("value", ["0", "-1", "1e9", "nan", "soon"])
def test_wrong_usage_is_2(home: Path, run: Run, value: str) -> None:
    assert run("--watch", value)[0] == 2


def test_what_cannot_be_read_is_2(home: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "run").write_text("")
    assert run()[0] == 2
    shutil.rmtree(home)
    home.write_text("")
    assert main(["status"]) == 2
    assert f"{home} cannot be read (Not a directory): " in capsys.readouterr().err
    assert main(["agent"]) == 2
    assert "LIFEBOAT_CACHE_HOME to a directory" in capsys.readouterr().err


def test_a_stopped_process_that_holds_the_totals_is_2(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "run").mkdir(parents=True)
    monkeypatch.setattr(status_command, "snapshot", lambda *args, **kwargs: None)
    assert run()[0] == 2


def test_watching_goes_on_until_it_is_interrupted(home: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-m",
        "lifeboat_cache.cli.main",
        "status",
        "--json",
        "--watch",
        "0.1",
    ]
    watch = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    first, second = json.loads(watch.stdout.readline()), json.loads(watch.stdout.readline())
    assert first["time"] < second["time"]
    watch.send_signal(signal.SIGINT)
    watch.communicate(timeout=300)
    assert watch.returncode == 130

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lifeboat_cache.cli.main import main
from lifeboat_cache.config import load_config
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    Namespace,
    block_keys,
    open_block_store,
)

BLOCK = 64 * 1024


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    (home / "lifeboat.yaml").write_text(
        "storage:\n"
        "  tiers:\n"
        "    - {name: one, type: filesystem, path: $LIFEBOAT_CACHE_HOME/one, min_free_gb: 0}\n"
        "    - {name: two, type: filesystem, path: $LIFEBOAT_CACHE_HOME/two, enabled: false}\n"
        "  fallback_local: {min_free_gb: 0}\n"
    )
    return home


def namespace(model: str) -> Namespace:
    return Namespace.from_identity(
        {
            "model": {"hidden_size": 576},
            "name": model,
            "dtype": "bfloat16",
            "adapter": {"name": "lifeboatcache-vllm", "format": 1},
        },
        {"model": model, "engine": "vllm 0.32.0"},
    )


def fill(space: Namespace, count: int = 3) -> None:
    store = open_block_store(load_config().config, space)
    try:
        assert store.wait_recovered(30)
        blocks = [bytearray(os.urandom(BLOCK)) for _ in range(count)]
        keys = block_keys([bytes([n]) * 32 for n in range(count)])
        job = store.store(BlockBatch(keys, BlockBuffers.from_buffers(blocks)))
        assert job.wait(30)
        assert job.ok
    finally:
        store.close()


def out(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(list(args)) == code
    return capsys.readouterr().out


def stored(home: Path) -> list[Path]:
    return sorted((home / "one").glob("*/*.segment"))


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    targets = json.loads(out(capsys, "ls", "--json"))["targets"]
    return {target["name"]: target for target in targets}


# --- ls --------------------------------------------------------------------------------------


def test_ls_of_nothing(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    text = out(capsys, "ls")
    assert f"one: {home}/one\n  is not there yet" in text
    assert "two (disabled)" in text
    assert listed(capsys)["one"]["usage"] is None
    assert not (home / "one").exists()


def test_ls_shows_namespaces(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    before = time.time()
    fill(namespace("SmolLM2"))
    fill(namespace("other\x1b[2Jmodel"), 1)
    text = out(capsys, "ls")
    line = next(line for line in text.splitlines() if "SmolLM2" in line)
    digest = namespace("SmolLM2").hex
    assert line.split()[:2] == [digest[:12], "SmolLM2"]
    for word in ("bfloat16", "vllm 0.32.0", "lifeboatcache-vllm 1", "0 alive, 1 dead"):
        assert word in line
    assert "\x1b" not in text
    (one,) = [n for n in listed(capsys)["one"]["namespaces"] if n["digest"] == digest]
    assert one["model"] == "SmolLM2"
    assert one["blocks"] == 3
    assert one["bytes"] >= 3 * BLOCK
    assert before - 5 <= one["created"] <= one["last_used"] + 1
    assert [writer["alive"] for writer in one["writers"]] == [False]
    assert listed(capsys)["one"]["usage"]["used"] >= 4 * BLOCK


@pytest.mark.parametrize("left", ["lock", "access", "segment"])
def test_ls_shows_when_a_namespace_was_created_while_another_writer_begins(
    capsys: pytest.CaptureFixture[str], home: Path, left: str
) -> None:
    # A writer takes its lock before it has a journal: CREATED was "-" then.
    before = time.time()
    fill(namespace("SmolLM2"))
    (place,) = (path for path in (home / "one").iterdir() if path.is_dir())
    name = "ff" * 16 + (".00000001.segment" if left == "segment" else f".{left}")
    (place / name).touch()
    (one,) = listed(capsys)["one"]["namespaces"]
    assert len(one["writers"]) == 2
    assert one["created"] >= before - 5


def test_ls_one_namespace_is_its_identity(capsys: pytest.CaptureFixture[str]) -> None:
    space = namespace("SmolLM2")
    fill(space)
    fill(namespace("other"))
    document = json.loads(out(capsys, "ls", space.hex[:10]))
    assert document["identity"] == dict(space.identity)
    assert document["display"]["engine"] == "vllm 0.32.0"
    assert document["digest"] == space.hex
    assert [target["name"] for target in document["targets"]] == ["one"]
    assert document["targets"][0]["blocks"] == 3
    # Also by its whole name, in capitals.
    assert json.loads(out(capsys, "ls", space.hex.upper()))["digest"] == space.hex


def test_ls_of_an_unknown_or_ambiguous_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: dict[str, list[Namespace]] = {}
    # Sixteen first letters: among seventeen namespaces, two share one.
    for number in range(17):
        space = namespace(f"model {number}")
        starts.setdefault(space.hex[0], []).append(space)
    first, second = next(spaces[:2] for spaces in starts.values() if len(spaces) > 1)
    fill(first, 1)
    fill(second, 1)
    assert main(["ls", first.hex[0]]) == 2
    err = capsys.readouterr().err
    assert first.hex[:12] in err
    assert second.hex[:12] in err
    assert "Write more" in err
    for prefix in ("zz", ""):
        assert main(["ls", prefix]) == 2
        assert "no namespace starts with" in capsys.readouterr().err


def test_ls_goes_on_past_a_target_it_cannot_read(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    fill(namespace("SmolLM2"))
    (home / "two").mkdir()
    (home / "two/photo.jpg").write_bytes(b"not ours")
    assert main(["ls"]) == 2
    captured = capsys.readouterr()
    assert "SmolLM2" in captured.out
    assert "lifeboat-cache: error: two: " in captured.err
    assert "photo.jpg" in captured.err
    assert main(["ls", "--json"]) == 2
    targets = json.loads(capsys.readouterr().out)["targets"]
    assert [bool(target["problem"]) for target in targets] == [False, True, False]


def test_a_damaged_document_is_shown_and_can_be_purged(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    space = namespace("SmolLM2")
    fill(space)
    (document,) = home.glob("one/*/namespace.json")
    document.write_text("{")
    text = out(capsys, "ls")
    assert f"{space.hex[:12]}: namespace.json" in text
    # By the name it had, too.
    out(capsys, "purge", "--namespace", space.hex, "--yes")
    assert stored(home) == []


# --- purge -----------------------------------------------------------------------------------


def test_purge_asks_first_and_refuses_without_a_terminal(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(namespace("SmolLM2"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["purge", "--all"]) == 2
    captured = capsys.readouterr()
    assert "will remove" in captured.out
    assert "add --yes" in captured.err
    assert len(stored(home)) == 1


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("y", 0, 0), ("YES", 0, 0), ("", 1, 1), ("n", 1, 1)]
)
def test_purge_does_what_is_answered(home: Path, answer: str, code: int, left: int) -> None:
    import pty

    fill(namespace("SmolLM2"))
    program = "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "purge", "--all"],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    os.write(leader, f"{answer}\n".encode())
    output, errors = process.communicate(timeout=120)
    os.close(leader)
    os.close(follower)
    assert process.returncode == code, errors
    assert "[y/N]" in errors
    assert ("Nothing was removed." in output) == bool(left)
    assert len(stored(home)) == left


def test_purge_by_namespace(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    first, second, third = map(namespace, ("first", "second", "third"))
    for space in (first, second, third):
        fill(space)
    text = out(
        capsys, "purge", "--yes", "--namespace", first.hex[:10], "--namespace", third.hex[:10]
    )
    assert f"one {first.hex[:12]}: removed" in text
    assert "3 blocks" in text
    assert [n["digest"] for n in listed(capsys)["one"]["namespaces"]] == [second.hex]
    assert main(["purge", "--yes", "--namespace", "zz"]) == 2
    assert len(stored(home)) == 1


def test_purge_dry_run_removes_nothing(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    fill(namespace("SmolLM2"))
    assert "would remove" in out(capsys, "purge", "--all", "--dry-run")
    assert len(stored(home)) == 1


def test_purge_older_than(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    old, young = map(namespace, ("old", "young"))
    fill(old)
    aged = time.time() - 8 * 86400
    for path in home.glob("one/*/*.segment"):
        os.utime(path, (aged, aged))
    fill(young)
    out(capsys, "purge", "--all", "--older-than", "7d", "--yes")
    assert [n["digest"] for n in listed(capsys)["one"]["namespaces"]] == [young.hex]


@pytest.mark.parametrize(("age", "expected"), [("7", "of what?"), ("7w", "no unit 'w'"), ("", "")])
def test_purge_needs_a_unit_for_the_age(
    capsys: pytest.CaptureFixture[str], age: str, expected: str
) -> None:
    assert main(["purge", "--all", "--yes", "--older-than", age]) == 2
    err = capsys.readouterr().err
    assert "for example 7d or 12h" in err
    assert expected in err


def test_purge_leaves_what_is_in_use_and_says_so(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    space = namespace("SmolLM2")
    fill(space)
    store = open_block_store(load_config().config, space)
    try:
        assert store.wait_recovered(30)
        keys = block_keys([b"x" * 32])
        blocks = BlockBuffers.from_buffers([bytearray(BLOCK)])
        assert store.store(BlockBatch(keys, blocks)).wait(30)
        text = out(capsys, "purge", "--all", "--yes")
        assert f"in use by pid {os.getpid()}" in text
        assert len(stored(home)) == 1
        (one,) = listed(capsys)["one"]["namespaces"]
        assert [writer["alive"] for writer in one["writers"]] == [True]
    finally:
        store.close()
    out(capsys, "purge", "--all", "--yes")
    assert stored(home) == []
    assert listed(capsys)["one"]["namespaces"] == []


def test_purge_reaches_a_disabled_tier(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    fill(namespace("SmolLM2"))
    file = home / "lifeboat.yaml"
    file.write_text(file.read_text().replace("/one, ", "/one, enabled: false, "))
    assert not listed(capsys)["one"]["enabled"]
    assert "removed" in out(capsys, "purge", "--all", "--yes")
    assert stored(home) == []


def test_purge_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Nothing is stored." in out(capsys, "purge", "--all")

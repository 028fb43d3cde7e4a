"""``lifeboat-cache selftest``: the plug-in point for adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lifeboat_cache.cli.main import main
from lifeboat_cache.selftest import Report, Step
from lifeboat_cache.selftest import run as selftest_run

HEAD = """
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.selftest import Report, Step
"""

GOOD = (
    HEAD
    + """
print("noise while it is imported")

def run(args):
    print("noise while it runs")
    steps = (Step("one", "ok", "fine"), Step("kept", "ok", f"{args.keep} {args.config}"))
    return Report("engine 1.0", steps, facts={"store_gb_s": 1.5})
"""
)
BAD = (
    HEAD
    + """
def run(args):
    failed = Step("one", "failed", "the bytes differ", "Use a tested version.", ("at byte 3",))
    return Report("engine 1.0", (failed, Step("two", "skipped", "nothing was stored")))
"""
)


def adapter(root: Path, name: str, source: str) -> None:
    info = root / f"{name}_one-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-one\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[lifeboat_cache.selftest]\n{name} = {name}_module:run\n"
    )
    (root / f"{name}_module.py").write_text(source)


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lifeboat_cache.cli.main", "selftest", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_adapter_adds_its_own(tmp_path: Path) -> None:
    adapter(tmp_path, "good", GOOD)
    done = run(tmp_path, "good", "--config", "x")
    assert done.returncode == 0, done.stderr
    assert "engine 1.0: 2 ok, 0 failed, 0 skipped" in done.stdout
    assert "False x" in done.stdout
    assert "store gb s: 1.5" in done.stdout
    assert done.stderr.count("noise") == 2


def test_json_is_one_object_however_much_the_engine_prints(tmp_path: Path) -> None:
    adapter(tmp_path, "good", GOOD)
    done = run(tmp_path, "good", "--json", "--keep")
    document = json.loads(done.stdout)
    assert document["status"] == "ok"
    assert document["unable"] is None
    assert document["facts"] == {"store_gb_s": 1.5}
    assert [step["summary"] for step in document["steps"]] == ["fine", "True None"]


def test_a_failed_step_is_1_with_reason_and_remedy(tmp_path: Path) -> None:
    adapter(tmp_path, "bad", BAD)
    done = run(tmp_path, "bad")
    assert done.returncode == 1
    for words in ("the bytes differ", "-> Use a tested version.", "at byte 3", "1 failed"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("1 / 0", 2, "Reinstall good-one"),
        ("def run(args):\n    return 0\n", 1, "int instead of a Report"),
        (
            f"{HEAD}def run(args):\n    raise LifeboatError('no disk: mount it')\n",
            2,
            "no disk: mount it",
        ),
        ("def run(args):\n    raise KeyError('x')\n", 1, "KeyError"),
    ],
)
def test_a_broken_adapter_is_a_sentence(tmp_path: Path, source: str, code: int, words: str) -> None:
    adapter(tmp_path, "good", source)
    done = run(tmp_path, "good")
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    document = json.loads(run(tmp_path, "good", "--json").stdout)
    assert document["status"] == ("failed" if code == 1 else "unable")


def test_the_only_one_need_not_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter(tmp_path, "good", GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(selftest_run, "GROUP", "lifeboat_cache.selftest.one")
    info = tmp_path / "good_one-1.0.dist-info" / "entry_points.txt"
    info.write_text("[lifeboat_cache.selftest.one]\ngood = good_module:run\n")
    assert main(["selftest"]) == 0
    assert "engine 1.0: 2 ok" in capsys.readouterr().out
    info.write_text(info.read_text() + "other = good_module:run\n")
    assert main(["selftest"]) == 2
    assert "several adapters are installed: name one of good, other" in capsys.readouterr().err
    info.write_text("")
    assert main(["selftest"]) == 2
    assert "no adapter with a self-test is installed" in capsys.readouterr().err


def test_an_engine_without_a_self_test_names_those_that_have_one(tmp_path: Path) -> None:
    adapter(tmp_path, "good", GOOD)
    done = run(tmp_path, "other")
    assert done.returncode == 2
    assert "'other'" in done.stderr
    assert "good" in done.stderr
    assert not done.stdout


def test_a_report_without_steps_is_not_a_success() -> None:
    assert Report("engine").exit_code == 2
    assert Report("engine", (Step("one", "skipped", "why"),)).exit_code == 1

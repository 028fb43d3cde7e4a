"""``dev.py test`` picks the right suites and does not call nothing a success."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devkit import testing
from devkit.beside import WHOLE_TESTS
from devkit.places import ROOT
from devkit.shell import DevError

_REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="1"/></testsuites>'
_Pytest = Callable[..., list[list[str]]]
_ALL = len(testing._SUITES)


@contextlib.contextmanager
def _in_this_process(*, full: bool) -> Iterator[Any]:
    """As the second lane, once it is waited for."""
    yield SimpleNamespace(finish=lambda: testing.run_tests([str(WHOLE_TESTS)], full=full) == 0)


@pytest.fixture
def run_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Pytest:
    """Return a function that lets pytest end with given codes and returns its arguments."""
    monkeypatch.setenv("LIFEBOAT_DEV_HOME", str(tmp_path))
    monkeypatch.setattr(testing, "make_model", lambda: tmp_path)
    monkeypatch.setattr(testing, "make_next_vllm", lambda: tmp_path / "next")
    monkeypatch.setattr(testing._Suite, "python", lambda _: tmp_path / "python")
    commands: list[list[str]] = []

    def prepare(*codes: int) -> list[list[str]]:
        left = list(codes)

        def pretend(command: list[str | Path], *, env: dict[str, str], **_: object) -> int:
            words = [*(f"{name}={value}" for name, value in env.items()), *map(str, command)]
            commands.append(words)
            code = left.pop(0)
            if code in (0, 1):
                report = next(word for word in words if word.startswith("--junitxml="))
                Path(report.partition("=")[2]).write_text(_REPORT.format(4, code))
            return code

        monkeypatch.setattr(testing, "try_run", pretend)
        for check in ("_check_style", "_check_types", "_check_wheels"):
            monkeypatch.setattr(testing, check, lambda: None)
        monkeypatch.setattr(testing, "beside", _in_this_process)
        return commands

    return prepare


def test_everything_passes(run_pytest: _Pytest, capsys: pytest.CaptureFixture[str]) -> None:
    commands = run_pytest(*[0] * _ALL)
    assert testing.run_tests([], full=False) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"{3 * _ALL} passed, 0 failed, {_ALL} skipped"
    )
    assert all("not full" in command for command in commands)


def test_full_deselects_nothing_and_runs_on_the_next_vllm_too(
    run_pytest: _Pytest, tmp_path: Path
) -> None:
    commands = run_pytest(*[0] * (_ALL + 1))
    assert testing.run_tests([], full=True) == 0
    assert not any("not full" in command for command in commands)
    assert sum(f"PYTHONPATH={tmp_path / 'next'}" in command for command in commands) == 1


def test_failure_fails_and_the_rest_still_runs(
    run_pytest: _Pytest, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = run_pytest(1, *[0] * (_ALL - 1))
    assert testing.run_tests([], full=False) == 1
    assert len(commands) == _ALL
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"{3 * _ALL - 1} passed, 1 failed, {_ALL} skipped"
    )


@pytest.mark.parametrize("code", [1, 5])
def test_tests_across_packages_count_too(run_pytest: _Pytest, code: int) -> None:
    away = sum(suite.directory == WHOLE_TESTS for suite in testing._SUITES)
    run_pytest(*[0] * (_ALL - away), code, *[0] * (away - 1))
    assert testing.run_tests([], full=False) == 1


def test_failed_check_fails(run_pytest: _Pytest, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pytest(*[0] * _ALL)

    def fail() -> None:
        raise DevError("unused import")

    monkeypatch.setattr(testing, "_check_style", fail)
    assert testing.run_tests([], full=False) == 1


def test_empty_suite_fails(run_pytest: _Pytest, capsys: pytest.CaptureFixture[str]) -> None:
    run_pytest(0, 5, *[0] * (_ALL - 2))
    assert testing.run_tests([], full=False) == 1
    assert "a suite without tests proves nothing" in capsys.readouterr().out


@pytest.mark.parametrize(("codes", "expected"), [((5, 0, *[5] * (_ALL - 2)), 0), ((5,) * _ALL, 1)])
def test_selection_may_leave_suites_empty_but_not_all(
    run_pytest: _Pytest, codes: tuple[int, ...], expected: int
) -> None:
    run_pytest(*codes)
    assert testing.run_tests(["-k", "journal"], full=False) == expected


def test_path_goes_to_its_suite_alone(run_pytest: _Pytest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = run_pytest(0)
    path = os.path.relpath(__file__, ROOT)
    assert testing.run_tests([f"{path}::test_empty_suite_fails", "-x"], full=False) == 0
    (command,) = commands
    assert command[-2:] == ["-x", f"{path}::test_empty_suite_fails"]


def test_directory_above_suites_stands_for_them(run_pytest: _Pytest) -> None:
    commands = run_pytest(*[0] * 7)
    assert testing.run_tests([str(ROOT / "packages")], full=False) == 0
    assert [Path(command[-1]).parent.name for command in commands] == [
        "lifeboatcache-core",
        "lifeboatcache-dashboard",
        "lifeboatcache",
        "lifeboatcache-vllm",
        "lifeboatcache-sglang",
        "lifeboatcache-mlx",
        "lifeboatcache-lmcache",
    ]


def test_engines_share_a_directory_of_tests(run_pytest: _Pytest) -> None:
    (ours,) = [suite for suite in testing._SUITES if suite.name == "whole-sglang"]
    tests = ours.all_tests()
    assert str(ROOT / "tests" / "test_sglang_restart.py") in tests
    commands = run_pytest(0, 0, 0, 0)
    assert testing.run_tests([str(ROOT / "tests")], full=False) == 0
    for_vllm, for_sglang, *_ = commands
    assert for_vllm[-4:] == [
        f"--ignore-glob={ROOT / 'tests' / 'test_sglang_*.py'}",
        f"--ignore-glob={ROOT / 'tests' / 'test_mlx_*.py'}",
        f"--ignore-glob={ROOT / 'tests' / 'test_lmcache_*.py'}",
        str(ROOT / "tests"),
    ]
    assert for_sglang[-len(tests) :] == tests


@pytest.mark.parametrize("name", ["test_sglang_restart.py", "test_dev_testing.py"])
def test_a_file_goes_to_its_engine(run_pytest: _Pytest, name: str) -> None:
    commands = run_pytest(0)
    path = str(ROOT / "tests" / name)
    assert testing.run_tests([path], full=False) == 0
    (command,) = commands
    report = next(word for word in command if word.startswith("--junitxml="))
    assert ("sglang" in report) is ("sglang" in name)


def test_path_outside_every_suite_is_refused(run_pytest: _Pytest) -> None:
    run_pytest()
    with pytest.raises(DevError, match=r"no suite holds .*tools"):
        testing.run_tests([str(ROOT / "tools"), __file__], full=False)


def test_suites_share_one_home_for_kernels(run_pytest: _Pytest, tmp_path: Path) -> None:
    commands = run_pytest(*[0] * _ALL)
    assert testing.run_tests([], full=False) == 0
    home = f"LIFEBOAT_TEST_KERNEL_HOME={tmp_path / 'kernels'}"
    assert all(home in command for command in commands)


def test_what_a_shell_starts_in_the_background_can_be_interrupted() -> None:
    child = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"sys.path.insert(0, {str(ROOT / 'tools')!r}); from devkit.shell import heed_interrupts; "
        f"start = lambda: subprocess.run([sys.executable, '-c', {child!r}], check=True); "
        "start(); heed_interrupts(); start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


_LANE = """
import sys
sys.path.insert(0, {tools!r})
from pathlib import Path
from devkit import beside
beside.ROOT = Path({root!r})
with beside.beside(full=False) as lane:
    {then}
"""


@pytest.mark.parametrize(
    ("then", "code", "shown"),
    [
        ("sys.exit(not lane.finish())", 0, "test tests\nran\n"),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_what_runs_beside_is_shown_or_ended(
    tmp_path: Path, then: str, code: int, shown: str
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "dev.py").write_text(
        "import os, sys, time\n"
        "print(sys.argv[1], os.path.basename(sys.argv[2]), flush=True)\n"
        f"time.sleep({0 if code == 0 else 600})\n"
        "print('ran')\n"
    )
    program = _LANE.format(tools=str(ROOT / "tools"), root=str(tmp_path), then=then)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LIFEBOAT_DEV_HOME": str(tmp_path / "dev")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, shown)

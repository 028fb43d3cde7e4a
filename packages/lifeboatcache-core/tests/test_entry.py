"""The entry module refuses a foreign distribution that hides ours."""

import logging
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import lifeboat_entry

_SOURCE = Path(lifeboat_entry.__file__).resolve().parent
_COMMAND = "import sys, lifeboat_entry; sys.exit(lifeboat_entry.main())"


def _run(
    code: str, *argv: str, path: list[Path], python: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python or sys.executable), "-c", code, *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _plant(directory: Path, module: str = "__init__.py") -> Path:
    """Plant somebody else's lifeboat_cache; importing it leaves a trace."""
    file = directory / "lifeboat_cache" / module
    file.parent.mkdir(parents=True)
    file.write_text("print('foreign code ran')\n")
    return directory


def test_own_modules_are_loaded() -> None:
    from lifeboat_cache.version import __version__

    assert lifeboat_entry.load("lifeboat_cache.version", "__version__") is __version__


def test_missing_module_is_an_ordinary_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lifeboat_entry.load("lifeboat_cache.no_such_module", "main")


@pytest.mark.parametrize("module", ["__init__.py", "version.py", "cli/__init__.py"])
def test_command_refuses_foreign_package(tmp_path: Path, module: str) -> None:
    foreign = _plant(tmp_path, module)
    done = _run(_COMMAND, "--version", path=[foreign, _SOURCE])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lifeboat-cache: error: ")
    assert str(foreign / "lifeboat_cache" / module) in line
    assert "remove" in line
    assert "foreign code ran" not in done.stdout


def test_command_works_without_a_foreign_package() -> None:
    done = _run(_COMMAND, "--version", path=[_SOURCE])
    assert done.returncode == 0, done.stderr


def test_plugin_only_warns_about_a_foreign_package(tmp_path: Path) -> None:
    foreign = _plant(tmp_path)
    code = (
        "import pathlib, lifeboat_entry\n"
        "lifeboat_entry.register('lifeboat_cache.version', root=pathlib.Path.cwd())\n"
        "print('engine goes on')"
    )
    done = _run(code, path=[foreign, _SOURCE])
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("LifeboatCache is off in this process: ")
    assert str(foreign) in line
    assert done.stdout == "engine goes on\n"


def test_plugin_failure_is_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, logger="lifeboat_cache"):
        lifeboat_entry.register("lifeboat_cache.no_such_plugin", root=tmp_path)
    (record,) = caplog.records
    assert "no_such_plugin" in record.getMessage()


def test_plugin_module_must_lie_in_its_own_distribution(tmp_path: Path) -> None:
    with pytest.raises(lifeboat_entry.ForeignPackageError):
        lifeboat_entry.load("lifeboat_cache.errors", "LifeboatError", root=tmp_path)


def test_installed_foreign_wheel_is_named_in_the_remedy(tmp_path: Path) -> None:
    """A regular package in site-packages hides an editable install, and is refused."""
    wheel = tmp_path / "stranger-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lifeboat_cache/__init__.py", "raise SystemExit('foreign code ran')\n")
        archive.writestr(
            "stranger-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: stranger\nVersion: 1\n"
        )
        archive.writestr(
            "stranger-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            "stranger-1.0.dist-info/RECORD",
            "lifeboat_cache/__init__.py,,\nstranger-1.0.dist-info/METADATA,,\n"
            "stranger-1.0.dist-info/WHEEL,,\nstranger-1.0.dist-info/RECORD,,\n",
        )
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
        timeout=120,
    )
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "ours.pth").write_text(f"{_SOURCE}\n")  # what an editable install leaves
    done = _run(_COMMAND, "--version", path=[], python=python)
    assert done.returncode == 2
    assert f"{python} -m pip uninstall stranger" in done.stderr
    assert "foreign code ran" not in done.stderr

"""Building the wheels, and trying them where nothing else is installed."""

import shutil
from pathlib import Path

from devkit import recipes
from devkit.hatch import hatch_run
from devkit.places import dev_home
from devkit.shell import DevError, note, try_run
from devkit.wheels import check_wheels, digest_of, find_wheels

__all__ = ["build_wheels", "smoke_test"]

_USE = """
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.version import __version__
version: str = __version__
error: Exception = LifeboatError()
"""


def build_wheels(target: Path) -> list[Path]:
    """Build and check all wheels into an emptied directory.

    Raises
    ------
    DevError
        When one does not build, or the check finds something.
    """
    for old in find_wheels(target):
        old.unlink()
    if hatch_run("build", ["wheels", target]):
        msg = "the wheels did not build; see above"
        raise DevError(msg)
    wheels = find_wheels(target)
    problems = check_wheels(wheels)
    if problems:
        raise DevError("\n".join(["the built wheels are wrong:", *problems]))
    for wheel in wheels:
        print(wheel)
    return wheels


def smoke_test(wheels: list[Path]) -> None:
    """Install the wheels into a clean environment and use them.

    Raises
    ------
    DevError
        When the installed command, the modules or their types do not work.
    """
    digest = digest_of(wheels)
    environment = recipes.wheels(wheels, digest)
    for old in environment.path.parent.glob("wheels-*"):
        if not old.name.startswith(environment.name):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    python = environment.make()
    elsewhere = dev_home() / "empty"  # where no source tree can be picked up
    elsewhere.mkdir(exist_ok=True)
    checks: list[list[str | Path]] = [
        [python, "-m", "pip", "check", "--disable-pip-version-check"],
        [python.with_name("lifeboat-cache"), "--version"],
        [python.with_name("lifeboat-cache"), "dashboard", "--help"],
        [
            python,
            "-c",
            f"import lifeboat_entry, lifeboat_sglang_entry, lifeboat_vllm_entry\n{_USE}",
        ],
    ]
    for check in checks:
        note("in a clean environment: " + " ".join(str(part) for part in check).split("\n")[0])
        if try_run(check, cwd=elsewhere):
            msg = f"the installed wheels failed this: {check}"
            raise DevError(msg)
    note("in a clean environment: types reach a user of the wheels")
    if hatch_run(
        "types",
        ["mypy", "--strict", "--config-file=", "--cache-dir", elsewhere / ".mypy_cache",
         "--python-executable", python, "-c", _USE],
    ):  # fmt: skip
        msg = "mypy does not see the types of the installed wheels; is py.typed in place?"
        raise DevError(msg)

"""The browser in which the dashboard is tested: Debian's Chromium and its driver."""

import os
import shutil

from devkit.shell import note, try_run

__all__ = ["install_browser"]

_PROGRAMS = ("chromium", "chromedriver")
_PACKAGES = ("chromium", "chromium-driver")


def install_browser() -> None:
    """Install it where it is missing and this user may; otherwise its tests say why they skip."""
    if all(shutil.which(program) for program in _PROGRAMS):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        note(f"without {' and '.join(_PACKAGES)} the tests in a browser are skipped")
        return
    variables = {"DEBIAN_FRONTEND": "noninteractive"}
    note(f"installing {' and '.join(_PACKAGES)}")
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *_PACKAGES],
    ):
        if try_run(command, env=variables):
            note("it could not be installed: the tests in a browser are skipped")
            return

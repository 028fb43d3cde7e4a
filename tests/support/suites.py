"""What the suites' conftests share."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from lifeboat_cache import kernels
from lifeboat_cache.kernels import cache

__all__ = ["compiled_kernels"]

#: A home directory in which all suites of `dev.py test` keep their kernels.
_SHARED = os.environ.get("LIFEBOAT_TEST_KERNEL_HOME")

_DAY_S = 86_400


def compiled_kernels(config: pytest.Config) -> Path:
    """A home directory with compiled kernels, kept from one run of pytest to the next.

    Tests may link and copy what is there, and must not change it: other suites use it too.
    """
    if _SHARED:
        home = Path(_SHARED)
    else:
        assert config.cache is not None
        home = Path(config.cache.mkdir("lifeboat-kernels"))
    assert kernels.compile_all(home), kernels.reason()
    mine = cache.directory(home)
    os.utime(mine)
    for other in mine.parent.iterdir():  # of sources that have been edited since
        if other != mine and time.time() - other.stat().st_mtime > _DAY_S:
            shutil.rmtree(other, ignore_errors=True)
    return home

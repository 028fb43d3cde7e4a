"""Numbers of system calls that kernels make by number, for C libraries that lack them.

0 stands for a call that this system does not have.
"""

from __future__ import annotations

import platform
import sys

__all__ = ["PREADV2", "STATX"]

_LINUX = {"x86_64": (327, 332), "aarch64": (286, 291)}

PREADV2, STATX = _LINUX.get(platform.machine(), (0, 0)) if sys.platform == "linux" else (0, 0)

"""``python -m lifeboat_cache.kernels``: compile the kernels for this machine."""

from __future__ import annotations

import sys
import time

from lifeboat_cache import kernels
from lifeboat_cache.kernels import cache


def main() -> int:
    """Compile, unless it is done; say what happened, and return the exit code."""
    started = time.monotonic()
    if not kernels.compile_all():
        print(kernels.reason(), file=sys.stderr)
        return 1
    print(f"kernels {cache.key()} are ready ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

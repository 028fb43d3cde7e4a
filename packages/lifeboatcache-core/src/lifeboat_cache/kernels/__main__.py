"""``python -m lifeboat_cache.kernels``: compile the kernels for this machine."""

from __future__ import annotations

import os
import sys
import time

from lifeboat_cache import kernels
from lifeboat_cache.codecs.speed import codecs_measured, ensure_codec_rates
from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.kernels import cache


def main() -> int:
    """Compile and measure the codecs, unless it is done; say what happened.

    Returns the exit code: 0 if the kernels can be used, measured or not.
    """
    started = time.monotonic()
    if not kernels.compile_all():
        print(kernels.reason(), file=sys.stderr)
        return 1
    home = home_directory(os.environ)
    ensure_codec_rates(home)
    measured = "measured" if codecs_measured(home) else "not measured"
    took = time.monotonic() - started
    print(f"kernels {cache.key()} are ready, codecs {measured} ({took:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

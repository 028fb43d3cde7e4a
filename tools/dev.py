#!/usr/bin/env python3
"""The one entry for developers: everything from a fresh clone, nothing to install first.

    python3 tools/dev.py demo        a vLLM server that keeps its KV across a restart
    python3 tools/dev.py test        everything that CI runs
    python3 tools/dev.py bench NAME  ratios against a peer and a limit

Environments, the model and caches go to .dev/ in the checkout, or where
LIFEBOAT_DEV_HOME says. Only the standard library is needed to run this file.
"""

import argparse
import signal
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit("dev.py needs Python 3.11 or newer: run it as `python3.11 tools/dev.py ...`")

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devkit import commands
from devkit.shell import DevError, heed_interrupts


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands.add_to(parser)
    arguments, rest = parser.parse_known_args()
    if rest and not arguments.takes_pytest_arguments:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    heed_interrupts()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Servers have sessions of their own, and would stay when this is told to end.
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        code: int = arguments.run(arguments)
    except DevError as error:
        print(f"dev.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())

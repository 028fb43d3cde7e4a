"""``lifeboat-cache selftest NAME``: stores and restores through an engine's real interface.

Each adapter adds its self-test through the entry-point group
``lifeboat_cache.selftest``: the entry's name is the engine, and it loads to a function
``run(args: argparse.Namespace) -> Report``. ``args.config`` is the value of ``--config``
and ``args.keep`` whether files are kept. What the function prints goes to stderr; the
command prints the report. A self-test keeps away from the user's store and judges no
speed.
"""

from lifeboat_cache.selftest.report import Report, Status, Step
from lifeboat_cache.selftest.run import GROUP, run_selftest

__all__ = ["GROUP", "Report", "Status", "Step", "run_selftest"]

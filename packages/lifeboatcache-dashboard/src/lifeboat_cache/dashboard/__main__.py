"""Started by the agent, by its path: the dashboard as the agent's child."""

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Serve until the agent ends; the exit code is one of ``lifeboat_cache.agent.exits``."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    core, *arguments = sys.argv[1:]
    # Last, so that nothing is hidden.
    sys.path += [place for place in (root, core) if place not in sys.path]
    from lifeboat_cache.dashboard.child import run

    return run(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may be stuck in system calls for ever: nobody waits for them.
    os._exit(code)

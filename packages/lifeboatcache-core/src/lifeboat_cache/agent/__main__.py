"""Started by engines, by its path: the way into the agent's process.

This file imports nothing but the standard library before it knows that
``lifeboat_cache`` is ours.
"""

import os
import sys


def _load(module: str, attribute: str) -> object:
    """Import from LifeboatCache, and only from LifeboatCache."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        import lifeboat_entry
    except ImportError:
        # An engine that found us through a path of its own: last, so that nothing is hidden.
        sys.path.append(root)
        import lifeboat_entry
    return lifeboat_entry.load(module, attribute)


def main() -> int:
    """Run the agent; the exit code is one of ``lifeboat_cache.agent.exits``."""
    try:
        run = _load("lifeboat_cache.agent.launch", "launch")
    except ImportError as error:
        print(f"lifeboat-cache agent: error: {error}", file=sys.stderr)
        return 2
    code: int = run(sys.argv[1:])  # type: ignore[operator]
    return code


if __name__ == "__main__":
    # Threads may be stuck in system calls for ever: nobody waits for them.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

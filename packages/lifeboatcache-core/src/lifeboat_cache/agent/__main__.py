"""Started by engines, by its path: the way into the agent's process.

This file imports nothing but the standard library before it is nobody's child and
knows that ``lifeboat_cache`` is ours.
"""

import os
import sys

#: Told by a process that has gone before it knew what would become of it.
_NO_ANSWER = 9


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


def _detach() -> int:
    """Go on as nobody's child; return where to tell what becomes of it.

    The process that the engine has started waits for that and ends.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        answer = os.read(read, 1)
        os._exit(answer[0] if answer else _NO_ANSWER)
    os.close(read)
    return write


def main() -> int:
    """Run the agent; the exit code is one of ``lifeboat_cache.agent.exits``."""
    arguments = sys.argv[1:]
    tell = -1
    if arguments[:1] == ["--detach"]:
        del arguments[0]
        # Before anything is imported that may start threads.
        tell = _detach()
    try:
        run = _load("lifeboat_cache.agent.launch", "launch")
    except ImportError as error:
        print(f"lifeboat-cache agent: error: {error}", file=sys.stderr)
        return 2
    code: int = run(arguments, tell)  # type: ignore[operator]
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may be stuck in system calls for ever: nobody waits for them.
    os._exit(code)

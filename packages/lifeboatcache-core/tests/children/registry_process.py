"""Uses the registry of a home directory, in processes that can be killed.

``publish HOME``: for every number on stdin, publishes it as the count ``x`` and prints it;
``close`` closes the entry. ``fold HOME``: for every line on stdin starts a copy of itself
and prints the copy's process id. A copy for ``loop`` folds until it is killed; one for a
number kills itself in front of that file operation, and ends if there are fewer; one
for ``publish NUMBER`` does so while it publishes the counts 1 to 5, printing ``+COUNT``
after each.
``idle HOME``: holds the totals until it is killed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifeboat_cache.registry import Registration, fold
from lifeboat_cache.registry import totals as totals_module

#: What changes or opens files.
OPERATIONS = ("open", "replace", "unlink", "fsync", "close", "scandir", "listdir")


def counted(number: int) -> dict[str, Any]:
    return {"counters": [{"labels": {"target": "t"}, "values": {"x": number}}]}


def publish(home: Path) -> None:
    count = 0

    entry = Registration(home, describe=lambda: counted(count))
    print(entry.id or entry.reason, flush=True)
    for line in sys.stdin:
        if line.strip() == "close":
            entry.close()
        else:
            count = int(line)
            entry.publish()
        print(count, flush=True)


def die_at(number: int) -> None:
    left = number

    def deadly(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, deadly(getattr(os, name)))


def publish_dying(home: Path, number: int) -> None:
    die_at(number)
    entry = Registration(home, describe=lambda: counted(0))
    for count in range(1, 6):
        entry.publish(counted(count))
        print(f"+{count}", flush=True)
    entry.close(counted(5))


def serve(home: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            if line.strip() == "loop":
                while True:
                    fold(home)
            number = int(line.split()[-1])
            if line.startswith("publish"):
                publish_dying(home, number)
            else:
                die_at(number)
                fold(home)
            os._exit(0)
        if line.strip() == "loop":
            print(child, flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main() -> None:
    mode, home = sys.argv[1], Path(sys.argv[2])
    if mode == "publish":
        publish(home)
    elif mode == "fold":
        serve(home)
    else:
        with totals_module._held(home / "run", 1.0, fcntl.LOCK_EX) as held:
            print(held, flush=True)
            signal.pause()


if __name__ == "__main__":
    main()

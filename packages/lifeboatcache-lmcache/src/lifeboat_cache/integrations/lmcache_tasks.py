"""Tasks of LMCache's under way: their numbers, their parts and their results."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Lookups", "Results", "TaskParts", "Waiting"]

_Result = TypeVar("_Result")


class Results(Generic[_Result]):
    """Numbers tasks and hands out the result of each once.

    Parameters
    ----------
    notify
        Called after a result has been put down, so that who is woken finds it.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._numbers = itertools.count(1)
        self._open: set[int] = set()
        self._ready: dict[int, _Result] = {}
        self._lock = threading.Lock()

    def begin(self) -> int:
        """The number of a new task."""
        with self._lock:
            number = next(self._numbers)
            self._open.add(number)
        return number

    def end(self, task: int, result: _Result) -> None:
        """Put down the result of a task; only the first one counts."""
        with self._lock:
            if task not in self._open:
                return
            self._open.discard(task)
            self._ready[task] = result
        self._notify()

    def pop(self, task: int) -> _Result | None:
        """The result of a task, ``None`` if it has not ended or was asked for before."""
        with self._lock:
            return self._ready.pop(task, None)

    def pop_all(self) -> dict[int, _Result]:
        """All results that were not handed out yet."""
        with self._lock:
            ready, self._ready = self._ready, {}
        return ready

    def open(self) -> list[int]:
        """Tasks that have not ended."""
        with self._lock:
            return sorted(self._open)


class TaskParts:
    """A task that ends when all of its parts have.

    Parameters
    ----------
    count
        How many parts there are; with none it ends at once.
    done
        Called once, with whether every part went well and the bytes that were moved.
    """

    def __init__(self, count: int, done: Callable[[bool, int], None]) -> None:
        self._left = count
        self._done = done
        self._good = True
        self._moved = 0
        self._lock = threading.Lock()
        if not count:
            done(True, 0)

    def part(self, good: bool, moved: int) -> None:
        """One part has ended."""
        with self._lock:
            self._good = self._good and good
            self._moved += moved
            self._left -= 1
            last = not self._left
        if last:
            self._done(self._good, self._moved)


@dataclass(frozen=True)
class Waiting:
    """A lookup that could not be answered yet.

    Attributes
    ----------
    task, keys
        Its number, and how many keys it asks for.
    deadline
        When it is asked for the last time, of the monotonic clock.
    ask
        Is told whether its answer has to be final, and gives ``None`` for "not yet".
    """

    task: int
    keys: int
    deadline: float
    ask: Callable[[bool], Any]


class Lookups:
    """Lookups that could not be answered yet."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, waiting: Waiting) -> None:
        """Have it asked again."""
        with self._lock:
            self._waiting.append(waiting)

    def take(self) -> list[Waiting]:
        """All of them; who is not answered has to be added again."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

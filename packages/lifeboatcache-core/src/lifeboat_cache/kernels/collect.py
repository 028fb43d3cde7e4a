"""Waiting for finished tasks without the GIL, until it pays to tell Python.

A thread of Python that is told of every task takes the interpreter from the engine's
threads each time. So it is told when a job has been done as a whole, or after a while.
"""

from __future__ import annotations

import errno as errors
import time
from typing import Any

import numpy as np
from numba import types
from numba.core.types import ExternalFunction

from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, kernel
from lifeboat_cache.kernels.libc import errno, poll, read
from lifeboat_cache.kernels.memory import words_at

__all__ = ["collect"]

# What lies in front of a task: the address of its job's progress, or 0.
_PROGRESS_AT = np.int64(-8)
# The words of a job's progress (`lifeboat_cache.store.io_task`).
_HANDED_OVER, _FINISHED, _PLANNED = 0, 1, 2

_EINTR = errors.EINTR
_EPIPE = np.int64(errors.EPIPE)
_POLLIN = 1
_CLOCK_MONOTONIC = np.int32(time.CLOCK_MONOTONIC)
#: A job may have been planned to its end since its last task was finished.
_LOOK_AGAIN_MS = np.int64(2)

_clock_gettime = ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@helper
def _milliseconds() -> Any:
    spec = raw.stack(16)
    _clock_gettime(_CLOCK_MONOTONIC, np.int64(spec))
    words = words_at(np.int64(spec))
    return words[0] * np.int64(1000) + words[1] // np.int64(1_000_000)


@helper
def _worth_telling(tasks: Any, first: Any, count: Any) -> Any:
    """Whether some of the tasks ``first:count`` is the last one of its job, or of no job."""
    for number in range(first, count):
        if tasks[number] == 0:
            return True
        at = words_at(tasks[number] + _PROGRESS_AT)[0]
        if at == 0:
            return True
        progress = words_at(at)
        if progress[_PLANNED] != 0 and progress[_FINISHED] == progress[_HANDED_OVER]:
            return True
    return False


@kernel("int64(int32, int64, int64, int64)")
def collect(pipe: Any, room: Any, most: Any, patience_ms: Any) -> Any:
    """Take the addresses of finished tasks from a pipe.

    Parameters
    ----------
    pipe
        Descriptor, blocking. Nobody else reads from it.
    room, most
        Address of room for so many addresses.
    patience_ms
        Longest time to wait for more after the first.

    Returns
    -------
    int64
        How many were taken, at least one; or an error number, negative.
    """
    tasks = words_at(room)
    wait = np.int64(raw.stack(8))
    count, end = np.int64(0), np.int64(0)
    while True:
        got = read(pipe, room + np.int64(8) * count, np.uint64(8 * (most - count)))
        if got < 0:
            error = np.int64(errno())
            if error == _EINTR:
                continue
            return count if count > 0 else -error
        if got == 0:
            return count if count > 0 else -_EPIPE
        first, count = count, count + got // 8
        for number in range(first, count):
            if tasks[number] != 0:
                at = words_at(tasks[number] + _PROGRESS_AT)[0]
                if at != 0:
                    words_at(at)[_FINISHED] += 1
        if first == 0:
            end = _milliseconds() + patience_ms
        while True:
            # Of what was looked at before, the job may have been planned to its end since.
            if count == most or _worth_telling(tasks, np.int64(0), count):
                return count
            left = end - _milliseconds()
            if left <= 0:
                return count
            # struct pollfd: descriptor (32 bits), events (16), revents (16).
            words_at(wait)[0] = np.int64(pipe) | (_POLLIN << 32)
            if poll(wait, np.uint64(1), np.int32(min(left, _LOOK_AGAIN_MS))) > 0:
                break

"""Doing something in a forked child that may hang, eat memory or die."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["in_child"]


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def in_child(work: Callable[[], object], *, timeout: float = 20.0, memory: int = 1 << 30) -> None:
    """Call ``work`` in a forked child; its failure, its hanging and its death are failures here.

    Parameters
    ----------
    work
        What to do; its result is dropped.
    timeout
        Seconds after which the child is killed.
    memory
        Bytes of address space that it may take beyond what this process has.
    """
    result, report = os.pipe()
    child = os.fork()
    if not child:
        text = ""
        try:
            os.close(result)
            _limit_memory(memory)
            work()
        except BaseException:
            text = traceback.format_exc()
        os.write(report, (text[-8000:] or "done").encode())
        os._exit(0)
    os.close(report)
    said = b""
    give_up = time.monotonic() + timeout
    while time.monotonic() < give_up:
        ready, _, _ = select.select([result], [], [], give_up - time.monotonic())
        if ready:
            said = os.read(result, 10_000)
            break
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(result)
    if not said:
        died = os.waitstatus_to_exitcode(status)
        raise AssertionError(
            f"it hung for {timeout:g} s" if died == -signal.SIGKILL else f"it died with {died}"
        )
    if said != b"done":
        raise AssertionError("in the child:\n" + said.decode())

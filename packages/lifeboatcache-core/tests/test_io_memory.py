"""The memory of this process that devices read into and write from."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lifeboat_cache.system import io_memory


def test_io_memory_is_writable_and_begins_on_a_page() -> None:
    memory = io_memory(3 << 20)
    assert memory.nbytes == 3 << 20
    assert memory.ctypes.data % mmap.PAGESIZE == 0
    assert not memory.any()
    memory[:] = 7
    assert int(memory[-1]) == 7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shown by Linux's /proc")
def test_io_memory_asks_for_huge_pages_and_stays_with_its_process() -> None:
    memory = io_memory(8 << 20)
    flags = _flags(memory.ctypes.data)
    assert "wf" in flags  # not shared by a fork
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_forked_child_loses_nothing_when_it_lets_go_of_io_memory() -> None:
    # In a process of its own, which has no threads that a fork could harm.
    program = textwrap.dedent(
        """
        import gc, mmap, os, sys
        from lifeboat_cache.system import io_memory

        size = 8 << 20
        kept = [io_memory(size) for _ in range(4)]
        for one in kept:
            one[:] = 7
        child = os.fork()
        if not child:
            mine = [mmap.mmap(-1, size) for _ in range(16)]
            for one in mine:
                one[:5] = b"hello"
            del kept, one
            gc.collect()
            os._exit(0 if all(one[:5] == b"hello" for one in mine) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(f"the child ended with {status}" if status else
                 0 if all((one == 7).all() for one in kept) else "the parent's is damaged")
        """
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _flags(address: int) -> list[str]:
    """What the kernel keeps of the mapping that holds an address."""
    inside = False
    for line in Path(f"/proc/{os.getpid()}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError("the mapping is not there")

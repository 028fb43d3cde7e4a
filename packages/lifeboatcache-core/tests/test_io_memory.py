"""The memory of this process that devices read into and write from."""

from __future__ import annotations

import mmap
import os
import sys
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
    assert "dc" in flags  # not copied by a fork
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


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

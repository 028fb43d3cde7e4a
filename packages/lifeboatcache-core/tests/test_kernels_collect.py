"""Finished tasks are told of when their job is whole, and not one by one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.store.io_task import IoTask, new_progress

pytestmark = pytest.mark.usefixtures("kernels_on")

_LONG_MS = 60_000


def task(progress: npt.NDArray[np.int64] | None) -> IoTask:
    """A task that nobody runs."""
    none = np.zeros((0, 1), dtype=np.int64)
    return IoTask(
        kind="load",
        blocks=none[:, 0],
        runs=np.zeros((0, layout.RUN_COLUMNS), dtype=np.int64),
        offsets=none[:, 0],
        lengths=none[:, 0],
        iov=np.zeros((0, 2), dtype=np.uint64),
        starts=np.zeros(1, dtype=np.int64),
        bindings=np.zeros((0, 96), dtype=np.uint8),
        checksums=np.zeros((0, 16), dtype=np.uint8),
        algorithms=np.zeros(0, dtype=np.uint8),
        chunk_bytes=1,
        outcomes=np.zeros(0, dtype=np.uint8),
        progress=progress,
    )


class Pipe:
    """Finished tasks on their way to a thread that collects them."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self.room = np.zeros(8, dtype=np.int64)
        self._found: list[int] = []
        self._thread = threading.Thread(target=self._collect, daemon=True)

    def finish(self, *addresses: int) -> None:
        os.write(self.into, np.array(addresses, dtype=np.int64).tobytes())

    def collect(self, patience_ms: int = _LONG_MS) -> list[int]:
        from lifeboat_cache.kernels.collect import collect

        count = collect(self.out, self.room.ctypes.data, len(self.room), patience_ms)
        assert count > 0, os.strerror(-count)
        return list(self.room[:count].tolist())

    def _collect(self) -> None:
        self._found = self.collect()

    def start(self) -> None:
        self._thread.start()

    def found(self) -> list[int]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._found


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.into)
    os.close(made.out)


def test_a_job_is_told_of_when_it_is_whole(pipe: Pipe) -> None:
    progress = new_progress()
    tasks = [task(progress) for _ in range(3)]
    addresses = [one.address() for one in tasks]
    progress[:] = 3, 0, 1
    pipe.finish(*addresses[:2])
    pipe.start()
    pipe.finish(addresses[2])
    assert pipe.found() == addresses
    assert progress.tolist() == [3, 3, 1]


def test_a_job_may_be_planned_to_its_end_after_its_last_task(pipe: Pipe) -> None:
    progress = new_progress()
    one = task(progress)
    progress[0] = 1
    pipe.finish(one.address())
    pipe.start()
    while not progress[1]:
        pass
    progress[2] = 1
    assert pipe.found() == [one.words.ctypes.data]


def test_nobody_waits_longer_than_he_wants(pipe: Pipe) -> None:
    progress = new_progress()
    one = task(progress)
    progress[:] = 2, 0, 1
    pipe.finish(one.address())
    assert pipe.collect(1) == [one.words.ctypes.data]
    assert progress[1] == 1


def test_another_job_does_not_hold_up_one_that_is_whole(pipe: Pipe) -> None:
    open_ended, whole = new_progress(), new_progress()
    tasks = [task(open_ended), task(whole)]
    open_ended[0], whole[:] = 1, (1, 0, 1)
    addresses = [one.address() for one in tasks]
    pipe.finish(*addresses)
    assert pipe.collect() == addresses


@pytest.mark.parametrize("alone", ["no job", "the end"])
def test_what_belongs_to_no_job_is_told_of_at_once(pipe: Pipe, alone: str) -> None:
    one = task(None)
    address = one.address() if alone == "no job" else 0
    pipe.finish(address)
    assert pipe.collect() == [address]


def test_room_that_is_full_is_told_of(pipe: Pipe) -> None:
    progress = new_progress()
    one = task(progress)
    progress[0] = 100
    pipe.finish(*[one.address()] * (len(pipe.room) + 1))
    assert len(pipe.collect()) == len(pipe.room)
    assert progress[1] == len(pipe.room)


def test_a_pipe_that_cannot_be_read_is_said(pipe: Pipe) -> None:
    from lifeboat_cache.kernels.collect import collect

    assert collect(pipe.into, pipe.room.ctypes.data, 8, 1) < 0
    taking, giving = os.pipe()
    os.close(giving)
    try:
        assert collect(taking, pipe.room.ctypes.data, 8, 1) < 0
    finally:
        os.close(taking)

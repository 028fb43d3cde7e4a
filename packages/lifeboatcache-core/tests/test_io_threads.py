"""Native I/O threads and their Python twin do the same to files and memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.checksum import ALGORITHM_XXH3, Binding
from lifeboat_cache.job import Job
from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.store.io_python import execute
from lifeboat_cache.store.io_task import IoTask, Together, gather_pieces
from lifeboat_cache.store.native_pool import NativePool
from lifeboat_cache.system import usable_cpus
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver, aligned_memory

PAGE = 4096
OK = Outcome.OK

Run = Callable[[IoTask], None]


class Pool:
    """A native pool of which one waits for one task at a time."""

    def __init__(self, threads: int = 2) -> None:
        self.done: list[IoTask] = []
        self.event = threading.Event()
        self.pool = NativePool(threads, self._finished)

    def _finished(self, tasks: list[IoTask]) -> None:
        self.done += tasks
        self.event.set()

    def run(self, task: IoTask) -> None:
        self.event.clear()
        self.pool.submit([task])
        assert self.event.wait(60)
        assert self.done.pop() is task


@pytest.fixture(scope="module")
def native(kernel_home: Path) -> Iterator[Pool]:
    assert kernel_home.is_dir()
    pool = Pool()
    yield pool
    pool.pool.stop()


@pytest.fixture(params=["native", "twin"])
def run(request: pytest.FixtureRequest, native: Pool) -> Run:
    return native.run if request.param == "native" else execute


def task_of(
    kind: str,
    fd: int,
    mode: int,
    buffers: BlockBuffers,
    offsets: list[int],
    checksums: npt.NDArray[np.uint8] | None = None,
    *,
    runs: list[int] | None = None,
    chunk_bytes: int = 64 << 10,
    warm: int = -1,
) -> IoTask:
    """A task for blocks at given offsets; ``runs`` says with which blocks runs begin.

    ``warm`` is a descriptor to read first what the page cache holds.
    """
    count = len(buffers)
    blocks = np.arange(count)
    iov, starts = gather_pieces(buffers, blocks)
    lengths = buffers.sizes()
    starts_of_runs = [0] if runs is None else runs
    table = [
        [fd, mode, first, last - first, warm]
        for first, last in zip(starts_of_runs, [*starts_of_runs[1:], count], strict=True)
    ]
    keys = np.arange(count * 32, dtype=np.uint8).reshape(count, 32)
    return IoTask(
        kind="load" if kind == "load" else "store",
        blocks=blocks,
        runs=np.array(table, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        lengths=lengths,
        iov=iov,
        starts=starts,
        bindings=Binding(bytes(32)).pack_batch(
            keys,
            7,
            lengths.astype(np.uint32),
            lengths.astype(np.uint32),
            0,
            ALGORITHM_XXH3,
        ),
        checksums=np.zeros((count, 16), np.uint8) if checksums is None else checksums.copy(),
        algorithms=np.full(count, ALGORITHM_XXH3, dtype=np.uint8),
        chunk_bytes=chunk_bytes,
        outcomes=np.zeros(count, dtype=np.uint8),
        holds=(buffers,),
    )


def memory_of(sizes: list[list[int]], fill: int | None, skew: int) -> BlockBuffers:
    """Blocks cut into pieces of given sizes, ``skew`` bytes off alignment."""
    rng = np.random.default_rng(0)
    blocks = []
    for pieces in sizes:
        block = []
        for size in pieces:
            view = aligned_memory(size + PAGE)[skew : skew + size]
            view[:] = rng.integers(0, 256, size, dtype=np.uint8) if fill is None else fill
            block.append(view)
        blocks.append(block)
    return BlockBuffers.from_buffers(blocks)


def content(buffers: BlockBuffers) -> list[bytes]:
    return [
        b"".join(piece.tobytes() for piece in buffers.pieces(block))
        for block in range(len(buffers))
    ]


def places(sizes: list[list[int]], *, gaps: bool) -> list[int]:
    offsets, end = [], PAGE
    for pieces in sizes:
        offsets.append(end)
        end += sum(pieces)
        if gaps:
            end = -(-end // PAGE) * PAGE
    return offsets


@pytest.mark.parametrize("mode", [layout.SCATTER, layout.BOUNCE])
def test_turns_are_given_back_whatever_becomes_of_a_task(tmp_path: Path, mode: int) -> None:
    """Threads take turns in what needs a core: one that is lost would stop them all."""
    pool = Pool(threads=4)
    before = _turns(pool.pool)
    assert before == [usable_cpus()] * 2
    sizes = [[PAGE, 2 * PAGE]] * 3
    offsets = places(sizes, gaps=True)
    memory = memory_of(sizes, None, 0)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    chunk = layout.DIRECT_CHUNK_BYTES
    closed = os.dup(fd)
    os.close(closed)

    def load(checksums: npt.NDArray[np.uint8], warm: int) -> list[int]:
        task = task_of("load", fd, mode, memory, offsets, checksums, chunk_bytes=chunk, warm=warm)
        pool.run(task)
        return list(task.outcomes.tolist())

    def keep(into: int, chunk: int) -> IoTask:
        task = task_of("store", into, mode, memory, offsets, chunk_bytes=chunk)
        pool.run(task)
        return task

    try:
        for _ in range(3 * before[0]):
            for into_page_cache in (chunk, layout.CACHED_CHUNK_BYTES, PAGE):
                lost = keep(closed, into_page_cache)
                assert lost.outcomes.tolist() == [Outcome.FAILED] * 3
                store = keep(fd, into_page_cache)
                assert store.outcomes.tolist() == [OK] * 3
        wrong = store.checksums.copy()
        wrong[1] ^= 1
        for _ in range(3 * before[0]):
            for warm in (-1, fd):
                assert load(store.checksums, warm) == [OK] * 3
                assert load(wrong, warm) == [OK, Outcome.CORRUPT, OK]
        os.truncate(fd, offsets[1] + PAGE)
        for _ in range(3 * before[0]):
            for warm in (-1, fd):
                assert load(store.checksums, warm) == [OK, Outcome.MISSING, Outcome.MISSING]
        assert _turns(pool.pool) == before
    finally:
        os.close(fd)
        pool.pool.stop()
    assert pool.pool.join(60)


def _turns(pool: NativePool) -> list[int]:
    """How many turns there are to be taken, of loads and of stores."""
    counts = []
    for reading in pool._turns[::2]:
        room = bytearray(4)
        fcntl.ioctl(reading, termios.FIONREAD, room)
        counts.append(int.from_bytes(room, sys.byteorder))
    return counts


@given(
    sizes=st.lists(
        st.lists(st.sampled_from([0, 1, 63, 64, 65, 1000, 4096, 5000, 70_000]), max_size=5),
        min_size=1,
        max_size=12,
    ),
    bounce=st.booleans(),
    skew=st.sampled_from([0, 1, 64]),
)
def test_one_writes_what_the_other_reads(
    native: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    bounce: bool,
    skew: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "both"
    mode = layout.BOUNCE if bounce else layout.SCATTER
    offsets = places(sizes, gaps=bounce)
    written: list[tuple[bytes, bytes]] = []
    for run in (native.run, execute):
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            source = memory_of(sizes, None, skew)
            store = task_of("store", fd, mode, source, offsets)
            run(store)
            assert store.outcomes.tolist() == [OK] * len(sizes)
            written.append((path.read_bytes(), store.checksums.tobytes()))
            for reader in (native.run, execute):
                memory = memory_of(sizes, 0xEE, skew)
                load = task_of("load", fd, mode, memory, offsets, store.checksums)
                reader(load)
                assert load.outcomes.tolist() == [OK] * len(sizes)
                assert content(memory) == content(source)
        finally:
            os.close(fd)
    assert written[0] == written[1]


@pytest.mark.parametrize("bounce", [False, True])
def test_more_pieces_than_one_call_takes(run: Run, tmp_path: Path, bounce: bool) -> None:
    sizes = [[PAGE] * 700, [PAGE] * 1500, [PAGE] * 3]
    mode = layout.BOUNCE if bounce else layout.SCATTER
    offsets = places(sizes, gaps=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    fd = os.open(tmp_path / "file", flags, 0o600)
    try:
        source, memory = memory_of(sizes, None, 0), memory_of(sizes, 0, 0)
        store = task_of("store", fd, mode, source, offsets)
        run(store)
        load = task_of("load", fd, mode, memory, offsets, store.checksums)
        run(load)
        assert load.outcomes.tolist() == [OK] * 3
        assert content(memory) == content(source)
    finally:
        os.close(fd)


@pytest.mark.parametrize("bounce", [False, True])
def test_what_the_page_cache_holds_is_read_from_there(
    native: Pool, tmp_path: Path, bounce: bool
) -> None:
    sizes = [[PAGE] * 3, [PAGE * 40, 100], [PAGE * 300], [PAGE]]
    offsets = places(sizes, gaps=True)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT, 0o600)
    writing = os.open(tmp_path / "file", os.O_WRONLY)  # nothing can be read from it
    try:
        source = memory_of(sizes, None, 0)
        store = task_of("store", fd, layout.SCATTER, source, offsets)
        native.run(store)
        # What is not read from the page cache comes from a file that has other bytes there.
        os.pwrite(other, bytes(offsets[3] + PAGE), 0)
        mode = layout.BOUNCE if bounce else layout.SCATTER
        runs = [0, 1, 2, 3]
        for warm, cold in ((fd, other), (writing, fd), (-1, fd)):
            memory = memory_of(sizes, 0xEE, 0)
            load = task_of(
                "load", cold, mode, memory, offsets, store.checksums, runs=runs, warm=warm
            )
            native.run(load)
            assert load.outcomes.tolist() == [OK] * 4
            assert content(memory) == content(source)
            runs = [0, 1, 2, 3] if not bounce else [0]
        memory = memory_of(sizes, 0, 0)
        load = task_of("load", other, mode, memory, offsets, store.checksums, runs=[0, 1, 2, 3])
        native.run(load)
        assert Outcome.OK not in load.outcomes.tolist()
    finally:
        for one in (fd, other, writing):
            os.close(one)


def test_a_store_reads_and_writes_through_the_page_cache_if_told(
    native: Pool, tmp_path: Path, namespace: Namespace
) -> None:
    """Beside O_DIRECT: what was stored just now is there without the medium."""
    keys = [bytes([number]) * 32 for number in range(4)]
    buffers = memory_of([[PAGE * 16]] * 4, None, 0)
    target = FilesystemTarget(tmp_path / "kv")
    for page_cache in (True, False):
        with contextlib.closing(
            BlockStore(namespace, [target], io_workers=2, page_cache=page_cache)
        ) as store:
            assert store.wait_recovered(60)
            if not store.sizes(keys).max() > 0:
                assert _done(store.store(BlockBatch(keys, buffers)))
                (segment,) = (tmp_path / "kv").rglob("*.segment")
                if target.direct:
                    assert _resident(segment) >= buffers.sizes().sum()
            memory = memory_of([[PAGE * 16]] * 4, 0, 0)
            assert _done(store.load(BlockBatch(keys, memory)))
            assert content(memory) == content(buffers)


def _done(job: Job) -> bool:
    return job.wait(60) and job.ok


def _resident(path: Path) -> int:
    """How much of a file is in the page cache; all of it where that cannot be known."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return os.preadv(file.fileno(), [bytearray(size)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return size


@pytest.mark.parametrize("bounce", [False, True])
@pytest.mark.parametrize("size", [4096, 9 << 20])
def test_what_is_damaged_cut_or_gone(run: Run, tmp_path: Path, bounce: bool, size: int) -> None:
    path = tmp_path / "file"
    sizes = [[size], [size], [size], [size]]
    mode = layout.BOUNCE if bounce else layout.SCATTER
    offsets = places(sizes, gaps=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        store = task_of("store", fd, mode, memory_of(sizes, None, 0), offsets)
        run(store)
        os.pwrite(fd, b"\x55\xaa", offsets[1] + size - 2)
        wrong = store.checksums.copy()
        wrong[0, 15] ^= 1
        os.ftruncate(fd, offsets[3] + size - 1)
        load = task_of("load", fd, mode, memory_of(sizes, 0, 0), offsets, wrong)
        run(load)
        assert load.outcomes.tolist() == [
            Outcome.CORRUPT,
            Outcome.CORRUPT,
            OK,
            Outcome.MISSING,
        ]
        os.ftruncate(fd, 0)
        run(load)
        assert load.outcomes.tolist() == [Outcome.MISSING] * 4
    finally:
        os.close(fd)


def test_a_descriptor_that_fails_costs_its_own_blocks(run: Run, tmp_path: Path) -> None:
    sizes = [[PAGE], [PAGE], [PAGE]]
    offsets = places(sizes, gaps=True)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    closed = os.dup(fd)
    os.close(closed)
    try:
        store = task_of("store", fd, layout.SCATTER, memory_of(sizes, None, 0), offsets)
        run(store)
        load = task_of(
            "load",
            fd,
            layout.SCATTER,
            memory_of(sizes, 0, 0),
            offsets,
            store.checksums,
            runs=[0, 1, 2],
        )
        load.runs[1, 0] = closed
        run(load)
        assert load.outcomes.tolist() == [OK, Outcome.FAILED, OK]
        again = task_of(
            "store",
            fd,
            layout.SCATTER,
            memory_of(sizes, None, 0),
            offsets,
            runs=[0, 1, 2],
        )
        again.runs[1, 0] = closed
        run(again)
        assert again.outcomes.tolist() == [OK, Outcome.FAILED, OK]
    finally:
        os.close(fd)


def test_what_has_not_started_is_cancelled_and_the_threads_end(
    kernel_home: Path, tmp_path: Path
) -> None:
    assert kernel_home.is_dir()
    before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    pool = Pool(3)
    assert pool.pool.threads == 3
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    sizes = [[PAGE]]
    pool.pool.cancel(True)
    cancelled = task_of("store", fd, layout.SCATTER, memory_of(sizes, None, 0), [PAGE])
    pool.run(cancelled)
    assert cancelled.outcomes.tolist() == [Outcome.CANCELLED]
    assert os.fstat(fd).st_size == 0
    pool.pool.cancel(False)
    done = task_of("store", fd, layout.SCATTER, memory_of(sizes, None, 0), [PAGE])
    pool.run(done)
    assert done.outcomes.tolist() == [OK]
    os.close(fd)
    pool.pool.stop()
    for _ in range(600):
        now = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if now == before:
            break
        threading.Event().wait(0.1)
    assert now == before


def native_threads(store: BlockStore) -> bool:
    return store._executor.native


def test_a_store_goes_over_to_native_threads_when_kernels_come(
    open_driver: Callable[..., StoreDriver], kernels_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lifeboat_cache import kernels

    driver = open_driver()
    store = driver.block_store
    assert not native_threads(store)
    assert driver.store(range(3)) == [OK] * 3
    monkeypatch.setattr(kernels, "_ready", True)
    store._executor.upgrade()
    assert native_threads(store)
    assert driver.store(range(3, 6)) == [OK] * 3
    # Records of both kinds in one job.
    assert driver.load(range(6)) == [OK] * 6


def planned_together(
    kind: str,
    files: list[int],
    buffers: BlockBuffers,
    checksums: npt.NDArray[np.uint8],
    bounds: list[tuple[int, int]],
) -> list[IoTask]:
    """Tasks of blocks that lie one after the other in their files, as a plan makes them."""
    whole = task_of(kind, -1, layout.SCATTER, buffers, [0] * len(buffers), checksums)
    ends = np.cumsum(whole.lengths)
    descriptors = np.array(files, dtype=np.int64)
    breaks = np.ones(len(buffers), dtype=bool)
    breaks[1:] = descriptors[1:] != descriptors[:-1]
    return Together(
        kind="load" if kind == "load" else "store",
        blocks=whole.blocks,
        offsets=ends - whole.lengths,
        lengths=whole.lengths,
        iov=whole.iov,
        starts=whole.starts,
        bindings=whole.bindings,
        checksums=whole.checksums,
        algorithm=ALGORITHM_XXH3,
        codec=0,
        coding=None,
    ).tasks(
        bounds,
        [8 << 10] * len(bounds),
        descriptors,
        np.full(len(buffers), layout.SCATTER, dtype=np.int64),
        breaks,
    )


def test_tasks_that_are_planned_together_do_their_own_part(tmp_path: Path, run: Run) -> None:
    names = [tmp_path / "one", tmp_path / "two"]
    fds = [os.open(name, os.O_CREAT | os.O_RDWR, 0o600) for name in names]
    sizes = [[3000, 5000], [8192], [100, 100, 100], [4096], [1, 16383], [8192]]
    files = [fds[0], fds[0], fds[1], fds[0], fds[0], fds[1]]
    # Block 4 is in no task, and task 1 has blocks of two files.
    bounds = [(0, 1), (1, 4), (5, 6)]
    try:
        source = memory_of(sizes, None, 0)
        stored = planned_together("store", files, source, np.zeros((6, 16), np.uint8), bounds)
        for task in stored:
            run(task)
            assert task.whole
        checksums = np.zeros((6, 16), np.uint8)
        for task in stored:
            checksums[task.blocks] = task.checksums
        target = memory_of(sizes, 0, 0)
        loaded = planned_together("load", files, target, checksums, bounds)
        for task in loaded:
            run(task)
            assert task.whole
        left_out = bytes(16384)
        wanted = [left_out if at == 4 else block for at, block in enumerate(content(source))]
        assert content(target) == wanted
        # A block that is wrong is so in the task that it belongs to.
        os.pwrite(fds[0], b"!", 8000 + 4096)
        anew = memory_of(sizes, 0, 0)
        again = planned_together("load", files, anew, checksums, bounds)
        for task in again:
            run(task)
        assert [task.whole for task in again] == [True, False, True]
        assert again[1].outcomes.tolist() == [Outcome.CORRUPT, OK, OK]
    finally:
        for fd in fds:
            os.close(fd)


def test_tasks_that_are_planned_together_are_laid_out_as_others() -> None:
    sizes = [[512, 512], [100], [4096, 8, 8], [64]]
    buffers = memory_of(sizes, None, 0)
    bounds = [(0, 2), (2, 3)]
    for task in planned_together(
        "load", [3, 4, 4, 3], buffers, np.zeros((4, 16), np.uint8), bounds
    ):
        assert task.laid_out is not None
        task.address()
        together = task.words.tolist()
        task.laid_out = None
        task.address()
        assert together == task.words.tolist()

"""I/O threads that never need the interpreter."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lifeboat_cache.kernels import io_layout as layout
from lifeboat_cache.kernels.codec_layout import SCRATCH_BYTES as CODER_BYTES
from lifeboat_cache.store.io_task import IoTask
from lifeboat_cache.system import DARWIN, io_memory, usable_cpus

__all__ = ["NativePool"]

_log = logging.getLogger("lifeboat_cache")

#: Tasks handed to the threads and not finished. A pipe of 64 KiB holds 8,192 addresses,
#: so that no thread ever waits for room in one.
_MOST_TASKS = 4096

#: Seconds that an interpreter which ends waits for system calls under way.
_EXIT_WAIT_S = 2.0

#: Longest time, in milliseconds, for which finished tasks of a job that is under way are kept.
_PATIENCE_MS = 200

#: Tasks handed over, or taken when finished, in one go: 4,096 bytes, which are PIPE_BUF.
_BATCH = 512

_LOAD, _STORE = 0, 1

#: What ends a thread in place of a task's address.
_END = bytes(8)

_libc = ctypes.CDLL(None, use_errno=True)

#: Keeps the interpreter, which `os.write` lets go of and has to win back: beside an engine
#: that computes in Python that takes 5 ms, and the call a microsecond.
_write = ctypes.PyDLL(None, use_errno=True).write
_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
_write.restype = ctypes.c_ssize_t


#: Bytes of a thread's stack, as on Linux; on macOS it would be 512 KiB.
_STACK_BYTES = 8 << 20


def _thread_attributes() -> ctypes.Array[ctypes.c_char]:
    """A ``pthread_attr_t``, which no system makes larger than 64 bytes."""
    attributes = ctypes.create_string_buffer(128)
    _libc.pthread_attr_init(attributes)
    _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
    return attributes


def _give(pipe: int, data: bytes) -> None:
    """Write to a pipe that has room."""
    if _write(pipe, data, len(data)) != len(data):
        os.write(pipe, data)  # a signal came first, or this says what is wrong


class NativePool:
    """Threads in machine code that take tasks from pipes, loads before stores.

    A thread of Python would have to win the interpreter lock after every system call,
    which takes up to 5 ms beside an engine that computes in Python. These threads
    hold no reference to anything of Python; the pool keeps what they use alive.

    Parameters
    ----------
    threads
        How many. At most half of them store at a time (at least one), so that a load
        does not queue behind a burst of stores.
    finished
        Called with the finished tasks of one lane, several at a time where
        several are ready, on a Python thread per lane. It must not raise.
    """

    def __init__(self, threads: int, finished: Callable[[list[IoTask]], None]) -> None:
        from lifeboat_cache.kernels.io import io_thread  # ready() has been asked

        self._finished = finished
        self._tasks: dict[int, IoTask] = {}
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._flags = np.zeros(1, dtype=np.int64)
        self._into: list[int] = []
        self._out: list[int] = []
        self._from: list[int] = []
        self._done: list[int] = []
        self._turns: list[int] = []
        self._contexts: list[npt.NDArray[np.int64]] = []
        self._scratch: list[npt.NDArray[np.uint8]] = []
        self._running = 0
        self._stopping = False
        self._ended = False
        self._released = threading.Event()
        self._pid = os.getpid()
        self._completing = 0
        # What the threads use must outlive them, whoever forgets the pool.
        _alive.add(self)
        try:
            self._open_pipes()
            self._prepare(max(1, threads))
            # Those first that complete: they also take apart what could be started.
            for lane, name in ((_STORE, "stores"), (_LOAD, "loads")):
                threading.Thread(
                    target=self._complete, args=(lane,), name=f"lifeboat-{name}", daemon=True
                ).start()
                self._completing += 1
            self._start(io_thread.address)
        except BaseException:
            self._give_up()
            raise

    def _open_pipes(self) -> None:
        for _ in (_LOAD, _STORE):
            for outs, ins in ((self._from, self._into), (self._out, self._done)):
                taking, giving = os.pipe()  # not inherited
                outs.append(taking)
                ins.append(giving)
            # All threads look when a task comes, and one of them gets it.
            os.set_blocking(self._from[-1], False)
            self._turns += os.pipe()
            os.write(self._turns[-1], bytes(usable_cpus()))

    def _prepare(self, count: int) -> None:
        """Lay out what each thread starts with."""
        storing = max(1, count // 2)
        for number in range(count):
            # The coders' working memory lies behind the buffer.
            both = layout.SCRATCH_BYTES + CODER_BYTES
            scratch = io_memory(both)
            context = np.zeros(layout.THREAD_WORDS, dtype=np.int64)
            context[layout.THREAD_LOADS : layout.THREAD_LOADS + 2] = self._from
            context[layout.THREAD_LOADS_DONE : layout.THREAD_LOADS_DONE + 2] = self._done
            context[layout.THREAD_LANES] = 2 if number < storing else 1
            context[layout.THREAD_SCRATCH] = scratch.ctypes.data
            context[layout.THREAD_ROOM] = layout.SCRATCH_BYTES
            context[layout.THREAD_WORK] = scratch.ctypes.data + layout.SCRATCH_BYTES
            context[layout.THREAD_FLAGS] = self._flags.ctypes.data
            context[layout.THREAD_TURNS : layout.THREAD_TURNS + 4] = self._turns
            self._scratch.append(scratch)
            self._contexts.append(context)

    def _give_up(self) -> None:
        """Let go of everything; no thread takes tasks."""
        if self._completing:
            lane = _LOAD if self._completing > 1 else _STORE
            os.write(self._done[lane], _END)
        else:
            self._release()

    def _start(self, address: int) -> None:
        # Signals are the business of the engine's own threads.
        attributes = _thread_attributes()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for context in self._contexts:
                thread = ctypes.c_ulong()
                error = _libc.pthread_create(
                    ctypes.byref(thread),
                    attributes,
                    ctypes.c_void_p(address),
                    ctypes.c_void_p(context.ctypes.data),
                )
                if error:
                    if not self._running:
                        raise OSError(error, os.strerror(error))
                    break  # fewer do as well
                self._running += 1
                if not DARWIN:  # there a thread can only name itself
                    _libc.pthread_setname_np(thread, b"lifeboat-io")
                _libc.pthread_detach(thread)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def threads(self) -> int:
        """Threads that run."""
        return self._running

    def submit(self, tasks: Sequence[IoTask]) -> Sequence[IoTask]:
        """Hand tasks of one kind over. Waits while thousands are under way.

        Returns
        -------
        sequence of IoTask
            Those that nobody will do, because the threads have been told to end, or
            there is no memory to hand them over.
        """
        lane = _LOAD if tasks[0].kind == "load" else _STORE
        for first in range(0, len(tasks), _BATCH):
            try:
                some = {task.address(): task for task in tasks[first : first + _BATCH]}
                addresses = np.array(list(some), dtype=np.int64).tobytes()
            except Exception:  # such as no memory: what was not handed over is not lost
                _log.exception("LifeboatCache: I/O could not be laid out")
                return tasks[first:]
            with self._room:
                self._room.wait_for(lambda: self._ended or len(self._tasks) < _MOST_TASKS)
                if self._ended:
                    return tasks[first:]
                self._tasks.update(some)
            # What is not longer than PIPE_BUF is written as a whole, and there is room.
            _give(self._into[lane], addresses)
        return []

    def cancel(self, wanted: bool) -> None:
        """Whether tasks that have not started end as ``CANCELLED``."""
        self._flags[0] = wanted

    def quieten(self) -> None:
        """Start nothing more and wait a little for what is under way."""
        if self._pid == os.getpid():
            self.cancel(True)
            with self._room:
                self._room.wait_for(lambda: not self._tasks, _EXIT_WAIT_S)

    def _complete(self, lane: int) -> None:
        """Take finished tasks of one lane until the threads have ended."""
        from lifeboat_cache.kernels.collect import collect  # ready() has been asked

        room = np.zeros(_BATCH, dtype=np.int64)
        while True:
            # Writes of 8 bytes to a pipe are atomic, so that no address is torn.
            count = collect(self._out[lane], room.ctypes.data, _BATCH, _PATIENCE_MS)
            if count < 0:
                raise OSError(-count, os.strerror(-count))
            addresses = room[:count].tolist()
            ended = addresses.count(0)
            with self._room:
                tasks = [self._tasks.pop(address) for address in addresses if address]
                self._room.notify_all()
            if tasks:
                try:
                    self._finished(tasks)
                except Exception:  # a fault of ours must not take the thread away
                    _log.exception("LifeboatCache: completing I/O failed; please report this")
            del tasks  # they hold the caller's memory
            with self._lock:
                self._end_if_idle()
            if not ended:
                continue
            if lane == _STORE:
                self._release()
                return
            self._running -= ended
            if self._running <= 0:  # now the other lane's
                os.write(self._done[_STORE], _END)
                return

    def stop(self) -> None:
        """Let the threads end as soon as nothing is under way."""
        with self._lock:
            self._stopping = True
            self._end_if_idle()

    def join(self, timeout: float) -> bool:
        """Wait until the threads have ended, but not longer than so many seconds."""
        return self._released.wait(timeout)

    def _end_if_idle(self) -> None:
        if self._stopping and not self._ended and not self._tasks:
            self._ended = True
            self._room.notify_all()
            for _ in range(self._running):
                os.write(self._into[_LOAD], _END)

    def _release(self) -> None:
        for end in (*self._from, *self._done, *self._into, *self._out, *self._turns):
            os.close(end)
        self._scratch.clear()
        _alive.discard(self)
        self._released.set()


_alive: set[NativePool] = set()


def _quieten() -> None:
    """At the end of the interpreter its memory goes: no thread should be working in it."""
    for pool in list(_alive):
        pool.quieten()


atexit.register(_quieten)

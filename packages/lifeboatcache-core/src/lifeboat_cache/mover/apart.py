"""Commands' work on a target that can hang, in a process that may be left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from lifeboat_cache.config.schema import Tier
from lifeboat_cache.errors import LifeboatError, TargetError
from lifeboat_cache.mover.hanging import can_hang

__all__ = ["PATIENCE_S", "Apart", "Say", "Work"]

#: A target that does not answer for so many seconds is not waited for.
PATIENCE_S = 20.0

#: How often the directory is looked at while there is work, in seconds.
_BEAT_S = 2.0

#: How often it is seen how the work does, in seconds.
_LOOK_S = 0.25

#: A process that has nothing to do any more ends within so many seconds.
_ENDING_S = 2.0

#: Told while work goes on; a JSON value.
Say = Callable[[Any], None]

#: Does what is asked (a JSON value) and returns another one.
Work = Callable[[Any, Say], Any]


class Apart:
    """Does one thing after the other with a target.

    What can hang is done in a child process: a system call on a dead mount never returns, and
    a process with a thread in it may not even end. If the target does not answer, the child is
    left behind, and everything that is asked later is refused. The rest is done here.

    Parameters
    ----------
    tier
        The target.
    work
        Does things. It keeps what it needs from one to the next.
    always
        Whether to use a child process in any case.
    patience_s
        A target that does not answer for so many seconds hangs, by default
        :data:`PATIENCE_S`. That is a matter of single calls: work may take as long as it takes.
    """

    def __init__(
        self, tier: Tier, work: Work, *, always: bool = False, patience_s: float | None = None
    ) -> None:
        self._tier = tier
        self._work = work
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._aside = always or can_hang(tier)
        self._silent = ""
        self._pid = 0
        self._to = self._from = -1
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(
        self, request: Any, heard: Say | None = None, stopping: Callable[[], bool] | None = None
    ) -> Any:
        """Have something done; what came of it.

        Parameters
        ----------
        request
            A JSON value.
        heard
            Gets what is said while it is done.
        stopping
            Whether to interrupt it, once, as with Ctrl-C.

        Raises
        ------
        LifeboatError
            If the target does not answer, or something failed there.
        """
        if not self._aside:
            try:
                return self._work(request, heard or _unheard)
            except LifeboatError:
                raise
            except OSError as error:
                raise TargetError(error.errno or errno.EIO, self._said(error)) from error
        if self._silent:
            self._refuse()
        if not self._pid:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # why it has gone is seen below
            _write(self._to, request)
        return self._wait(heard or _unheard, stopping)

    def interrupt(self) -> None:
        """After Ctrl-C in :meth:`ask`: let what is being done clean up behind itself."""
        if self._pid and not self._silent:
            os.kill(self._pid, signal.SIGINT)
            with contextlib.suppress(LifeboatError, RuntimeError):
                self._wait(_unheard, None)

    def close(self) -> None:
        """Let go of the child process."""
        if not self._pid:
            return
        for fd in (self._to, self._from):
            os.close(fd)
        give_up = time.monotonic() + (0.0 if self._silent else _ENDING_S)
        while not self._ended():
            if time.monotonic() >= give_up:
                os.kill(self._pid, signal.SIGKILL)
                self._ended()
                break
            time.sleep(0.005)
        self._pid = 0

    def _ended(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return True

    def _said(self, error: OSError) -> str:
        where = error.filename or self._tier.path
        return f"{where}: {error.strerror or error}: check the disk, its mount and the permissions"

    def _refuse(self) -> NoReturn:
        raise TargetError(errno.ETIMEDOUT, self._silent)

    # Here -------------------------------------------------------------------

    def _start(self) -> None:
        request, to = os.pipe()
        got, answer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                _serve(self._work, self._said, str(self._tier.path), request, answer)
            finally:
                os._exit(1)
        os.close(request)
        os.close(answer)
        self._pid, self._to, self._from = pid, to, got
        self._unread = b""

    def _wait(self, heard: Say, stopping: Callable[[], bool] | None) -> Any:
        answered = moved = time.monotonic()
        beater, seen = 0, None
        interrupted = False
        while True:
            ready, _, _ = select.select([self._from], [], [], _LOOK_S)
            now = time.monotonic()
            for message in self._read() if ready else ():
                what, value = message
                if what == "beat":
                    answered, beater = now, value
                elif what == "say":
                    heard(value)
                else:
                    return _outcome(what, value)
            if stopping is not None and stopping() and not interrupted:
                interrupted = True
                os.kill(self._pid, signal.SIGINT)
            activity = _activity(self._pid, beater)
            if activity is None or activity != seen:
                seen, moved = activity, now
            if now - min(answered, moved) > self._patience_s:
                self._silent = (
                    f"{self._tier.path} has not answered for {self._patience_s:g} s: "
                    "check its mount; the server behind it may be gone"
                )
                os.kill(self._pid, signal.SIGKILL)
                self._refuse()

    def _read(self) -> Sequence[Any]:
        data = os.read(self._from, 1 << 16)
        if not data:
            raise TargetError(
                errno.EIO,
                f"the process that works on {self._tier.path} has died: run the command again",
            )
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _outcome(what: str, value: Any) -> Any:
    if what == "done":
        return value
    if what == "refused":
        raise TargetError(errno.EIO, value)
    raise RuntimeError(f"the work on a target failed; please report this\n{value}")


def _unheard(_: Any) -> None:
    """Nobody listens."""


def _activity(pid: int, without: int) -> tuple[Any, ...] | None:
    """Something that changes as long as a process does anything; ``None`` if nobody knows.

    ``without``: the thread that does not count.
    """
    found = []
    try:
        for thread in sorted(os.listdir(f"/proc/{pid}/task")):
            if int(thread) != without:
                with open(f"/proc/{pid}/task/{thread}/status", encoding="ascii") as status:
                    switches = [line for line in status if "ctxt_switches" in line]
                with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as stat:
                    times = stat.read().rpartition(")")[2].split()[11:13]
                found.append((thread, *switches, *times))
    except (OSError, ValueError):
        return None
    return tuple(found)


def _write(fd: int, value: Any) -> None:
    data = memoryview(json.dumps(value).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


# In the child process ------------------------------------------------------------------------


def _serve(
    work: Work, said: Callable[[OSError], str], root: str, request: int, answer: int
) -> None:
    """Do what is asked until nobody asks any more."""
    # Not with the terminal's Ctrl-C, which is passed on; and whoever reads the command's
    # output must not wait for a process that is left behind.
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in (request, answer):
            with contextlib.suppress(OSError):
                os.close(fd)
    lock = threading.Lock()

    def tell(what: str, value: Any) -> None:
        with lock:
            _write(answer, (what, value))

    def beat() -> None:
        me = threading.get_native_id()
        with contextlib.suppress(BrokenPipeError):
            while True:
                with contextlib.suppress(OSError):  # that is an answer, too
                    os.statvfs(root)
                tell("beat", me)
                time.sleep(_BEAT_S)

    threading.Thread(target=beat, daemon=True).start()
    with os.fdopen(request, "rb") as requests, contextlib.suppress(BrokenPipeError):
        for line in requests:
            try:
                tell("done", work(json.loads(line), lambda said: tell("say", said)))
            except BrokenPipeError:
                raise
            except LifeboatError as error:
                tell("refused", str(error))
            except OSError as error:
                tell("refused", said(error))
            except BaseException:
                tell("broken", traceback.format_exc())
    os._exit(0)

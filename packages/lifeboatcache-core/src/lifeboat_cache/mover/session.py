"""One engine's connection, at the mover's end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.job import Job
from lifeboat_cache.mover.feed import Subscription
from lifeboat_cache.mover.hosting import Host, Hosts, Wish, config_from, layout_from_json
from lifeboat_cache.mover.throttle import Throttle
from lifeboat_cache.mover.wire import (
    CODED,
    PROTOCOL,
    REQUEST,
    Kind,
    Message,
    Receiver,
    from_json,
    receive,
    send,
    to_json,
)
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.store.protocol import State
from lifeboat_cache.version import __version__

__all__ = ["Session"]

_log = logging.getLogger("lifeboat_cache")

#: An engine says who it is within so many seconds.
_HELLO_S = 10.0

#: So many pages of the index are told before what is more urgent is looked for.
_PAGES = 4


@dataclass(frozen=True)
class _Out:
    kind: Kind
    number: int
    body: bytes
    missing: tuple[bytes, ...] = ()  # keys that a load has not found


class Session:
    """Serves one engine until it goes.

    Parameters
    ----------
    connection
        A connected Unix socket.
    hosts
        The mover's stores.
    throttle
        The target's bandwidth limit.
    probe
        Called to have the target probed; what comes of it is told with :meth:`probed`.
    """

    def __init__(
        self,
        connection: socket.socket,
        hosts: Hosts,
        throttle: Throttle,
        probe: Callable[[Session], None],
    ) -> None:
        self._connection = connection
        self._hosts = hosts
        self._throttle = throttle
        self._probe = probe
        self._wake = threading.Condition()
        self._urgent: deque[_Out] = deque()
        self._last: deque[_Out] = deque()
        self._woken = False
        self._status_due = False
        self._host: Host | None = None
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._purge = False
        self.over = False
        self.pid = 0

    # Reading ----------------------------------------------------------------

    def run(self) -> None:
        """Serve it; returns when it has gone."""
        try:
            self._connection.settimeout(_HELLO_S)
            hello = receive(self._connection)
            if hello is None or hello.kind != Kind.HELLO:
                return
            self._connection.settimeout(None)
            if self._greet(hello):
                self._serve()
        except (FormatError, OSError) as error:
            _log.info("an engine's connection ended: %s", error)
        except Exception:
            _log.exception("a connection failed; please report this")
        finally:
            self.close()

    def _greet(self, hello: Message) -> bool:
        problem = ""
        try:
            asked = from_json(hello.body)
            if asked.get("protocol") != PROTOCOL:
                problem = (
                    f"the mover of release {__version__} does not speak with engines of release "
                    f"{asked.get('core')}: install one release for all engines of this home"
                )
            else:
                wish = Wish.from_json(asked)
                self._memory = _map(hello.fds, int(asked["arena"]))
        except (LifeboatError, KeyError, TypeError, ValueError, OSError) as error:
            problem = str(error)
        finally:
            for fd in hello.fds:
                os.close(fd)
        if problem:
            send(self._connection, Kind.REFUSED, 0, [to_json({"reason": problem})])
            return False
        self._host = self._hosts.acquire(wish)
        self.pid = int(asked.get("pid") or 0)
        welcome = {"protocol": PROTOCOL, "core": __version__, "pid": os.getpid()}
        self._put(_Out(Kind.WELCOME, 0, to_json(welcome)))
        self.status()
        threading.Thread(target=self._tell, name="to engine", daemon=True).start()
        return True

    def _serve(self) -> None:
        host = self._host
        assert host is not None
        with contextlib.closing(Receiver(self._connection)) as receiver:
            while (message := receiver.next()) is not None:
                self._do(host, message)

    def _do(self, host: Host, message: Message) -> None:
        """Do what an engine asks for; what a later release may add is none of ours."""
        if message.kind in (Kind.STORE, Kind.LOAD):
            self._start(host, message)
        elif message.kind == Kind.TOUCH:
            host.store.touch(_keys(message))
        elif message.kind == Kind.DELETE:
            host.store.delete(_keys(message), on_buried=partial(self._buried, message.number))
        elif message.kind == Kind.LAYOUT:
            host.describe(layout_from_json(from_json(message.body)))
        elif message.kind == Kind.CONFIG:
            self._reconfigure(host, message)
        elif message.kind == Kind.PROBE:
            self._probe(self)
        elif message.kind == Kind.PURGE:
            self._purge = True

    def _reconfigure(self, host: Host, message: Message) -> None:
        try:
            host.policy.follow(config_from(from_json(message.body)))
        except ValueError as error:
            _log.warning("an engine's configuration is not understood: %s", error)

    def _start(self, host: Host, message: Message) -> None:
        requests = message.table(REQUEST)
        offsets, lengths = requests["offset"], requests["length"]
        size = np.uint64(self._memory.nbytes)
        if ((lengths > size) | (offsets > size) | (offsets + lengths > size)).any():
            raise FormatError("blocks lie outside the arena: restart the engine")
        count = requests.shape[0]
        base = np.uint64(self._memory.ctypes.data)
        buffers = BlockBuffers(
            offsets + base,
            lengths.copy(),
            np.arange(count + 1, dtype=np.int64),
            self._memory,
        )
        batch = BlockBatch(
            requests["key"].tolist(),
            buffers,
            layout=requests["layout"].tolist(),
            positions=requests["position"].tolist(),
            groups=requests["group"].tolist(),
            families=requests["family"].tolist(),
            parents=requests["parent"].tolist(),
            salt=requests["salt"].tolist(),
            codecs=requests["codec"].tolist(),
        )
        lane = "store" if message.kind == Kind.STORE else "load"
        moved = int(lengths.sum())
        self._throttle.submit(lane, moved, partial(self._go, host, lane, batch, message.number))

    def _go(self, host: Host, lane: str, batch: BlockBatch, number: int) -> None:
        finish = partial(self._finish, lane, number, batch.keys)
        try:
            job = host.store.store if lane == "store" else host.store.load
            job(batch, on_done=finish)
        except LifeboatError:  # closed meanwhile
            outcomes = np.full(len(batch), Outcome.UNAVAILABLE, dtype=np.uint8)
            self._put(_Out(Kind.DONE, number, _done({}, outcomes.tobytes())))

    def _finish(self, lane: str, number: int, keys: Sequence[bytes], job: Job) -> None:
        missing: list[int] = []
        if lane == "load":
            missing = np.flatnonzero(job.outcomes == Outcome.MISSING).tolist()
        body = _done(job.coded, job.outcomes.tobytes())
        out = _Out(Kind.DONE, number, body, tuple(keys[row] for row in missing))
        # An engine hears of records that have come or gone before it hears that this is done.
        self._put(out, last=lane == "store" or bool((job.outcomes != Outcome.OK).any()))

    def _buried(self, number: int, done: bool) -> None:
        outcome = Outcome.OK if done else Outcome.FAILED
        self._put(_Out(Kind.DONE, number, _done({}, bytes([outcome]))))

    # Telling ----------------------------------------------------------------

    def _put(self, out: _Out, *, last: bool = False) -> None:
        with self._wake:
            (self._last if last else self._urgent).append(out)
            self._woken = True
            self._wake.notify()

    def _notify(self) -> None:
        with self._wake:
            self._woken = True
            self._wake.notify()

    def status(self) -> None:
        """Tell it how the mover does, soon."""
        with self._wake:
            self._status_due = True
            self._woken = True
            self._wake.notify()

    def probed(self, reason: str) -> None:
        """Tell it what has come of a probe: why the target is not usable, or nothing."""
        self._put(_Out(Kind.PROBED, 0, to_json({"ok": not reason, "reason": reason})))

    def _status(self, host: Host) -> dict[str, Any]:
        store = host.store
        counters = store.counters()
        return {
            "state": store.state.value,
            "reason": store.reason,
            "kernels": kernels.ready(),
            "recovered": counters.recovered_blocks,
            "recovery_s": counters.recovery_seconds,
        }

    def _tell(self) -> None:
        host = self._host
        assert host is not None
        epoch, index = host.epoch, host.index
        subscription = index.subscribe(self._notify)
        synced = False
        try:
            while not self.over:
                with self._wake:
                    if not self._woken:
                        self._wake.wait(1.0)
                    self._woken = False
                    urgent, self._urgent = self._urgent, deque()
                    last = len(self._last)
                    due, self._status_due = self._status_due, False
                for out in urgent:
                    send(self._connection, out.kind, out.number, [out.body])
                if due:
                    send(self._connection, Kind.STATUS, 0, [to_json(self._status(host))])
                if epoch != host.epoch:
                    index.unsubscribe(subscription)
                    epoch, index = host.epoch, host.index
                    subscription = index.subscribe(self._notify)
                    synced = False
                if not self._feed(subscription):
                    self._notify()
                    continue
                for _ in range(last):
                    out = self._last.popleft()
                    gone = index.absent(out.missing)
                    if gone:
                        send(self._connection, Kind.FORGET, 0, gone)
                    send(self._connection, out.kind, out.number, [out.body])
                if not synced and host.store.state is State.READY:
                    synced = True
                    # What it has taken in until it was ready.
                    while not self._feed(subscription):
                        pass
                    send(self._connection, Kind.SYNCED)
                    self.status()
        except OSError:
            pass  # the engine has gone
        except Exception:
            _log.exception("telling an engine failed; please report this")
        finally:
            index.unsubscribe(subscription)
            self._shut()

    def _feed(self, subscription: Subscription) -> bool:
        """Tell some changes of the index; whether those were all."""
        for _ in range(_PAGES):
            change = subscription.next()
            if change is None:
                return True
            send(self._connection, change[0], 0, [change[1]])
        return False

    # The end ----------------------------------------------------------------

    def _shut(self) -> None:
        self.over = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Let go of it."""
        self._shut()
        self._connection.close()
        self._notify()
        host, self._host = self._host, None
        if host is not None:
            self._hosts.release(host)
            if self._purge:
                self._hosts.purge(host.wish.namespace)
        # What is still under way holds the memory as long as it needs it.
        self._memory = np.zeros(0, dtype=np.uint8)


def _keys(message: Message) -> list[bytes]:
    keys: list[bytes] = message.table(np.dtype("V32")).tolist()
    return keys


def _done(coded: Mapping[int, tuple[int, int, int]], outcomes: bytes) -> bytes:
    rows = np.array([(codec, *sums) for codec, sums in coded.items()], dtype=CODED)
    return np.uint64(len(coded)).tobytes() + rows.tobytes() + outcomes


def _map(fds: Sequence[int], size: int) -> npt.NDArray[np.uint8]:
    """Map an engine's arena. Raises ``OSError`` or ``ValueError``."""
    if len(fds) != 1:
        raise ValueError("the engine has sent no memory")
    if sys.platform != "linux":
        raise ValueError("this system has no sealed memory files")
    found = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
    if not found & fcntl.F_SEAL_SHRINK:
        raise ValueError("the engine's memory could be taken away")
    if os.fstat(fds[0]).st_size != size or size <= 0:
        raise ValueError("the engine's memory has another size than it says")
    return np.frombuffer(mmap.mmap(fds[0], size), dtype=np.uint8)

"""Looks after one target, on a thread of its own: a dead disk holds up that target only."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lifeboat_cache.agent.priority import step_back
from lifeboat_cache.agent.status import HUNG_AFTER_S
from lifeboat_cache.agent.wanted import WantedTarget
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.integrity import IntegrityKey, integrity_key
from lifeboat_cache.registry import TargetFacts
from lifeboat_cache.targets.layout import check_root

if TYPE_CHECKING:
    from lifeboat_cache.janitor import Janitor, JanitorReport

__all__ = ["Caretaker", "pause_after"]

_log = logging.getLogger("lifeboat_cache")

#: Seconds between two passes: while writers are filling it, while something is to be
#: done, and when nothing happens. Writers trust what a janitor has measured for 30 s.
_HASTY_S, _BUSY_S, _QUIET_S = 1.0, 5.0, 20.0

#: A pass may take one part in so many of the time.
_SHARE = 10

#: How fast a target is, is measured again after so many seconds: the first few times, and then.
_PROBE_SOON_S, _PROBE_LATER_S = 600.0, 6 * 3600.0

#: So many measurements are the first few.
_PROBES = 5

#: What went wrong is said again after so many seconds.
_SAY_AGAIN_S = 600.0


def pause_after(report: JanitorReport, before: int | None, elapsed: float, high: float) -> float:
    """Seconds to wait until the next pass.

    Parameters
    ----------
    report
        What the last pass found and did.
    before
        Bytes used after the pass before that; ``None`` if there was none.
    elapsed
        Seconds between the two.
    high
        The part of the capacity at which eviction begins.
    """
    if report.alive or report.pending or report.busy:
        pause = _BUSY_S
        growth = 0.0
        if before is not None and elapsed > 0:
            growth = max(0.0, (report.used_before - before) / elapsed)
        room = report.free - report.reserve
        if report.capacity is not None:
            room = min(room, int(high * report.capacity) - report.used_after)
        if growth * 2 * pause > room:
            pause = _HASTY_S
    else:
        pause = _QUIET_S
    return max(pause, min(_QUIET_S, _SHARE * report.seconds))


class _EndedError(BaseException):
    """Ends a pass between two of its steps."""


class Caretaker:
    """Runs the janitor of one target again and again.

    Parameters
    ----------
    wanted
        The target; replaced by :meth:`update`.
    home
        The home directory, where it is noted how fast the target is; ``None`` = that is not
        measured.
    """

    def __init__(self, wanted: WantedTarget, home: Path | None = None) -> None:
        self._wanted = wanted
        self._home = home
        self._read: float | None = None
        self._probed = 0
        self._probe_at = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._report: JanitorReport | None = None
        self._problem = ""
        self._mount = ""  # what is wrong with it
        self._totals: Counter[str] = Counter()
        self._said: dict[str, float] = {}
        self._since: float | None = None  # begin of the pass under way
        self._step = ""
        self._task = 0
        self._moved: tuple[object, float] = (None, 0.0)
        self._thread = threading.Thread(
            target=self._work, name=f"janitor {wanted.path}", daemon=True
        )
        self._thread.start()

    @property
    def path(self) -> Path:
        """The target's directory."""
        return self._wanted.path

    def update(self, wanted: WantedTarget) -> None:
        """Use other limits from the next pass on."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._wake.set()

    def stop(self) -> None:
        """End after the step of the pass under way."""
        self._stop.set()
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait for its end; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # What others see --------------------------------------------------------

    def facts(self) -> TargetFacts:
        """The target, for the registry."""
        wanted, report = self._wanted, self._report
        stuck = self.stuck_for()
        problem = "; ".join(filter(None, (self._problem, self._mount)))
        if stuck:
            problem = f"has not answered for {stuck:.0f} s: check the disk or the mount"
        return TargetFacts(
            name=wanted.name,
            location=str(wanted.path),
            used_bytes=report.used_after if report else 0,
            capacity_bytes=wanted.capacity,
            free_bytes=report.free if report else 0,
            reserve_bytes=wanted.reserve,
            blocks=report.records if report else None,
            problem=problem,
            read=self._read,
            codecs=report.by_codec if report else {},
            counters=dict(self._totals),
        )

    def describe(self) -> dict[str, Any]:
        """The target, for the agent's own document."""
        since = self._since
        return {
            "path": str(self.path),
            "pass_s": None if since is None else round(time.monotonic() - since, 1),
            "step": "" if since is None else self._step,
            "stuck": self.stuck_for() > 0,
            "problem": self._problem,
        }

    def stuck_for(self) -> float:
        """Seconds for which a pass has not moved on, 0.0 below a minute. Ask often."""
        now = time.monotonic()
        since = self._since
        if since is None:
            self._moved = (None, now)
            return 0.0
        sign = _sign_of_life(self._task)
        if sign != self._moved[0]:
            self._moved = (sign, now)
        silent = now - max(since, self._moved[1])
        return silent if silent > HUNG_AFTER_S else 0.0

    # The thread -------------------------------------------------------------

    def _work(self) -> None:
        self._task = threading.get_native_id()
        step_back()
        janitor: Janitor | None = None
        of: WantedTarget | None = None
        before: int | None = None
        ended = time.monotonic()
        while not self._stop.is_set():
            self._wake.clear()
            pause = _BUSY_S
            try:
                self._since = time.monotonic()
                if of != self._wanted:
                    of = self._wanted
                    self._mount = ""
                    janitor, before = None, None
                if not check_root(of.path, create=False):
                    janitor, self._report, self._problem = None, None, ""
                    pause = _QUIET_S
                else:
                    from lifeboat_cache.janitor import Janitor, JanitorPolicy

                    policy = JanitorPolicy(eviction=of.eviction, max_age_s=of.max_age_s)
                    if janitor is None:
                        target = of.open()
                        if target.shared:
                            policy = policy.for_shared()
                        self._mount = "; ".join(
                            f"{one.text}: {one.remedy}"
                            for one in target.mount_findings()
                            if one.level != "note"
                        )
                        janitor = Janitor(
                            target, policy=policy, key=self._key(of), on_step=self._on_step
                        )
                    report = janitor.run_once()
                    now = time.monotonic()
                    self._note(report)
                    if report.holder:  # another host's does the work; here it is only seen
                        report = self._report = janitor.run_once(dry_run=True)
                    pause = pause_after(report, before, now - ended, policy.high)
                    before, ended = report.used_after, now
                    full = of.capacity is not None and report.used_after > policy.high * of.capacity
                    step_back(urgent=full or report.free <= report.reserve)
                    self._measure(of)
            except _EndedError:
                break
            except Exception as error:  # one target's fault must not end the others' care
                self._problem = f"{type(error).__name__}: {error}"
                self._say(self._problem)
                janitor = None
                pause = _QUIET_S
            finally:
                self._since, self._step = None, ""
            self._wake.wait(pause)
        if janitor is not None:
            janitor.close()

    def _measure(self, of: WantedTarget) -> None:
        """See from time to time how fast the target is, as soon as there is enough on it."""
        if self._home is None or time.monotonic() < self._probe_at:
            return
        from lifeboat_cache.codecs.speed import probe_target, write_target_rate

        self._step = "measuring its speed"
        try:
            read = probe_target(of.path, direct=of.open().direct)
            if read is None:
                return
            self._read = write_target_rate(self._home, str(of.path), read)
        except OSError as error:  # nobody needs it
            _log.debug("%s: its speed was not measured: %s", of.path, error)
        self._probed += 1
        wait_s = _PROBE_SOON_S if self._probed < _PROBES else _PROBE_LATER_S
        self._probe_at = time.monotonic() + wait_s

    def _key(self, of: WantedTarget) -> IntegrityKey | None:
        """The integrity key; without it, what it protects is not rewritten."""
        try:
            return integrity_key(of.integrity_key)
        except ConfigError as error:
            self._say(str(error))
            return None

    def _on_step(self, step: str) -> None:
        self._step = step
        if self._stop.is_set():
            raise _EndedError

    def _note(self, report: JanitorReport) -> None:
        self._totals = report.add_to(self._totals)
        if not report.busy:
            self._report = report
        self._problem = "; ".join(report.problems)
        for problem in report.problems:
            self._say(problem)
        done = {
            "evicted": report.evicted_bytes,
            "erased": report.erased_bytes,
            "reclaimed": report.punched_bytes + report.removed_bytes + report.trimmed_bytes,
            "copied": report.copied_bytes,
        }
        if any(done.values()):
            _log.info(
                "%s: %s; %s bytes used now, in %.2f s",
                self.path,
                ", ".join(f"{name} {size:,} bytes" for name, size in done.items() if size),
                f"{report.used_after:,}",
                report.seconds,
            )

    def _say(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._said.get(problem, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said = {
                text: then for text, then in self._said.items() if now - then < _SAY_AGAIN_S
            }
            self._said[problem] = now
            _log.warning("%s: %s", self.path, problem)


def _sign_of_life(task: int) -> object:
    """Something that changes while a thread computes, reads or writes."""
    try:
        with open(f"/proc/self/task/{task}/stat", "rb") as file:
            text = file.read()
        times = text[text.rindex(b")") + 2 :].split()[11:13]
        switches = b""
        with open(f"/proc/self/task/{task}/status", "rb") as file:
            switches = b"".join(line for line in file if b"ctxt_switches" in line)
    except (OSError, ValueError):
        return os.times()  # unknown: as good as alive
    return times, switches

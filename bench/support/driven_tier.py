"""One tier under vLLM's real tiering manager, timed as the scheduler's thread sees it.

Nobody computes: the chunks lie in the CPU tier already, and the benchmark's main
thread does what vLLM's scheduler does between two steps of the engine.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm_tiering import Engine

from lifeboat_cache.bench import forget_pages

__all__ = ["DrivenTier", "MainThread", "Rests"]

_STEP_END = ScheduleEndContext([], [])

#: Methods of a tier that run on the scheduler's thread.
_WATCHED = (
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "on_schedule_end",
    "on_request_finished",
)

_STEPS_AFTER_RESET = 20

#: No operation here takes so long; one that does hangs.
_PATIENCE_S = 120.0


class Rests(Protocol):
    """Passes the time between two steps of the engine."""

    def rest(self) -> None:
        """Pass the time until the next step."""


class MainThread:
    """What the scheduler's thread does while storage works.

    Parameters
    ----------
    busy
        Count in Python, as a scheduler that has other requests does, instead of
        sleeping.
    """

    #: About a millisecond of counting: a step of an engine.
    _COUNT = 20_000

    def __init__(self, *, busy: bool) -> None:
        self.busy = busy
        self._counted = 0
        self._seconds = 0.0

    def rest(self) -> None:
        """Pass the time until the next step."""
        if not self.busy:
            time.sleep(0.0002)
            return
        begin = time.perf_counter()
        number = 0
        while number < self._COUNT:
            number += 1
        self._seconds += time.perf_counter() - begin
        self._counted += number

    def take_rate(self) -> float:
        """Counts per second since the last call; 0 if it did not count."""
        rate = self._counted / self._seconds if self._seconds else 0.0
        self._counted, self._seconds = 0, 0.0
        return rate

    def rate_alone(self) -> float:
        """Counts per second while nothing else goes on."""
        self.take_rate()
        for _ in range(30):
            self.rest()
        return self.take_rate()


class DrivenTier:
    """A tier, its engine, and the time that the scheduler's thread spends in the tier.

    Parameters
    ----------
    tier
        Configuration of the secondary tier.
    directory
        Where it keeps its files.
    rows, row_bytes
        Of the CPU tier.
    main
        What happens between steps.

    Attributes
    ----------
    answered_s
        Seconds of the last load until every lookup had its answer.
    began
        When the last load began, by ``time.perf_counter``.
    asking_s
        Seconds that vLLM's own code needed for the lookups of the last load, the tier's not
        counted. Whatever the tier is, they pass before it is told what to load.
    """

    def __init__(
        self,
        tier: dict[str, Any],
        directory: Path,
        *,
        rows: int,
        row_bytes: int,
        main: Rests,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._main = main
        self.engine = Engine(tier, rows=rows, row_bytes=row_bytes)
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._first: dict[bytes, bool] = {}
        self.answered_s = 0.0
        self.began = 0.0
        self.asking_s = 0.0
        watched: Any = self.engine.tier
        for name in _WATCHED:
            setattr(watched, name, self._timed(name, getattr(watched, name)))
        watched.lookup = self._watched_lookup(watched.lookup)
        table = self.engine.table()
        noise = np.random.default_rng(7).integers(0, 255, row_bytes, dtype=np.uint8)
        for row in range(rows):
            table[row, :row_bytes] = np.roll(noise, row)
        del table

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._spent[name] += time.perf_counter() - begin

        return timed

    def _watched_lookup(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def lookup(key: bytes, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            answer = method(key, *args, **kwargs)
            self._spent["lookup"] += time.perf_counter() - begin
            self._first.setdefault(bytes(key), answer is not LookupResult.RETRY)
            return answer

        return lookup

    def take_spent(self) -> dict[str, float]:
        """Seconds in the tier's methods since the last call."""
        spent, self._spent = self._spent, defaultdict(float)
        return spent

    def take_first_answers(self) -> float:
        """Share of the keys asked for since the last call whose first answer was a final one."""
        first, self._first = self._first, {}
        return sum(first.values()) / max(1, len(first))

    def _finish(self) -> None:
        end = time.monotonic() + _PATIENCE_S
        while self.engine.manager.has_pending_work():
            if time.monotonic() > end:
                raise TimeoutError("jobs are still under way")
            self._main.rest()
            self.engine.manager.on_schedule_end(_STEP_END)

    def store(self, prompts: Sequence[Sequence[bytes]]) -> float:
        """Seconds from the moment when prompts are in the CPU tier until they are stored."""
        prepared = self._prepare(prompts)
        begin = time.perf_counter()
        self._complete(prepared)
        self._finish()
        return time.perf_counter() - begin

    def load(self, prompts: Sequence[Sequence[bytes]]) -> float:
        """Seconds from the first lookup until all prompts are in the CPU tier."""
        requests = [(keys, self.engine.request(keys)) for keys in prompts]
        begin = self.began = time.perf_counter()
        self._fetch(requests, begin)
        self._finish()
        seconds = time.perf_counter() - begin
        self._check(requests)
        return seconds

    def both(self, stored: Sequence[Sequence[bytes]], computed: Sequence[Sequence[bytes]]) -> float:
        """Seconds to load prompts and to store others, begun at the same moment."""
        prepared = self._prepare(computed)
        requests = [(keys, self.engine.request(keys)) for keys in stored]
        begin = time.perf_counter()
        self._complete(prepared)
        self._fetch(requests, begin)
        self._finish()
        seconds = time.perf_counter() - begin
        self._check(requests)
        return seconds

    def _prepare(self, prompts: Sequence[Sequence[bytes]]) -> list[tuple[Any, Any]]:
        """Take rows of the CPU tier for prompts that are computed."""
        prepared = []
        for keys in prompts:
            context = self.engine.request(keys)
            out = self.engine.manager.prepare_store(list(keys), context)
            assert out is not None, "the CPU tier has no room"
            assert len(out.keys_to_store) == len(keys), "some keys are in the CPU tier already"
            prepared.append((out.keys_to_store, context))
        return prepared

    def _complete(self, prepared: Sequence[tuple[Any, Any]]) -> None:
        """Say that the prompts are in the CPU tier: the tier stores them."""
        for keys, context in prepared:
            self.engine.manager.complete_store(keys, context)
            self.engine.manager.on_request_finished(context)

    def _fetch(self, requests: Sequence[tuple[Sequence[bytes], Any]], begin: float) -> None:
        """Ask for prompts until all answers are final: the tier loads them."""
        end = time.monotonic() + _PATIENCE_S
        asking = list(requests)
        self.asking_s = self._spent["lookup"]
        while asking:
            started = time.perf_counter()
            asking = [pair for pair in asking if not self._ask(*pair)]
            self.asking_s += time.perf_counter() - started
            self.engine.manager.on_schedule_end(_STEP_END)
            if asking:
                if time.monotonic() > end:
                    raise TimeoutError("lookups have no answer")
                self._main.rest()
            else:
                self.answered_s = time.perf_counter() - begin
        self.asking_s -= self._spent["lookup"]

    def _check(self, requests: Sequence[tuple[Sequence[bytes], Any]]) -> None:
        """Only what has arrived counts."""
        for keys, context in requests:
            for key in keys:
                answer = self.engine.manager.lookup(key, context)
                assert answer is LookupResult.HIT, "a chunk was not loaded"
            self.engine.manager.on_request_finished(context)

    def _ask(self, keys: Sequence[bytes], context: Any) -> bool:
        """Scan a prompt as the scheduler does; whether all answers are final."""
        final = True
        for key in keys:
            answer = self.engine.manager.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            final = final and answer is not LookupResult.RETRY
        return final

    def ask_for_nothing(self, keys: Sequence[bytes]) -> float:
        """Scan a prompt that is not there; seconds that the scheduler's thread spends in it."""
        self.take_spent()
        context = self.engine.request(keys)
        while not self._ask(keys, context):
            self.engine.manager.on_schedule_end(_STEP_END)
            time.sleep(0.0002)
        self.engine.manager.on_request_finished(context)
        self.engine.manager.on_schedule_end(_STEP_END)
        return sum(self.take_spent().values())

    def empty(self) -> None:
        """Empty the CPU tier, so that chunks are loaded again."""
        self.engine.manager.reset_cache()
        # Our tier offers nothing for some steps: vLLM 0.32's workers might still write.
        for _ in range(_STEPS_AFTER_RESET):
            self.engine.manager.on_schedule_end(_STEP_END)

    def forget(self) -> None:
        """Empty the CPU tier, and drop the tier's files from the page cache."""
        self.empty()
        forget_pages(self.directory)

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()

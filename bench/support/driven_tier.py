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
from typing import Any

import numpy as np
from page_cache import forget_pages
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm_tiering import Engine

__all__ = ["DrivenTier", "MainThread"]

_STEP_END = ScheduleEndContext([], [])

#: Methods of a tier that run on the scheduler's thread.
_WATCHED = (
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "on_schedule_end",
    "on_request_finished",
)

_STEPS_AFTER_RESET = 20

#: No operation here takes so long; one that does hangs.
_PATIENCE_S = 120.0


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
    spent
        Seconds in the tier's methods, by name, since :meth:`take_spent`.
    answered_s
        Seconds of the last load until every lookup had its answer.
    """

    def __init__(
        self,
        tier: dict[str, Any],
        directory: Path,
        *,
        rows: int,
        row_bytes: int,
        main: MainThread,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._main = main
        self.engine = Engine(tier, rows=rows, row_bytes=row_bytes)
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.answered_s = 0.0
        for name in _WATCHED:
            setattr(self.engine.tier, name, self._timed(name, getattr(self.engine.tier, name)))
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
                self.spent[name] += time.perf_counter() - begin

        return timed

    def take_spent(self) -> dict[str, float]:
        """Seconds in the tier's methods since the last call."""
        spent, self.spent = self.spent, defaultdict(float)
        return spent

    def _finish(self) -> None:
        end = time.monotonic() + _PATIENCE_S
        while self.engine.manager.has_pending_work():
            if time.monotonic() > end:
                raise TimeoutError("jobs are still under way")
            self._main.rest()
            self.engine.manager.on_schedule_end(_STEP_END)

    def store(self, prompts: Sequence[Sequence[bytes]]) -> float:
        """Seconds from the moment when prompts are in the CPU tier until they are stored."""
        manager = self.engine.manager
        prepared = []
        for keys in prompts:
            context = self.engine.request(keys)
            out = manager.prepare_store(list(keys), context)
            assert out is not None, "the CPU tier has no room"
            assert len(out.keys_to_store) == len(keys), "some keys are in the CPU tier already"
            prepared.append((out.keys_to_store, context))
        begin = time.perf_counter()
        for keys, context in prepared:
            manager.complete_store(keys, context)
            manager.on_request_finished(context)
        self._finish()
        return time.perf_counter() - begin

    def load(self, prompts: Sequence[Sequence[bytes]]) -> float:
        """Seconds from the first lookup until all prompts are in the CPU tier."""
        manager = self.engine.manager
        requests = [(keys, self.engine.request(keys)) for keys in prompts]
        begin = time.perf_counter()
        end = time.monotonic() + _PATIENCE_S
        asking = requests
        while asking:
            asking = [pair for pair in asking if not self._ask(*pair)]
            manager.on_schedule_end(_STEP_END)
            if asking:
                if time.monotonic() > end:
                    raise TimeoutError("lookups have no answer")
                self._main.rest()
            else:
                self.answered_s = time.perf_counter() - begin
        self._finish()
        seconds = time.perf_counter() - begin
        for keys, context in requests:
            for key in keys:
                # Only what has arrived counts.
                assert manager.lookup(key, context) is LookupResult.HIT, "a chunk was not loaded"
            manager.on_request_finished(context)
        return seconds

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

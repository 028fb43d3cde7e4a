"""``lifeboat-cache selftest mlx``: the canary to run after every upgrade of mlx-lm.

Stores the prompt cache of a tiny random model on a directory of its own, and restores it
here and in another process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lifeboat_cache.mlx.versions import describe_tested, is_tested
from lifeboat_cache.selftest import Report, Step
from lifeboat_cache.selftest.place import KeptLog, run_trial

__all__ = ["run"]

_CHILD = "lifeboat_cache.mlx.selftest_model"
_CHILD_PATIENCE_S = 300.0

_USE_TESTED = f"Use mlx-lm {describe_tested()} or a newer lifeboatcache-mlx."
_CHECK_DISK = f"Run lifeboat-cache doctor. If it finds nothing: {_USE_TESTED}"
_WRONG = f"Do not use the cache with this mlx-lm, and report this. {_USE_TESTED}"

_NAMES = ("mlx-lm", "store", "restore in another process", "another model", "flipped byte")


class _FailedError(Exception):
    def __init__(self, summary: str, remedy: str = _USE_TESTED) -> None:
        super().__init__(summary)
        self.remedy = remedy


class _SelfTest:
    """The steps, in a directory of their own."""

    def __init__(self, scratch: Path, log: KeptLog) -> None:
        self.scratch = scratch
        self.facts: dict[str, Any] = {}
        self.steps: list[Step] = []
        self._log = log
        self._expected: Any = None

    def run(self) -> None:
        """Try everything; after the first failure the others cannot be tried."""
        tries = (self._version, self._store, self._restore, self._another, self._flipped)
        for name, step in zip(_NAMES, tries, strict=True):
            self._log.lines.clear()
            try:
                self.steps.append(Step(name, "ok", step()))
            except _FailedError as error:
                self._fail(name, str(error), error.remedy)
            except Exception as error:
                self._fail(name, f"{type(error).__name__}: {error}", _USE_TESTED)
            if self.steps[-1].status != "ok":
                break
        for name in _NAMES[len(self.steps) :]:
            self.steps.append(Step(name, "skipped", "an earlier step failed", "See that step."))

    def _fail(self, name: str, summary: str, remedy: str) -> None:
        self.steps.append(Step(name, "failed", summary, remedy, tuple(self._log.lines)))

    def _open(self, model: Any) -> Any:
        from lifeboat_cache.mlx import PersistentPromptCache

        return PersistentPromptCache(model, config=self.scratch / "lifeboat.yaml")

    def _version(self) -> str:
        import mlx_lm

        version = str(mlx_lm.__version__)
        self.facts.update(mlx_lm=version, tested=is_tested(version))
        known = f"LifeboatCache was tested with {describe_tested()}"
        return f"{version}; {known}" if is_tested(version) else f"{version} is not; {known}"

    def _store(self) -> str:
        from mlx_lm.models.cache import make_prompt_cache

        from lifeboat_cache.mlx import selftest_model as tiny

        model = tiny.make_model()
        cache = make_prompt_cache(model)
        tiny.prefill(model, cache, tiny.PROMPT)
        self._expected = tiny.bytes_of_cache(cache, len(tiny.PROMPT))
        self._cache = cache
        with self._open(model) as stored:
            stored.store(tiny.PROMPT, cache)
            stored.flush()
            back, held = stored.fetch([*tiny.PROMPT, 1])
            if not held:
                raise _FailedError(
                    f"nothing is found again{': ' if stored.reason else ''}{stored.reason}",
                    _CHECK_DISK,
                )
            self._same(tiny.bytes_of_cache(back, held), held)
        return f"{held} tokens of a tiny model"

    def _same(self, found: Any, held: int) -> None:
        import numpy as np

        from lifeboat_cache.mlx import selftest_model as tiny

        if not np.array_equal(found, tiny.bytes_of_cache(self._cache, held)):
            raise _FailedError("what came back has wrong bytes", _WRONG)

    def _restore(self) -> str:
        import numpy as np

        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", _CHILD, str(self.scratch)],
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHILD_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _FailedError(f"it did not end within {_CHILD_PATIENCE_S:g} s") from error
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise _FailedError(f"it ended with exit code {ended.returncode}: {last}")
        facts = json.loads((self.scratch / "restored.json").read_text())
        if not facts["held"]:
            raise _FailedError(f"nothing came back {facts['reason']}".strip(), _CHECK_DISK)
        self._same(np.load(self.scratch / "restored.npy", allow_pickle=False), facts["held"])
        return f"{facts['held']} tokens came back, every byte the same"

    def _another(self) -> str:
        from lifeboat_cache.mlx import selftest_model as tiny

        with self._open(tiny.make_model(theta=20000.0)) as stored:
            _, held = stored.fetch([*tiny.PROMPT, 1])
        if held:
            raise _FailedError(f"a model with another RoPE found {held} tokens", _WRONG)
        return "a model with another RoPE finds nothing"

    def _flipped(self) -> str:
        from lifeboat_cache.mlx import selftest_model as tiny

        for path in sorted((self.scratch / "kv").rglob("*.segment")):
            data = bytearray(path.read_bytes())
            for at in range(8192, len(data), 4096):  # behind the header and the layers
                data[at] ^= 1
            path.write_bytes(data)
        with self._open(tiny.make_model()) as stored:
            back, held = stored.fetch([*tiny.PROMPT, 1])
            if held:
                self._same(tiny.bytes_of_cache(back, held), held)
                raise _FailedError(f"{held} tokens came back although bytes were flipped", _WRONG)
        return "damaged blocks are a miss"


def run(args: argparse.Namespace) -> Report:
    """Run the self-test.

    Parameters
    ----------
    args
        ``config`` and ``keep`` are looked at.
    """
    return run_trial(args, _SelfTest, engine="mlx-lm", module="mlx_lm")

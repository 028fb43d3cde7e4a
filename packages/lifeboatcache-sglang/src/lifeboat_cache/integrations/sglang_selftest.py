"""``lifeboat-cache selftest sglang``: the canary to run after every upgrade of SGLang.

Stores pages out of SGLang's own host pools through the backend, on a directory of its own,
and restores them here and in another process. It needs no GPU and no model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifeboat_cache.integrations.sglang_versions import describe_tested, is_tested
from lifeboat_cache.selftest import Report, Step
from lifeboat_cache.selftest.place import KeptLog, run_trial

__all__ = ["run"]

_CHILD = "lifeboat_cache.integrations.sglang_selftest_pages"

#: The child imports SGLang, which takes its time on a busy machine.
_CHILD_PATIENCE_S = 600.0

_SEED = 2026
_FLIPPED = 5  # the page with the flipped byte

_USE_TESTED = (
    f"Use SGLang {describe_tested()} or a newer lifeboatcache-sglang; until then start the "
    "server with LIFEBOAT_CACHE=0."
)
_CHECK_DISK = f"Run lifeboat-cache doctor. If it finds nothing: {_USE_TESTED}"
_WRONG = f"Do not use the cache with this engine, and report this. {_USE_TESTED}"


class _FailedError(Exception):
    """A step that did not go as it must."""

    def __init__(self, summary: str, remedy: str = _USE_TESTED, details: Any = ()) -> None:
        super().__init__(summary)
        self.remedy = remedy
        self.details = tuple(details)


class _SkippedError(Exception):
    """A step that cannot be tried."""


class _SelfTest:
    """The steps, in a directory of their own."""

    def __init__(self, scratch: Path, log: KeptLog) -> None:
        self.scratch = scratch
        self.steps: list[Step] = []
        self.facts: dict[str, Any] = {}
        self._log = log
        self._stored = False

    def run(self) -> None:
        """Try everything."""
        if not self._try("SGLang", self._version):
            return
        self._try("interface", self._interface)
        self._try("hooks", self._hooks)
        self._try("settings", self._settings)
        self._try("store", self._store)
        self._try("restore in another process", self._restore)
        self._try("interfaces", self._interfaces)
        self._try("another data type", self._another_dtype)
        self._try("flipped byte", self._flipped_byte)
        if importlib.util.find_spec("mlx") is not None:
            self._try("MLX backend", self._mlx)

    def _try(self, name: str, step: Callable[[], str]) -> bool:
        self._log.lines.clear()
        try:
            done = Step(name, "ok", step())
        except _SkippedError as error:
            done = Step(name, "skipped", str(error), "See the step that failed.")
        except _FailedError as error:
            done = Step(
                name, "failed", str(error), error.remedy, (*error.details, *self._log.lines)
            )
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = (f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
            done = Step(
                name,
                "failed",
                f"{type(error).__name__}: {error}",
                _USE_TESTED,
                (*where, *self._log.lines),
            )
        self.steps.append(done)
        return done.status == "ok"

    def _version(self) -> str:
        try:
            import sglang
        except Exception as error:
            raise _FailedError(
                f"SGLang cannot be imported: {type(error).__name__}: {error}",
                "Repair SGLang's installation: `python -c 'import sglang'` must work.",
            ) from error
        version = str(sglang.__version__)
        tested = is_tested(version)
        self.facts.update(sglang=version, tested=tested, sglang_file=str(sglang.__file__))
        known = f"LifeboatCache was tested with {describe_tested()}"
        return f"{version}; {known}" if tested else f"{version} has not been tested; {known}"

    def _interface(self) -> str:
        from lifeboat_cache.integrations.sglang_selftest_interface import interface_problems

        problems = interface_problems()
        if problems:
            raise _FailedError(problems[0], details=problems[1:])
        return "what the backend is built on is there, and is called as it was"

    def _hooks(self) -> str:
        from lifeboat_cache.integrations.sglang_selftest_interface import hook_problems

        problems = hook_problems()
        if problems:
            raise _FailedError(problems[0], details=problems[1:])
        return "what is watched for weights, adapters and the end is there"

    def _settings(self) -> str:
        from lifeboat_cache.integrations.sglang_selftest_interface import unknown_settings

        unknown = unknown_settings()
        self.facts["unknown_settings"] = unknown
        if unknown:
            return (
                f"{len(unknown)} settings are new ({', '.join(unknown[:5])}…): used, they keep "
                "KV apart"
            )
        return "every setting of this SGLang is known"

    def _store(self) -> str:
        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        seconds = 0.0
        for number, layout in enumerate(pages.LAYOUTS):
            pool = pages.pool_of(layout)
            pages.fill(pool, pages.content(_SEED + number))
            backend = self._backend(pool)
            try:
                began = time.perf_counter()
                kept = backend.batch_set_v1(
                    pages.hashes(_SEED + number), pages.tokens_of(pages.PAGES)
                )
                seconds += time.perf_counter() - began
                if not all(kept):
                    raise _FailedError(
                        f"{kept.count(False)} of {len(kept)} pages of {layout} were not stored "
                        f"(store {backend.state.name}{': ' if backend.reason else ''}"
                        f"{backend.reason})",
                        _CHECK_DISK,
                    )
            finally:
                backend.close()
        moved = len(pages.LAYOUTS) * pages.PAGES * pages.PAGE_BYTES
        self.facts["store_mb_s"] = round(moved / seconds / 1e6)
        self._stored = True
        return (
            f"{pages.PAGES} pages of {pages.PAGE_BYTES >> 10} KiB each out of pools of the layouts "
            f"{', '.join(pages.LAYOUTS)}"
        )

    def _backend(self, pool: Any) -> Any:
        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        return pages.open_backend(self.scratch / "lifeboat.yaml", pool)

    def _need_stored(self) -> None:
        if not self._stored:
            raise _SkippedError("nothing was stored")

    def _restore(self) -> str:
        import numpy as np

        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        self._need_stored()
        child = self._child()
        here = (self.facts["sglang"], self.facts["sglang_file"])
        if (child["version"], child["file"]) != here:
            raise _FailedError(
                f"the other process uses SGLang {child['version']} from {child['file']}, "
                f"this one {here[0]} from {here[1]}",
                "Run the lifeboat-cache of the engine's environment.",
            )
        for number, layout in enumerate(pages.LAYOUTS):
            found = np.load(self.scratch / f"{layout}.npy", allow_pickle=False)
            expected = pages.content(_SEED + number)
            if not np.array_equal(found, expected[: found.shape[0]]):
                raise _FailedError(f"wrong bytes in pages of {layout}", _WRONG)
            if found.shape[0] != pages.PAGES:
                raise _FailedError(
                    f"{found.shape[0]} pages of {layout} came back instead of {pages.PAGES} "
                    f"(store {child['state']})",
                    _CHECK_DISK,
                )
        return "every page came back, every byte the same"

    def _child(self) -> dict[str, Any]:
        variables = {
            **os.environ,
            # The same modules as here, and nothing from the directory that this runs in.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", _CHILD, str(self.scratch), str(_SEED)],
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHILD_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _FailedError(
                f"the other process did not end within {_CHILD_PATIENCE_S:g} s"
            ) from error
        if ended.returncode:
            raise _FailedError(
                f"the other process ended with exit code {ended.returncode}",
                details=ended.stderr.strip().splitlines()[-12:],
            )
        found: dict[str, Any] = json.loads((self.scratch / "restored.json").read_text())
        return found

    def _interfaces(self) -> str:
        """What was stored without a copy, read through copies."""
        import numpy as np
        import torch

        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        self._need_stored()
        for number, layout in enumerate(pages.LAYOUTS):
            pool = pages.pool_of(layout)
            backend = self._backend(pool)
            try:
                flat = [pool.get_dummy_flat_data_page() for _ in range(pages.PAGES)]
                found = backend.batch_get(pages.hashes(_SEED + number), flat)
            finally:
                backend.close()
            if any(page is None for page in found):
                raise _FailedError(f"the copying interface does not find pages of {layout}")
            got = np.stack([page.view(torch.uint8).numpy() for page in found])
            if not np.array_equal(got, pages.content(_SEED + number)):
                raise _FailedError(f"the copying interface reads {layout} otherwise", _WRONG)
        return "the copying interface reads the same bytes"

    def _another_dtype(self) -> str:
        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        self._need_stored()
        backend = self._backend(pages.pool_of(pages.LAYOUTS[0], "float16"))
        try:
            found = backend.batch_exists(pages.hashes(_SEED))
        finally:
            backend.close()
        if found:
            raise _FailedError(f"a pool of another data type found {found} pages", _WRONG)
        return "a pool of another data type finds nothing"

    def _flip(self) -> None:
        """Flip one byte of a stored page on disk."""
        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        sample = pages.content(_SEED)[_FLIPPED, 1000:1064].tobytes()
        for path in sorted((self.scratch / "kv").rglob("*.segment")):
            position = path.read_bytes().find(sample)
            if position >= 0:
                with path.open("r+b") as file:
                    file.seek(position)
                    file.write(bytes([sample[0] ^ 1]))
                    file.flush()
                    os.fsync(file.fileno())
                return
        raise _FailedError("the stored bytes are not on disk as they were", _CHECK_DISK)

    def _flipped_byte(self) -> str:
        import numpy as np

        from lifeboat_cache.integrations import sglang_selftest_pages as pages

        self._need_stored()
        self._flip()
        pool = pages.pool_of(pages.LAYOUTS[0])
        backend = self._backend(pool)
        try:
            got = backend.batch_get_v1(pages.hashes(_SEED), pages.tokens_of(pages.PAGES))
        finally:
            backend.close()
        if got[: _FLIPPED + 1] != [True] * _FLIPPED + [False]:
            raise _FailedError(
                f"of the pages up to the flipped byte {got[: _FLIPPED + 1]} came back"
            )
        same = np.array_equal(pages.taken(pool, _FLIPPED), pages.content(_SEED)[:_FLIPPED])
        if not same:
            raise _FailedError("wrong bytes before the flipped one", _WRONG)
        return f"page {_FLIPPED} is a miss, what lies before it is served"

    def _mlx(self) -> str:
        from lifeboat_cache.integrations import sglang_selftest_mlx as mlx

        found = mlx.problems()
        if found:
            raise _FailedError(found[0], details=found[1:])
        wrong = mlx.move_chunks(self.scratch / "lifeboat.yaml")
        if wrong:
            raise _FailedError(wrong, _WRONG if wrong.startswith("wrong") else _CHECK_DISK)
        return "chunks of SGLang's MLX pool came back into other slots, every byte the same"


def run(args: argparse.Namespace) -> Report:
    """Run the self-test.

    Parameters
    ----------
    args
        ``config`` and ``keep`` are looked at.
    """
    # Bytes are compared here, so they must not be stored in fewer.
    return run_trial(args, _SelfTest, engine="SGLang", module="sglang", exactly=True)

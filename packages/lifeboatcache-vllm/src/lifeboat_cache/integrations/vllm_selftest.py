"""``lifeboat-cache selftest vllm``: the canary to run after every upgrade of vLLM.

Builds vLLM's real tiering manager with our tier on a directory of its own, stores a
prompt, and restores it here and in another process. It needs no GPU and no model, and
does not touch the workers' side of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.integrations.vllm_selftest_engine import (
    BLOCK_TOKENS,
    CHUNK_BYTES,
    CHUNKS,
    PretendedEngine,
    Restored,
    block_hashes,
    chunk_bytes,
    offload_keys,
    shared_memory_of,
)
from lifeboat_cache.integrations.vllm_versions import describe_tested, is_tested
from lifeboat_cache.selftest import Report, Step
from lifeboat_cache.selftest.place import KeptLog, run_trial

__all__ = ["run"]

_CHILD = "lifeboat_cache.integrations.vllm_selftest_child"

#: The child imports vLLM, which takes its time on a busy machine with many GPUs.
_CHILD_PATIENCE_S = 600.0

_SEED = 2026
_FLIPPED = 5  # the chunk with the flipped byte

_USE_TESTED = (
    f"Use vLLM {describe_tested()} or a newer lifeboatcache-vllm; until then start the engine "
    "with LIFEBOAT_CACHE=0."
)
_CHECK_DISK = f"Run lifeboat-cache doctor. If it finds nothing: {_USE_TESTED}"


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
        self._keys: list[bytes] = []
        self._chunks: npt.NDArray[np.uint8] = chunk_bytes(CHUNKS, seed=_SEED)
        self._stored = False
        self._child: dict[str, Any] | None = None
        self._child_problem = ""
        self._child_details: tuple[str, ...] = ()
        self._engines: list[PretendedEngine] = []
        self._loads_of_flipped: int | None = None

    def run(self) -> None:
        """Try everything."""
        try:
            self._try_all()
        finally:
            self._clean_up()

    def _try_all(self) -> None:
        if not self._try("vLLM", self._version):
            return
        self._try("interface", self._interface)
        self._try("hooks: found", self._hooks_found)
        self._try("positions", self._positions)
        self._try("store", self._store)
        self._start_child()
        self._try("hooks: installed", self._hooks_installed)
        self._try("restore in another process", self._restore)
        self._try("another identity", self._another_identity)
        self._try("flipped byte", self._flipped_byte)
        self._try("failed load", self._failed_load)
        self._try("job reports", self._job_reports)
        self._try("shared memory", self._shared_memory)

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
            done = Step(
                name,
                "failed",
                f"{type(error).__name__}: {error}",
                _USE_TESTED,
                (
                    *(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames),
                    *self._log.lines,
                ),
            )
        self.steps.append(done)
        return done.status == "ok"

    def _version(self) -> str:
        try:
            import vllm
        except Exception as error:
            raise _FailedError(
                f"vLLM cannot be imported: {type(error).__name__}: {error}",
                "Repair vLLM's installation: `python -c 'import vllm'` must work.",
            ) from error
        version = str(vllm.__version__)
        tested = is_tested(version)
        self.facts.update(vllm=version, tested=tested, vllm_file=str(vllm.__file__))
        known = f"LifeboatCache was tested with {describe_tested()}"
        return f"{version}; {known}" if tested else f"{version} has not been tested; {known}"

    def _interface(self) -> str:
        from lifeboat_cache.integrations.vllm_selftest_interface import interface_problems

        problems = interface_problems()
        if problems:
            raise _FailedError(problems[0], details=problems[1:])
        return "what the tier is built on is there, and is called as it was"

    def _hooks_found(self) -> str:
        from lifeboat_cache.integrations.vllm_selftest_interface import hook_problems

        problems = hook_problems()
        if problems:
            raise _FailedError(problems[0], details=problems[1:])
        return "what the plugin watches is there"

    def _positions(self) -> str:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        from lifeboat_cache.integrations.vllm_selftest_child import RequestLike

        hashes = block_hashes(CHUNKS, seed=_SEED)
        request = RequestLike(request_id="selftest", block_hashes=hashes)
        context = scheduler._create_req_context(request)
        group = RequestLike(hashes_per_chunk=1, group_idx=0, tokens_per_chunk=BLOCK_TOKENS)
        state = scheduler.RequestOffloadState(
            config=RequestLike(kv_group_configs=(group,)),
            req=request,
            req_context=context,
            offloading_context=None,
        )
        state.update_offload_keys()
        expected = {
            key: number * BLOCK_TOKENS
            for number, key in enumerate(offload_keys(CHUNKS, seed=_SEED), start=1)
        }
        # Private in vLLM; the tier reads it, and does without where it is missing.
        recorded = getattr(context, "_offload_key_positions", None) or {}
        found = {bytes(key): end for key, end in recorded.items()}
        if found != expected:
            raise _FailedError(
                f"vLLM records {len(found)} of a prompt's {len(expected)} keys, or other positions"
            )
        return "vLLM records every key of a prompt with its position"

    def _engine(self, **options: Any) -> PretendedEngine:
        engine = PretendedEngine(self.scratch / "lifeboat.yaml", **options)
        self._engines.append(engine)
        return engine

    def _store(self) -> str:
        self._keys = offload_keys(CHUNKS, seed=_SEED)
        with self._engine() as engine:
            seconds = engine.store(self._keys, self._chunks)
            state, store = engine.tier.state.name, engine.tier.store
            if not engine.jobs.submitted:
                raise _FailedError("vLLM gave the tier nothing to store")
            if engine.jobs.failed:
                why = f": {store.reason}" if store is not None and store.reason else ""
                raise _FailedError(f"not everything was stored (store {state}){why}", _CHECK_DISK)
        self.facts["store_mb_s"] = round(CHUNKS * CHUNK_BYTES / seconds / 1e6)
        self._stored = True
        return f"{CHUNKS} chunks of {CHUNK_BYTES >> 10} KiB went through vLLM's manager"

    def _need_stored(self) -> None:
        if not self._stored:
            raise _SkippedError("nothing was stored")

    def _start_child(self) -> None:
        """Run the second process; its result is looked at by the steps."""
        if not self._stored:
            return
        variables = {
            **os.environ,
            # The same modules as here, and nothing from the directory that this runs in.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "LIFEBOAT_CACHE": "1",
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
        except subprocess.TimeoutExpired:
            self._child_problem = f"the other process did not end within {_CHILD_PATIENCE_S:g} s"
            return
        if ended.returncode:
            self._child_problem = f"the other process ended with exit code {ended.returncode}"
            self._child_details = tuple(ended.stderr.strip().splitlines()[-12:])
            return
        self._child = json.loads((self.scratch / "restored.json").read_text())

    def _need_child(self) -> dict[str, Any]:
        self._need_stored()
        if self._child is None:
            raise _FailedError(self._child_problem, details=self._child_details)
        return self._child

    def _hooks_installed(self) -> str:
        problems = self._need_child()["hooks"]
        if problems:
            raise _FailedError(problems[0], details=problems[1:])
        return "every hook takes in a process of its own"

    def _restore(self) -> str:
        child = self._need_child()
        here = (self.facts["vllm"], self.facts["vllm_file"])
        if (child["version"], child["file"]) != here:
            raise _FailedError(
                f"the other process uses vLLM {child['version']} from {child['file']}, "
                f"this one {here[0]} from {here[1]}",
                "Run the lifeboat-cache of the engine's environment.",
            )
        data = np.fromfile(self.scratch / "restored.bin", np.uint8).reshape(-1, CHUNK_BYTES)
        keys = map(bytes.fromhex, child["keys"])
        found = Restored(dict(zip(keys, data, strict=True)), child["seconds"])
        self._compare(found, CHUNKS, f"store {child['state']}")
        self.facts["restore_mb_s"] = round(CHUNKS * CHUNK_BYTES / found.seconds / 1e6)
        return f"{CHUNKS} chunks came back, every byte the same"

    def _compare(self, found: Restored, expected: int, more: str = "") -> None:
        """Check that the first chunks came back, no others, and with the same bytes."""
        wrong = [
            number
            for number, (key, chunk) in enumerate(zip(self._keys, self._chunks, strict=True))
            if key in found.chunks and not np.array_equal(found.chunks[key], chunk)
        ]
        if wrong:
            raise _FailedError(
                f"wrong bytes in {len(wrong)} chunks, the first is chunk {wrong[0]}",
                f"Do not use the cache with this engine, and report this. {_USE_TESTED}",
            )
        if list(found.chunks) != self._keys[:expected]:
            raise _FailedError(
                f"{len(found.chunks)} chunks came back instead of the first {expected}"
                + (f" ({more})" if more else ""),
                _CHECK_DISK,
            )

    def _another_identity(self) -> str:
        self._need_stored()
        with self._engine(dtype="float16") as engine:
            found = engine.restore(self._keys)
        if found.chunks:
            raise _FailedError(
                f"a model of another KV data type found {len(found.chunks)} chunks",
                f"Do not use the cache with this engine, and report this. {_USE_TESTED}",
            )
        return "a model of another KV data type finds nothing"

    def _flip(self) -> None:
        """Flip one byte of a stored chunk on disk."""
        sample = self._chunks[_FLIPPED, 1000:1064].tobytes()
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
        self._need_stored()
        self._flip()
        with self._engine() as engine:
            try:
                found = engine.restore(self._keys)
            finally:
                self._loads_of_flipped = engine.jobs.loads[self._keys[_FLIPPED]]
            noticed = bool(engine.jobs.failed)
        self._compare(found, _FLIPPED)
        if not noticed:
            raise _FailedError("no load was reported as failed")
        return f"chunk {_FLIPPED} is a miss, what lies before it is served"

    def _failed_load(self) -> str:
        if self._loads_of_flipped is None:
            raise _SkippedError("no load failed")
        if self._loads_of_flipped != 1:
            raise _FailedError(
                f"the chunk that cannot be loaded was asked for {self._loads_of_flipped} times "
                "in one request, instead of once"
            )
        return "it was tried once, and is a miss for the rest of the request"

    def _job_reports(self) -> str:
        problems = [line for engine in self._engines for line in engine.jobs.problems()]
        problems += self._child["jobs"] if self._child is not None else []
        if problems:
            raise _FailedError(problems[0], details=problems[1:])
        jobs = sum(len(engine.jobs.submitted) for engine in self._engines)
        if not jobs:
            raise _SkippedError("there was no job")
        return f"each of the {jobs} jobs of this process was reported once"

    def _shared_memory(self) -> str:
        left = {str(path) for path in shared_memory_of(self.scratch)}
        left.update(self._child["shared_memory"] if self._child is not None else [])
        if left:
            raise _FailedError(
                f"engines left {', '.join(sorted(left))}",
                f"Watch the free space of /dev/shm. {_USE_TESTED}",
            )
        if not self._engines:
            raise _SkippedError("no engine was made")
        return "engines that end leave nothing in /dev/shm"

    def _clean_up(self) -> None:
        """Remove what engines left in shared memory, after it was reported."""
        for path in shared_memory_of(self.scratch):
            path.unlink(missing_ok=True)


def run(args: argparse.Namespace) -> Report:
    """Run the self-test.

    Parameters
    ----------
    args
        ``config`` and ``keep`` are looked at.
    """
    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    return run_trial(
        args,
        _SelfTest,
        engine="vLLM",
        module="vllm",
        variables={"VLLM_LOGGING_LEVEL": level},
    )

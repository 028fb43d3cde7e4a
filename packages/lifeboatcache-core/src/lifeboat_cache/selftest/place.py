"""Where a self-test runs: a directory, a configuration and an environment of its own."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from lifeboat_cache.config import Config, Tier, load_config
from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.mover.hanging import can_hang, resolved
from lifeboat_cache.selftest.report import Report, Step

__all__ = [
    "KeptLog",
    "Trial",
    "environment",
    "make_home",
    "run_trial",
    "scratch_parent",
    "write_config",
]


class KeptLog(logging.Handler):
    """Keeps what LifeboatCache logs, to be shown with a step that failed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen instead of everybody else: faults are made on purpose here."""
        log = logging.getLogger("lifeboat_cache")
        before = log.propagate, log.level
        log.addHandler(self)
        log.propagate = False
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(self)
            log.propagate = before[0]
            log.setLevel(before[1])


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process, and of those that it starts; ``None`` removes one."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def scratch_parent(tier: Tier, config: Config) -> tuple[Path, bool]:
    """Return where to make the directory, and whether the target's file system is there.

    Beside the target's directory and never in it, nor in another target's. A target that can
    hang (a network file system, a bucket) is not touched: nobody would end a test that waits
    for it, and its mover needs an agent.
    """
    if can_hang(tier):
        return Path(tempfile.gettempdir()), False
    path = tier.path.resolve()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    beside = there.parent if there == path else there
    stores = [
        resolved(other.path)[0]
        for other in (*config.storage.tiers, config.storage.fallback_local.as_tier())
    ]
    free = not any(beside == store or store in beside.parents for store in stores)
    if free and beside.stat().st_dev == there.stat().st_dev and os.access(beside, os.W_OK):
        return beside, True
    return Path(tempfile.gettempdir()), False


def make_home(scratch: Path) -> Path:
    """Make a home directory in which the compiled kernels of the user's are.

    Whatever an engine leaves in its home stays out of the user's, and yet what is
    tested is the I/O that engines do.
    """
    home = scratch / "home"
    home.mkdir(mode=0o700)
    with contextlib.suppress(ValueError):  # there is no home directory
        kernels = home_directory(os.environ) / "kernels"
        if kernels.is_dir():
            (home / "kernels").symlink_to(kernels)
    return home


def write_config(
    scratch: Path, config: Config, tier: Tier, same: bool, *, exactly: bool = False
) -> None:
    """Write ``lifeboat.yaml``: a tier of its own, used as the configured one is.

    Parameters
    ----------
    scratch
        Where it goes; the tier is the directory ``kv`` there.
    config, tier
        What is configured.
    same
        Whether ``scratch`` is on the file system of ``tier``.
    exactly
        Whether KV has to come back bit for bit.
    """
    document: dict[str, Any] = {
        "storage": {
            "tiers": [
                {
                    "name": "selftest",
                    "type": "filesystem",
                    "path": str(scratch / "kv"),
                    "min_free_gb": 0,
                    "direct_io": tier.direct_io if same else "auto",
                }
            ],
            "fallback_local": {"enabled": False},
        },
        "engine": {"io_workers": config.engine.io_workers},
        # It would outlive the directory.
        "agent": {"autostart": False},
    }
    if exactly:
        document["compression"] = {"ladder": {"local": "raw"}}
    file = scratch / "lifeboat.yaml"
    file.touch(mode=0o600)
    file.write_text(json.dumps(document))  # JSON is YAML


class Trial(Protocol):
    """The steps of an engine's self-test.

    Attributes
    ----------
    steps
        Filled in by :meth:`run`.
    facts
        What else to report; the engine's version under the name of its module.
    """

    steps: list[Step]
    facts: dict[str, Any]

    def run(self) -> None:
        """Try everything, and leave nothing behind outside the directory."""


def run_trial(
    args: argparse.Namespace,
    make: Callable[[Path, KeptLog], Trial],
    *,
    engine: str,
    module: str,
    exactly: bool = False,
    variables: Mapping[str, str | None] | None = None,
) -> Report:
    """Run an engine's self-test in a place of its own.

    Parameters
    ----------
    args
        ``config`` and ``keep`` are looked at.
    make
        Makes the trial for its directory, where a ``lifeboat.yaml`` is.
    engine, module
        The engine's name, and its module's.
    exactly
        Whether KV has to come back bit for bit.
    variables
        Of the environment while it runs.
    """
    if importlib.util.find_spec(module) is None:
        return Report(
            engine,
            unable=f"{engine} is not installed for {sys.executable}: run the lifeboat-cache of its "
            "environment",
        )
    config = load_config(args.config).config
    tier = config.storage.places[0]
    parent, same = scratch_parent(tier, config)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".lifeboat-selftest-", dir=parent))
    except OSError as error:
        return Report(
            engine,
            unable=f"no directory can be made in {parent} ({error.strerror}): run "
            "lifeboat-cache doctor",
        )
    try:
        write_config(scratch, config, tier, same, exactly=exactly)
        log = KeptLog()
        own = {
            "LIFEBOAT_CACHE_HOME": str(make_home(scratch)),
            "LIFEBOAT_CACHE_CONFIG": None,
            **(variables or {}),
        }
        trial = make(scratch, log)
        with environment(own), log.listening():
            trial.run()
    finally:
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    version = trial.facts.get(module)
    return Report(
        engine if version is None else f"{engine} {version}",
        tuple(trial.steps),
        facts={
            **trial.facts,
            "target": tier.name,
            "directory": f"{scratch} ({'kept' if args.keep else 'removed'})",
            "on_file_system_of_target": same,
        },
    )

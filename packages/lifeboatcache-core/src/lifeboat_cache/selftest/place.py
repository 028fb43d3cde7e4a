"""Where a self-test runs: a directory, a configuration and an environment of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lifeboat_cache.config import Config, Tier
from lifeboat_cache.config.paths import home_directory

__all__ = ["KeptLog", "environment", "make_home", "scratch_parent", "write_config"]


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

    Beside the target's directory and never in it, nor in another target's.
    """
    path = tier.path.resolve()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    beside = there.parent if there == path else there
    stores = [
        other.path.resolve()
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


def write_config(scratch: Path, config: Config, tier: Tier, same: bool) -> None:
    """Write ``lifeboat.yaml``: a tier of its own, used as the configured one is.

    Parameters
    ----------
    scratch
        Where it goes; the tier is the directory ``kv`` there.
    config, tier
        What is configured.
    same
        Whether ``scratch`` is on the file system of ``tier``.
    """
    document = {
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
    file = scratch / "lifeboat.yaml"
    file.touch(mode=0o600)
    file.write_text(json.dumps(document))  # JSON is YAML

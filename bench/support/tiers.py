"""Our tier and vLLM's own, set up for a benchmark without an engine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from devkit.places import dev_home
from driven_tier import DrivenTier, Rests

from lifeboat_cache.config import load_config

__all__ = [
    "MEDIA",
    "OURS",
    "PEER",
    "bench_directory",
    "io_depth",
    "our_config",
    "our_tier",
    "peer_tier",
    "say",
]

OURS = "ours"
PEER = "vLLM's fs tier"

#: Where files go: on the disk of the checkout, or in a memory-backed filesystem.
MEDIA = ("disk", "shm")


def say(text: str) -> None:
    """Tell whoever runs the benchmark what is going on."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


@contextmanager
def bench_directory(name: str, medium: str, root: Path | None = None) -> Iterator[Path]:
    """An empty directory on a medium, which is removed in the end.

    Parameters
    ----------
    name
        Of the benchmark.
    medium
        One of :data:`MEDIA`.
    root
        A directory to use instead of the usual one for ``disk``.
    """
    usual = Path("/dev/shm/lifeboat_bench") if medium == "shm" else root or dev_home() / "bench"
    directory = usual / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if medium == "shm":
            with suppress(OSError):  # another benchmark is there
                usual.rmdir()


def our_config(directory: Path, codec: str | None = None) -> Path:
    """Write a configuration whose store is in ``directory``, and return its path.

    No agent is started: the benchmark's process is alone, as its peer's is. With a codec, the
    tier follows the ladder, which is this codec.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "lifeboat.yaml"
    path.write_text(
        f"storage: {{fallback_local: {{path: {directory / 'kv'}, min_free_gb: 1}}}}\n"
        "agent: {autostart: false}\n"
        + (f"compression: {{ladder: {{local: {codec}}}}}\n" if codec else "")
        + ("engine: {native_codec: ladder}\n" if codec else "")
    )
    path.chmod(0o600)
    return path


def io_depth(directory: Path) -> int:
    """Threads of our store as it comes: the depth of the limits beside it."""
    return load_config(our_config(directory)).config.engine.io_workers


def our_tier(
    directory: Path, rows: int, row_bytes: int, main: Rests, codec: str | None = None
) -> DrivenTier:
    """Our tier, with a store of its own; see :func:`our_config`."""
    tier = {
        "type": "LifeboatTier",
        "module_path": "lifeboat_cache.integrations.vllm_tier",
        "config": str(our_config(directory, codec)),
    }
    driven = DrivenTier(tier, directory, rows=rows, row_bytes=row_bytes, main=main)
    store = driven.engine.tier.store
    if store is None or not store.wait_recovered(30):
        raise RuntimeError("our store did not open: see the log above")
    return driven


def peer_tier(directory: Path, rows: int, row_bytes: int, main: Rests) -> DrivenTier:
    """VLLM's own filesystem tier, as it comes."""
    tier = {"type": "fs", "root_dir": str(directory)}
    return DrivenTier(tier, directory, rows=rows, row_bytes=row_bytes, main=main)

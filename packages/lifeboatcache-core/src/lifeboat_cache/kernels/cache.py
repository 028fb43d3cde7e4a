"""Where compiled kernels are kept on disk: one directory per machine type and release.

``<home>/kernels/<key>/`` holds a complete set and ``complete.json``, which names
every file with its digest: machine code that is torn or was tampered with is
never loaded. The key covers everything that decides whether the code fits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from lifeboat_cache.targets.files import read_document
from lifeboat_cache.version import __version__

__all__ = [
    "MARKER",
    "Binder",
    "UnusableError",
    "directory",
    "facts",
    "is_complete",
    "key",
    "new_set",
    "require_jit",
    "verify",
]

#: In a complete set: what it was made for, and the digests of its files.
MARKER = "complete.json"

#: Settings of numba that change the code it makes.
_CODE_SETTINGS = (
    "NUMBA_BOUNDSCHECK",
    "NUMBA_CPU_FEATURES",
    "NUMBA_CPU_NAME",
    "NUMBA_DEBUGINFO",
    "NUMBA_ENABLE_AVX",
    "NUMBA_LOOP_VECTORIZE",
    "NUMBA_OPT",
    "NUMBA_SLP_VECTORIZE",
)

#: Age from which a half-made set counts as left behind by a killed process.
_LEFT_BEHIND_S = 3600.0


class UnusableError(Exception):
    """There are no kernels that this process may use; says why."""


class Binder(Protocol):
    """What :mod:`lifeboat_cache.kernels.jit` offers; that module imports numba."""

    def compile_into(self, directory: Path) -> None:
        """Compile what is not compiled yet, and save all kernels in a directory."""

    def load_from(self, directory: Path) -> None:
        """Load all kernels from a directory."""


def require_jit() -> None:
    """Raise unless numba may make and run machine code here."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise UnusableError("NUMBA_DISABLE_JIT is set; unset it to use compiled kernels")


@functools.cache
def facts() -> dict[str, Any]:
    """What the key is made of, readable.

    Raises
    ------
    UnusableError
        If llvmlite or numba is not installed, or our own sources cannot be read.
    """
    try:
        import llvmlite
        from llvmlite import binding

        numba_version = importlib.metadata.version("numba")
    except ImportError as error:  # also: PackageNotFoundError
        raise UnusableError(f"numba is not installed ({error}); install it") from error
    return {
        "core": __version__,
        "cpu": binding.get_host_cpu_name(),
        "features": binding.get_host_cpu_features().flatten(),
        "llvmlite": llvmlite.__version__,
        "machine": platform.machine(),
        "numba": numba_version,
        "python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "settings": {name: os.environ[name] for name in _CODE_SETTINGS if name in os.environ},
        "sources": _sources_digest(),
    }


def _sources_digest() -> str:
    """Digest of all modules of this package: a changed kernel is another kernel."""
    hasher = blake3()
    try:
        for path in sorted(Path(__file__).parent.glob("*.py")):
            source = path.read_bytes()
            hasher.update(f"{path.name}\0{len(source)}\0".encode())
            hasher.update(source)
    except OSError as error:
        raise UnusableError(f"the sources of the kernels cannot be read: {error}") from error
    return hasher.hexdigest(length=16)


@functools.cache
def key() -> str:
    """Name of the directory that fits this process (32 hexadecimal digits)."""
    return blake3(json.dumps(facts(), sort_keys=True).encode()).hexdigest(length=16)


def directory(home: Path) -> Path:
    """Where the kernels for this process are, or would be, below a home directory."""
    return home / "kernels" / key()


def is_complete(directory: Path) -> bool:
    """Whether a complete set was put there once."""
    return (directory / MARKER).is_file()


def verify(directory: Path) -> None:
    """Raise unless the directory holds a complete, intact set that is ours.

    Raises
    ------
    UnusableError
        Otherwise.
    """
    try:
        owner = os.stat(directory)
        marker = json.loads(read_document(directory / MARKER))
        files: Any = marker["files"]
    except FileNotFoundError:
        raise UnusableError(
            f"no kernels were compiled for this machine and release in {directory.parent}; "
            "the agent does that, or `python -m lifeboat_cache.kernels`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableError(f"{directory} cannot be read: {error!r}; remove it") from error
    # Loading it runs what is in there.
    if owner.st_uid not in (os.geteuid(), 0) or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableError(
            f"{directory} can be written by other users; remove it, or make it yours (chmod 0700)"
        )
    try:
        there = {path.name for path in directory.iterdir()} - {MARKER}
        owners = {path.lstat().st_uid for path in directory.iterdir()}
    except OSError as error:
        raise UnusableError(f"{directory} cannot be read: {error!r}; remove it") from error
    # Whoever owns a file can change it after it was looked at.
    if not owners <= {os.geteuid(), 0}:
        raise UnusableError(f"{directory} holds files of other users; remove it")
    if not isinstance(files, dict) or not there <= files.keys():
        raise UnusableError(f"{directory / MARKER} is damaged; remove {directory}")
    for name, digest in files.items():
        try:
            content = read_document(directory / name)
        except OSError as error:
            raise UnusableError(f"{directory} is incomplete: {error}; remove it") from error
        if blake3(content).hexdigest(length=16) != digest:
            raise UnusableError(f"{directory / name} is damaged; remove {directory}")


@contextlib.contextmanager
def new_set(place: Path) -> Iterator[Path]:
    """A directory to compile into; becomes ``place`` when the block ends without an error.

    If a complete and intact set is there by then, the new one is dropped.
    """
    parent = place.parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_left_behind(parent)
    made = parent / f".{uuid.uuid4().hex}.tmp"
    made.mkdir(mode=0o700)
    try:
        yield made
        _write_marker(made)
        _put_into_place(made, place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_marker(made: Path) -> None:
    files = {}
    for path in sorted(made.iterdir()):
        path.chmod(0o600)
        files[path.name] = blake3(path.read_bytes()).hexdigest(length=16)
    with open(made / MARKER, "x", opener=_private) as stream:
        json.dump({**facts(), "files": files}, stream, indent=1)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _put_into_place(made: Path, place: Path) -> None:
    for _ in range(3):
        try:
            # Replaces an empty directory and nothing else.
            os.rename(made, place)
            return
        except OSError:
            if not place.is_dir():
                raise
        try:
            verify(place)
            return
        except UnusableError:
            aside = place.parent / f".{uuid.uuid4().hex}.tmp"
            os.rename(place, aside)
            shutil.rmtree(aside, ignore_errors=True)
    raise UnusableError(f"{place} is in the way; remove it")


def _remove_left_behind(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for path in parent.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFT_BEHIND_S:
                    shutil.rmtree(path, ignore_errors=True)

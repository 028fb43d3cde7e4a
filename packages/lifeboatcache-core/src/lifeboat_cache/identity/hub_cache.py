"""Where a Hugging Face model lies on this machine, without network.

Reads the cache layout of ``huggingface_hub`` (``models--ORG--NAME`` with
``refs/REVISION`` and ``snapshots/COMMIT``), which is documented and stable, so
that neither the package nor a connection is needed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lifeboat_cache.errors import IdentityError

__all__ = ["hub_cache_dir", "resolve_model_dir"]

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def hub_cache_dir() -> Path:
    """The Hub cache directory by ``HF_HUB_CACHE``, ``HF_HOME`` and their defaults."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        value = os.environ.get(variable)
        if value:
            return Path(os.path.expandvars(value)).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expandvars(base)).expanduser() / "huggingface" / "hub"


def resolve_model_dir(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    commit: str | None = None,
) -> Path:
    """Find the local directory that holds a model.

    Parameters
    ----------
    model
        A directory, a weight file, or a Hub id (``org/name``).
    revision
        Branch, tag or commit; ``main`` if omitted.
    download_dir
        The cache directory an engine was told to use instead of the default.
    commit
        The commit an engine resolved ``revision`` to, if known. A branch may
        have moved since.

    Raises
    ------
    IdentityError
        If it is not on this machine.
    """
    local = Path(model).expanduser()
    if model and local.exists():
        return local
    if not _REPOSITORY.match(model) or ".." in model or "--" in model:
        raise IdentityError(
            f"{model}: neither a local model nor a Hub id: copy the model to a local directory"
        )
    cache = Path(download_dir).expanduser() if download_dir else hub_cache_dir()
    repository = cache / ("models--" + model.replace("/", "--"))
    wanted = revision or "main"
    if commit is None:
        commit = wanted if _COMMIT.match(wanted) else _read_ref(repository, wanted)
    if commit is not None and _COMMIT.match(commit):
        snapshot = repository / "snapshots" / commit
        if snapshot.is_dir():
            return snapshot
    raise IdentityError(
        f"{model}: revision {wanted!r} is not in the Hub cache at {cache}: download it there, "
        "or give the engine a local directory"
    )


def _read_ref(repository: Path, revision: str) -> str | None:
    if os.path.isabs(revision) or ".." in Path(revision).parts:
        return None
    try:
        return (repository / "refs" / revision).read_text("ascii").strip()
    except (OSError, ValueError):
        return None

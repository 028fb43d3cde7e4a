"""The checks that this package adds to ``lifeboat-cache doctor``. MLX is not imported."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

from lifeboat_cache.doctor import Check, DoctorContext
from lifeboat_cache.mlx.versions import describe_tested, is_tested

__all__ = ["check_engine", "check_mlx", "checks"]


def checks(_context: DoctorContext) -> Iterator[Check]:
    """Check whether mlx-lm in this environment can use LifeboatCache."""
    version = _version("mlx-lm")
    yield check_engine(version)
    if version is not None:
        yield check_mlx(_version("mlx"))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engine(version: str | None) -> Check:
    """Check that mlx-lm is there in a tested version.

    Parameters
    ----------
    version
        The installed one, if any.
    """
    name = "mlx-lm: version"
    tested = f"LifeboatCache was tested with mlx-lm {describe_tested()}"
    if version is None:
        return Check(
            name,
            "skip",
            f"mlx-lm is not installed for {sys.executable}",
            "To check an mlx-lm elsewhere, run the lifeboat-cache of its environment.",
        )
    if not is_tested(version):
        return Check(
            name,
            "warn",
            f"mlx-lm {version}; {tested}",
            "Use a tested version, or a newer lifeboatcache-mlx.",
        )
    return Check(name, "ok", f"mlx-lm {version}; {tested}")


def check_mlx(version: str | None) -> Check:
    """Check that MLX itself is there.

    Parameters
    ----------
    version
        The installed one, if any.
    """
    name = "mlx-lm: MLX"
    if version is None:
        return Check(
            name,
            "fail",
            f"MLX is not installed for {sys.executable}",
            "Install it: `pip install mlx`, on Linux `pip install mlx mlx-cpu`.",
        )
    return Check(name, "ok", f"mlx {version}")

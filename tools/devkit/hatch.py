"""Calling Hatch, with its environments and caches under ``.dev``."""

from collections.abc import Sequence
from pathlib import Path

from devkit import recipes
from devkit.places import ROOT, dev_home
from devkit.shell import DevError, output_of, try_run

__all__ = ["core_python", "hatch", "hatch_run"]


def hatch() -> tuple[Path, dict[str, str]]:
    """Return the Hatch program and the variables that keep its files private."""
    program = recipes.tools().make().with_name("hatch")
    home = dev_home() / "hatch"
    config = home / "config.toml"
    if not config.exists():  # Hatch insists on one
        home.mkdir(parents=True, exist_ok=True)
        config.touch()
    return program, {
        "HATCH_CONFIG": str(config),
        "HATCH_DATA_DIR": str(home / "data"),
        "HATCH_CACHE_DIR": str(home / "cache"),
        "HATCH_QUIET": "1",
    }


def hatch_run(environment: str, command: Sequence[str | Path]) -> int:
    """Run a script or program in one of Hatch's environments; return its exit code."""
    program, variables = hatch()
    return try_run([program, "run", f"{environment}:{command[0]}", *command[1:]],
                   env=variables, cwd=ROOT)  # fmt: skip


def core_python() -> Path:
    """Make Hatch's ``test`` environment and return its interpreter."""
    program, variables = hatch()
    code = try_run([program, "run", "test:python", "-c", ""], env=variables, cwd=ROOT,
                   to_stderr=True)  # fmt: skip
    if code:
        msg = f"Hatch could not make its environment `test` (exit code {code}); see above"
        raise DevError(msg)
    path = output_of([program, "env", "find", "test"], env=variables, cwd=ROOT).strip()
    return Path(path) / "bin" / "python"

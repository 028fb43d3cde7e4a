"""Private virtual environments, rebuilt only when their recipe changes.

An environment has two layers. The *base* is what comes from the package index
and takes long; when its recipe changes the environment is made anew. The *tree*
is what comes from this checkout; it is installed again over the same base. A
stamp is written after each layer, so one whose making was interrupted carries
no stamp and is made again.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from devkit.places import dev_home
from devkit.shell import DevError, locked, note, output_of, run

__all__ = ["Environment", "Pip", "PipRequirementsOf", "Sees", "Step"]

_STAMP = ".lifeboat-stamp.json"
_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
_READ_REQUIREMENTS = """
import importlib.metadata, json, sys
print(json.dumps(importlib.metadata.requires(sys.argv[1]) or []))
"""


@dataclasses.dataclass(frozen=True)
class Pip:
    """Install with ``pip install ARGUMENTS``."""

    arguments: tuple[str, ...]

    def apply(self, python: Path) -> None:
        """Run pip in the environment of ``python``."""
        # What a recipe leaves out of an engine's requirements is meant, and no error to be shown.
        run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
             "--no-warn-conflicts", "--no-input", *self.arguments])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PipRequirementsOf:
    """Install what an installed distribution requires, some names left out."""

    distribution: str
    without: tuple[str, ...]

    def apply(self, python: Path) -> None:
        """Read the requirements of the distribution and run pip."""
        answer = output_of([python, "-c", _READ_REQUIREMENTS, self.distribution])
        wanted = [
            requirement
            for requirement in json.loads(answer)
            if "extra ==" not in requirement and _name(requirement) not in self.without
        ]
        Pip(tuple(wanted)).apply(python)


@dataclasses.dataclass(frozen=True)
class Sees:
    """See what is installed in other environments, the first of them first.

    Attributes
    ----------
    environments
        Their directories.
    """

    environments: tuple[str, ...]

    def apply(self, python: Path) -> None:
        """Write a ``.pth`` file."""
        answer = output_of([python, "-c", _SITE_PACKAGES])
        lines = []
        for directory in self.environments:
            other = output_of([Path(directory, "bin", "python"), "-c", _SITE_PACKAGES])
            # Not a bare path: the .pth files that lie there (editable installs) count too.
            lines.append(f"import site; site.addsitedir({other.strip()!r})")
        Path(answer.strip(), "others.pth").write_text("\n".join(lines) + "\n")


Step = Pip | PipRequirementsOf | Sees


def _name(requirement: str) -> str:
    """Return the normalised distribution name at the start of a requirement."""
    end = next(
        (at for at, char in enumerate(requirement) if not (char.isalnum() or char in "-_.")),
        len(requirement),
    )
    return requirement[:end].lower().replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Environment:
    """One environment under ``.dev/envs``.

    Attributes
    ----------
    name
        Name of its directory.
    base
        Steps whose change makes the environment anew.
    tree
        Steps that install from the checkout.
    inputs
        Files whose content the tree layer depends on.
    """

    name: str
    base: tuple[Step, ...]
    tree: tuple[Step, ...] = ()
    inputs: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """Directory of the environment."""
        return dev_home() / "envs" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter; :meth:`make` must have run."""
        return self.path / "bin" / "python"

    def make(self) -> Path:
        """Make or update the environment and return its interpreter.

        Raises
        ------
        DevError
            When a step fails.
        """
        base = _digest([sys.version, sys.base_prefix, repr(self.base)])
        tree = _digest([base, repr(self.tree), *(file.read_text() for file in self.inputs)])
        with locked(self.path.with_name(f"{self.name}.lock")):
            stamp = self._read_stamp()
            if stamp.get("base") != base or not self.python.exists():
                self._create()
                self._apply(self.base)
                self._write_stamp(base=base)
                stamp = {"base": base}
            if stamp.get("tree") != tree:
                self._write_stamp(base=base)
                self._apply(self.tree)
                self._write_stamp(base=base, tree=tree)
        return self.python

    def _create(self) -> None:
        note(f"making the environment {self.path} (once)")
        shutil.rmtree(self.path, ignore_errors=True)
        try:
            run([sys.executable, "-m", "venv", self.path])
        except DevError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            msg = (
                f"{sys.executable} could not make a virtual environment; install its venv and pip "
                "modules (on Debian and Ubuntu: apt-get install python3-venv)"
            )
            raise DevError(msg) from error

    def _apply(self, steps: Sequence[Step]) -> None:
        for step in steps:
            note(f"{self.name}: {_short(step)}")
            step.apply(self.python)

    def _read_stamp(self) -> dict[str, str]:
        try:
            stamp: dict[str, str] = json.loads((self.path / _STAMP).read_text())
        except (OSError, ValueError):
            return {}
        return stamp

    def _write_stamp(self, **layers: str) -> None:
        whole = self.path / _STAMP
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(layers))
        part.replace(whole)


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _short(step: Step) -> str:
    if isinstance(step, PipRequirementsOf):
        return f"install the requirements of {step.distribution}"
    if isinstance(step, Sees):
        return "see " + " and ".join(Path(directory).name for directory in step.environments)
    shown = "install " + " ".join(part for part in step.arguments if not part.startswith("-"))
    return shown if len(shown) <= 100 else f"{shown[:97]}..."

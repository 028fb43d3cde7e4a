"""Look into built wheels for the mistakes that only show up once they are installed."""

import dataclasses
import email.parser
import hashlib
import re
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from devkit.places import DISTRIBUTIONS, ROOT

__all__ = ["Wheel", "check_wheels", "digest_of", "find_wheels"]

#: Packages that several distributions fill.
_NAMESPACES = ("lifeboat_cache", "lifeboat_cache/integrations")
#: Type checkers look for the marker at the root of a package, and the root is a
#: namespace: one distribution, the one that every other needs, carries it for all.
_TYPED = ("lifeboatcache-core", "lifeboat_cache/py.typed")


@dataclasses.dataclass(frozen=True)
class Wheel:
    """What a wheel holds: its name, version, requirements, and files outside dist-info."""

    name: str
    version: str
    requires: tuple[str, ...]
    files: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        """Read a wheel file."""
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            message = email.parser.Parser().parsestr(archive.read(metadata).decode())
        info = metadata.partition("/")[0]
        return cls(
            name=message["Name"],
            version=message["Version"],
            requires=tuple(message.get_all("Requires-Dist") or ()),
            files=tuple(name for name in names if not name.startswith(f"{info}/")),
        )


def find_wheels(directory: Path) -> list[Path]:
    """Return the wheels of a directory, in the order of their names."""
    return sorted(directory.glob("*.whl"))


def digest_of(files: Sequence[Path]) -> str:
    """Return one digest for the content of several files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_wheels(files: Sequence[Path], *, packages: Path = ROOT / "packages") -> list[str]:
    """Return what is wrong with a set of wheels; nothing when they are right.

    Parameters
    ----------
    files
        One wheel per distribution.
    packages
        Directory of the distributions' sources, for their changelogs.
    """
    wheels = [Wheel.read(file) for file in files]
    names = sorted(wheel.name for wheel in wheels)
    if names != sorted(DISTRIBUTIONS):
        return [f"expected one wheel of each of {sorted(DISTRIBUTIONS)}, found {names}"]
    return [
        *_regular_namespaces(wheels),
        *_shared_paths(wheels),
        *_strange_names(wheels),
        *_missing_marker(wheels),
        *_versions(wheels, packages),
        *_pins(wheels),
    ]


def _regular_namespaces(wheels: Sequence[Wheel]) -> list[str]:
    return [
        f"{wheel.name} ships {file}, which hides the other distributions' modules; remove it"
        for wheel in wheels
        for file in wheel.files
        if Path(file).parent.as_posix() in _NAMESPACES and Path(file).stem == "__init__"
    ]


def _shared_paths(wheels: Sequence[Wheel]) -> list[str]:
    owners = defaultdict(list)
    for wheel in wheels:
        for file in wheel.files:
            owners[file].append(wheel.name)
    return [
        f"{file} is in the wheels of {' and '.join(names)}; leave it to one of them"
        for file, names in sorted(owners.items())
        if len(names) > 1
    ]


def _strange_names(wheels: Sequence[Wheel]) -> list[str]:
    return [
        f"{wheel.name} installs {file} outside lifeboat_*; fix the wheel target of its pyproject"
        for wheel in wheels
        for file in wheel.files
        if not file.startswith("lifeboat_")
    ]


def _missing_marker(wheels: Sequence[Wheel]) -> list[str]:
    owner, marker = _TYPED
    return [
        f"{owner} does not ship {marker}, so type checkers ignore all our annotations; add it"
        for wheel in wheels
        if wheel.name == owner and marker not in wheel.files
    ]


def _versions(wheels: Sequence[Wheel], packages: Path) -> list[str]:
    problems = []
    for wheel in wheels:
        log = packages / wheel.name / "CHANGELOG.md"
        match = re.search(r"^## (\S+)", log.read_text(), re.MULTILINE) if log.exists() else None
        newest = match.group(1) if match else None
        if newest != wheel.version:
            problems.append(
                f"{wheel.name} is {wheel.version}, but its CHANGELOG.md begins with {newest}; "
                "make them agree"
            )
    return problems


def _pins(wheels: Sequence[Wheel]) -> list[str]:
    versions = {wheel.name: wheel.version for wheel in wheels}
    problems = []
    for wheel in wheels:
        for requirement in wheel.requires:
            match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
            assert match is not None
            name, specifier = match.group(1), match.group(2).strip()
            if name in versions:
                if not _admits(specifier, versions[name]):
                    problems.append(
                        f"{wheel.name} asks for {requirement}, which does not admit this tree's "
                        f"{name} {versions[name]} as a compatible range; write ~=X.Y.Z"
                    )
            elif wheel.name == "lifeboatcache-core" and re.search(r"<|==|~=", specifier):
                problems.append(
                    f"{wheel.name} caps {requirement}; engines pin hard, so give a floor only"
                )
    return problems


def _admits(specifier: str, version: str) -> bool:
    """Tell whether a specifier is ``~=`` and a version lies in its range."""
    match = re.fullmatch(r"~=\s*(\d+(?:\.\d+)+)", specifier)
    if not match:
        return False
    floor = [int(part) for part in match.group(1).split(".")]
    have = [int(part) for part in version.split(".")]
    return have >= floor and have[: len(floor) - 1] == floor[:-1]

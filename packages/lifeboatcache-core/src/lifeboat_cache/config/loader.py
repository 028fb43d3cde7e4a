"""Finding, reading and merging configuration files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lifeboat_cache.config.nearest import nearest
from lifeboat_cache.config.paths import (
    CONFIG_FILE_NAME,
    ENV_CONFIG,
    ENV_HOME,
    ENV_SALT,
    Places,
)
from lifeboat_cache.config.problems import locate_problems
from lifeboat_cache.config.schema import Config
from lifeboat_cache.config.yamlfile import Document, Location, key_path, read_yaml
from lifeboat_cache.errors import ConfigError, InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ConfigSource",
    "LoadedConfig",
    "load_config",
    "preset_names",
    "preset_path",
    "preset_values",
]

_PRESETS = Path(__file__).with_name("presets")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where it came from.

    Attributes
    ----------
    config
        The effective values.
    source
        For people: which file was used and why, and what it extends.
    files
        Every file that was read, the extending one before the one it extends.
    home
        The absolute home directory.
    origins
        The file and line, or the environment variable, of every key that is not
        at its default: ``{"engine.io_workers": "/etc/lifeboat.yaml:7"}``.
    named
        The file that the caller named; ``None`` if it was looked for.
    """

    config: Config
    source: str
    files: tuple[Path, ...]
    home: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    named: Path | None = None


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets that this version has, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """Return the file of the preset ``name``.

    Raises
    ------
    ConfigError
        If there is no such preset.
    """
    names = preset_names()
    if name not in names:
        near = nearest(name, names)
        hint = f"Did you mean '{near}'? " if near else ""
        raise ConfigError(f"there is no preset {name!r}. {hint}Use one of: {', '.join(names)}.")
    return _PRESETS / f"{name}.yaml"


def preset_values(name: str) -> dict[str, Any]:
    """Return what the preset ``name`` sets, as written: paths are not expanded.

    Raises
    ------
    ConfigError
        If there is no such preset.
    """
    # The home only matters to presets that extend a file, and none does.
    merged, _ = _read_chain(preset_path(name), Places(environ={}, home=_PRESETS))
    return merged.data


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    named_by: str = "--config",
) -> LoadedConfig:
    """Load the configuration.

    The file is the first of: ``path``; ``$LIFEBOAT_CACHE_CONFIG``; ``lifeboat.yaml``
    in the home directory, if there is one. Without a file the defaults apply.

    Parameters
    ----------
    path
        A file that the caller was told to use, for example by ``--config``.
    environ
        The environment variables, by default those of this process.
    named_by
        Who named ``path``, for messages.

    Raises
    ------
    ConfigError
        If a named file is missing, or a file or value cannot be used. The message
        names file, line, key, value and what is allowed, for every problem found.
    """
    environ = os.environ if environ is None else environ
    try:
        places = Places.current(environ)
    except (ValueError, OSError) as error:  # a relative path, and the working directory is gone
        raise ConfigError(f"{ENV_HOME}: {error}. Set it to an absolute path.") from None
    found = _find(path, named_by, places)
    if found is None:
        default = places.home / CONFIG_FILE_NAME
        return _validated({}, {}, f"built-in defaults (there is no {default})", (), places)
    main, why = found
    merged, chain = _read_chain(main, places)
    source = f"{main} ({why})"
    if len(chain) > 1:
        source += ", extends " + ", which extends ".join(_called(file) for file in chain[1:])
    loaded = _validated(merged.data, merged.origins, source, tuple(chain), places)
    return loaded if path is None else replace(loaded, named=main)


class ConfigSource:
    """The configuration file as somebody edits it, with what it extends.

    Parameters
    ----------
    path, environ
        As for :func:`load_config`.

    Attributes
    ----------
    path
        The file that is used, or would be if it were there.
    exists
        Whether it is there.

    Raises
    ------
    ConfigError
        If a file that is named cannot be one.
    """

    def __init__(self, path: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        try:
            self._places = Places.current(environ)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{ENV_HOME}: {error}. Set it to an absolute path.") from None
        found = _find(path, "--config", self._places)
        self.exists = found is not None
        self.path = found[0] if found else self._places.home / CONFIG_FILE_NAME

    def values(self, text: str) -> tuple[dict[str, Any], tuple[Path, ...]]:
        """Values as written, if the file held ``text``, and the files that they come from.

        Raises
        ------
        ConfigError
            If one of the files cannot be read.
        """
        merged, chain = _read_chain(self.path, self._places, text)
        return merged.data, tuple(chain)

    def check(self, text: str) -> LoadedConfig:
        """What would be in effect if the file held ``text``.

        Raises
        ------
        ConfigError
            As :func:`load_config` does.
        """
        merged, chain = _read_chain(self.path, self._places, text)
        return _validated(merged.data, merged.origins, str(self.path), tuple(chain), self._places)


@dataclass
class _Merged:
    data: dict[str, Any]
    origins: dict[Location, str]


def _find(path: Path | None, named_by: str, places: Places) -> tuple[Path, str] | None:
    named = places.environ.get(ENV_CONFIG)
    for text, why in ((path, named_by), (named, f"${ENV_CONFIG}")):
        if not text:
            continue
        try:
            file = Path(os.path.abspath(places.expand(str(text))))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{why}: {error}. Name a configuration file.") from None
        if _missing(file):
            raise ConfigError(
                f"{file}: there is no such file, but {why} names it. "
                "Correct the path, or make the file with: lifeboat-cache init --path " + str(file)
            )
        return file, why
    home_file = places.home / CONFIG_FILE_NAME
    # lexists: a link that leads nowhere is a mistake to report, not an absent file.
    return (home_file, "home directory") if os.path.lexists(home_file) else None


def _called(file: Path) -> str:
    return f"preset {file.stem}" if file.parent == _PRESETS else str(file)


def _read_chain(main: Path, places: Places, text: str | None = None) -> tuple[_Merged, list[Path]]:
    chain: list[Path] = []
    documents: list[tuple[Path, Document]] = []
    file: Path | None = main
    while file is not None:
        given = text.encode() if text is not None and file == main else None
        document = read_yaml(file, given)
        chain.append(file)
        documents.append((file, document))
        file = _extended(file, document, places)
        if file is not None and any(_same(file, earlier) for earlier in chain):
            steps = " -> ".join(_called(step) for step in (*chain, file))
            raise ConfigError(
                f"{chain[-1]}: extends goes round in a circle: {steps}. Remove one of the steps."
            )
    merged = _Merged({}, {})
    for file, document in reversed(documents):
        _overlay(merged, document, file)
    return merged, chain


def _missing(file: Path) -> bool:
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        # Reading it reports what is wrong.
        return False
    return False


def _same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _extended(file: Path, document: Document, places: Places) -> Path | None:
    value = document.data.pop("extends", None)
    if value is None:
        return None
    where = f"{file}:{document.lines[('extends',)]}: extends"
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {value!r} is not a name. Name one preset or one file.")
    if "/" not in value and not value.endswith((".yaml", ".yml")):
        try:
            return preset_path(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error} Or name a file, ending in .yaml.") from None
    try:
        base = Path(os.path.abspath(file.parent / places.expand(value)))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}. Name a preset or a file.") from None
    if _missing(base):
        raise ConfigError(f"{where}: there is no file {base}. Correct the path.")
    return base


def _overlay(merged: _Merged, document: Document, file: Path) -> None:
    origins = {location: f"{file}:{line}" for location, line in document.lines.items()}
    merged.data = _merge(merged, merged.data, document.data, origins, ())


def _merge(
    merged: _Merged,
    below: dict[str, Any],
    above: dict[str, Any],
    origins: Mapping[Location, str],
    location: Location,
) -> dict[str, Any]:
    """Lay ``above`` over ``below``: mappings merge, everything else replaces."""
    result = dict(below)
    for key, value in above.items():
        inner = (*location, key)
        if value is None and result.get(key) is not None:
            # A key without a value says nothing.
            continue
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            merged.origins[inner] = origins[inner]
            result[key] = _merge(merged, result[key], value, origins, inner)
            continue
        depth = len(inner)
        for old in [old for old in merged.origins if old[:depth] == inner]:
            del merged.origins[old]
        merged.origins.update((at, text) for at, text in origins.items() if at[:depth] == inner)
        result[key] = value
    return result


def _validated(
    data: dict[str, Any],
    origins: dict[Location, str],
    source: str,
    files: tuple[Path, ...],
    places: Places,
) -> LoadedConfig:
    salt = places.environ.get(ENV_SALT)
    security = data.get("security")
    if salt and (security is None or isinstance(security, dict)):
        data = {**data, "security": {**(security or {}), "namespace_salt": salt}}
        origins = {**origins, ("security", "namespace_salt"): f"${ENV_SALT}"}

    def where(location: Location) -> str:
        for depth in range(len(location), 0, -1):
            if location[:depth] in origins:
                return origins[location[:depth]]
        return str(files[0]) if files else "built-in defaults"

    try:
        config = Config.model_validate(data, context=places)
    except ValidationError as error:
        # Without its input: the exception would keep a secret in a traceback.
        located = locate_problems(error.errors(include_url=False), where)
        problems = tuple(located)
    else:
        shown = {
            key_path(location): text
            for location, text in origins.items()
            if _is_leaf(data, location)
        }
        return LoadedConfig(config, source, files, places.home, shown)
    if len(problems) == 1:
        raise InvalidConfigError(problems[0], located)
    lines = "".join(f"\n  {problem}" for problem in problems)
    raise InvalidConfigError(f"{len(problems)} problems in the configuration:{lines}", located)


def _is_leaf(data: dict[str, Any], location: Location) -> bool:
    value: Any = data
    for part in location:
        value = value[part]
    return value is not None and not isinstance(value, (dict, list))

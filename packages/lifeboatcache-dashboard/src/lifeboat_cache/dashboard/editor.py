"""Changing the configuration file: what may be changed, checking, and saving."""

from __future__ import annotations

import contextlib
import copy
import difflib
import fcntl
import hashlib
import os
import secrets
import threading
import typing
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lifeboat_cache.config.describe import entries
from lifeboat_cache.config.loader import ConfigSource, LoadedConfig
from lifeboat_cache.config.yamlfile import key_path, read_yaml
from lifeboat_cache.dashboard import yamltext
from lifeboat_cache.dashboard.errors import RefusedError
from lifeboat_cache.errors import ConfigError, InvalidConfigError

if typing.TYPE_CHECKING:
    from lifeboat_cache.config.describe import Entry

__all__ = ["LISTS", "SECTIONS", "Change", "Editor", "FormKey", "Proposal", "Stored", "form_keys"]

#: What is changed here. Not who may see this dashboard, and no secrets.
SECTIONS = ("storage", "compression", "eviction", "engine", "agent", "telemetry")

_DIFF_LINES = 3

#: So many versions of the file are remembered, for who still has an older page.
_SEEN = 32

_NEW = "new"
_REMOVE = "!remove"


@dataclass(frozen=True)
class FormKey:
    """One key of the schema as a form shows it.

    Attributes
    ----------
    path
        The keys that lead to it; ``tiers[]`` stands for every item of the list.
    description, allowed, example, unit, default, restart, required
        What the schema says.
    options
        The values, if there are only some.
    text
        Whether a value is text, whatever it looks like.
    """

    path: tuple[str, ...]
    description: str
    allowed: str
    example: str
    unit: str
    default: str
    restart: bool
    required: bool
    options: tuple[str, ...]
    text: bool

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path[-1]


def _form_key(entry: Entry) -> FormKey:
    options, text = _kind(entry.field.annotation)
    return FormKey(
        entry.path,
        entry.field.description or "",
        entry.key.allowed,
        entry.key.example.strip('"'),
        entry.key.unit,
        entry.default.strip('"'),
        entry.key.restart,
        entry.required,
        options,
        text,
    )


def _kind(annotation: Any) -> tuple[tuple[str, ...], bool]:
    """The values that a type has, if there are only some, and whether it is text."""
    if annotation is bool:
        return ("true", "false"), False
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return tuple(str(value) for value in inner), True
    if origin is typing.Annotated:
        return _kind(inner[0])
    if inner:
        found = [_kind(one) for one in inner if one is not type(None)]
        options = tuple(value for one in found for value in one[0])
        return (options if all(one[0] for one in found) else ()), any(one[1] for one in found)
    return (), annotation in (str, Path)


def form_keys() -> dict[tuple[str, ...], tuple[FormKey, ...]]:
    """The keys of each section that is changed here, in the order of the schema."""
    found: dict[tuple[str, ...], tuple[FormKey, ...]] = {}
    for path, _, own in entries():
        keys = [e for e in own if not e.key.secret and f"{e.path[-1]}[]" not in _names()]
        if path and path[0] in SECTIONS and keys:
            found[path] = tuple(_form_key(entry) for entry in keys)
    return found


def _names() -> set[str]:
    return {path[-1] for path, _, _ in entries() if path and path[-1].endswith("[]")}


#: Lists of sections that are changed here: ``storage.tiers``.
LISTS: tuple[tuple[str, ...], ...] = tuple(
    (*path[:-1], path[-1].removesuffix("[]"))
    for path, _, _ in entries()
    if path and path[-1].endswith("[]") and path[0] in SECTIONS
)

_SECRETS = tuple(entry.path for _, _, own in entries() for entry in own if entry.key.secret)


@dataclass(frozen=True)
class Stored:
    """The file as it is now.

    Attributes
    ----------
    path, exists, text
        The file.
    token
        Another one as soon as the file, or one that it extends, is changed.
    values
        Values as written, those of what it extends too.
    own
        Values as written in the file itself.
    problem
        Why it cannot be changed; empty if it can.
    """

    path: Path
    exists: bool
    text: str
    token: str
    values: Mapping[str, Any]
    own: Mapping[str, Any]
    problem: str

    def text_of(self, path: yamltext.Path, key: FormKey) -> str:
        """A value as a form shows it; empty if it is not set."""
        value = _at(self.values, path)
        if isinstance(value, bool) and key.options and "true" not in key.options:
            return "on" if value else "off"  # as YAML reads these words
        if isinstance(value, int) and f"{value:04o}" in key.options:
            return f"{value:04o}"  # 0660, which YAML reads as an octal number
        return _shown(value)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, (dict, list)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


@dataclass(frozen=True)
class Change:
    """One key that gets another value."""

    key: str
    old: str
    new: str
    restart: bool


@dataclass(frozen=True)
class Proposal:
    """What a form would do.

    Attributes
    ----------
    text
        The file afterwards.
    changes
        The keys that change.
    diff
        The lines that change, secrets masked.
    problems
        What the schema says, by name of the field; under the empty name what concerns none.
    """

    text: str
    changes: tuple[Change, ...]
    diff: tuple[str, ...]
    problems: Mapping[str, str]


class Editor:
    """Changes the configuration file of a home directory.

    Parameters
    ----------
    home
        The home directory.
    config_path
        The file; ``None`` = found as engines find it.
    environ
        The environment, which names the file.
    """

    def __init__(self, home: Path, config_path: Path | None, environ: Mapping[str, str]) -> None:
        self._home = home
        self._config_path = config_path
        self._environ = dict(environ)
        self._guard = threading.Lock()
        self._seen: OrderedDict[str, Stored] = OrderedDict()

    def read(self) -> Stored:
        """The file now.

        Raises
        ------
        RefusedError
            If it cannot be read.
        """
        try:
            source = ConfigSource(self._config_path, self._environ)
            raw = source.path.read_bytes() if source.exists else b""
            text = raw.decode("utf-8-sig")
            values, files = source.values(text)
            own = read_yaml(source.path, raw).data
            digest = hashlib.blake2b(digest_size=16)
            for file in files:
                content = raw if file == source.path else file.read_bytes()
                digest.update(f"{file}\0{len(content)}\0".encode())
                digest.update(content)
        except (ConfigError, UnicodeDecodeError) as error:
            raise RefusedError(
                409, f"the configuration file cannot be read, so it cannot be changed here: {error}"
            ) from error
        except OSError as error:
            raise RefusedError(
                409, f"{error.filename} cannot be read ({error.strerror}): correct its mode"
            ) from error
        stored = Stored(
            source.path,
            source.exists,
            text,
            digest.hexdigest(),
            values,
            own,
            _refusal(values) or _not_writable(source.path),
        )
        self._seen[stored.token] = stored
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return stored

    def own_changes(self, stored: Stored, form: Mapping[str, str], token: str) -> dict[str, str]:
        """What somebody typed into a form that was made from an older file.

        Fields that were left as they were say nothing: somebody else may have changed them
        since. So do fields of a list that has changed as a whole.

        Parameters
        ----------
        stored
            The file now.
        form
            All fields.
        token
            Of what the form was made from; one that is not known leaves the form as it is.
        """
        base = self._seen.get(token)
        if base is None or token == stored.token:
            return dict(form)
        typed = dict(form)
        for path, keys in form_keys().items():
            section = tuple(part.removesuffix("[]") for part in path)
            paths: list[yamltext.Path] = [(*section, key.name) for key in keys]
            if section in LISTS:
                prefix = f"{'.'.join(section)}."
                old = _at(base.values, section) or []
                if old != (_at(stored.values, section) or []):
                    for name in [name for name in typed if name.startswith(prefix)]:
                        if not name.startswith(f"{prefix}{_NEW}."):
                            del typed[name]
                    continue
                paths = [(*section, at, key.name) for at in range(len(old)) for key in keys]
            for where, key in zip(paths, keys * (len(paths) // len(keys)), strict=True):
                name = ".".join(map(str, where))
                if typed.get(name, "").strip() == base.text_of(where, key):
                    typed.pop(name, None)
        return typed

    def propose(self, stored: Stored, form: Mapping[str, str]) -> Proposal:
        """What a form would do to the file.

        Parameters
        ----------
        stored
            The file.
        form
            Texts by name of the field, such as ``storage.tiers.0.path``; an empty one takes
            the key out. ``storage.tiers.new.…`` is a new item, ``storage.tiers.0.!remove`` takes
            one out. Fields that are missing stay as they are.
        """
        changes: list[Change] = []
        problems: dict[str, str] = {}
        text, expected = stored.text, copy.deepcopy(dict(stored.own))
        try:
            for path, keys in form_keys().items():
                section = tuple(part.removesuffix("[]") for part in path)
                if section in LISTS:
                    text = _edit_list(stored, text, expected, section, keys, form, changes)
                    continue
                for key in keys:
                    text = _edit(stored, text, expected, key.path, key, form, changes)
            found = read_yaml(stored.path, text.encode()).data
            if changes and _filled(found) != _filled(expected):
                raise ValueError("the change would touch other values")
        except (ValueError, ConfigError) as error:
            problems[""] = (
                f"{stored.path} is written in a way that cannot be changed here ({error}): change "
                "it with an editor"
            )
            return Proposal(stored.text, tuple(changes), (), problems)
        if changes:
            problems.update(self._check(stored, text, form))
        return Proposal(text, tuple(changes), _diff(stored, text), problems)

    def save(self, form: Mapping[str, str], token: str) -> Proposal:
        """Change the file.

        Parameters
        ----------
        form
            As for :meth:`propose`.
        token
            Of what the form was made from.

        Raises
        ------
        RefusedError
            If the file was changed since, cannot be written, or would not be valid.
        """
        with self._guard, _locked(self._home / "dashboard" / "edit.lock"):
            stored = self.read()
            if stored.problem:
                raise RefusedError(403, stored.problem)
            if stored.token != token:
                raise RefusedError(
                    409,
                    "the configuration file was changed in the meantime, so nothing was saved: "
                    "look at what it says now, and save again",
                )
            proposal = self.propose(stored, form)
            if proposal.problems:
                raise RefusedError(
                    422,
                    "the configuration would not be valid, so nothing was saved: correct it",
                    tuple(proposal.problems.values()),
                )
            if proposal.changes:
                _write(stored, proposal.text)
            return proposal

    def _check(self, stored: Stored, text: str, form: Mapping[str, str]) -> dict[str, str]:
        try:
            self._validated(text)
        except InvalidConfigError as error:
            found: dict[str, str] = {}
            for problem, location in error.problems.items():
                name = _field(location, stored, form)
                said = _without_place(problem)
                found[name] = f"{found[name]} {said}" if name in found else said
            return found
        except ConfigError as error:
            return {"": str(error)}
        return {}

    def _validated(self, text: str) -> LoadedConfig:
        return ConfigSource(self._config_path, self._environ).check(text)


def _edit(
    stored: Stored,
    text: str,
    expected: dict[str, Any],
    path: yamltext.Path,
    key: FormKey,
    form: Mapping[str, str],
    changes: list[Change],
) -> str:
    """Carry out what a form says of one key."""
    name = ".".join(str(part) for part in path)
    if name not in form:
        return text
    old, new = stored.text_of(path, key), form[name].strip()
    if old == new:
        return text
    if new:
        value = _value(new, key)
        text = yamltext.set_value(text, path, value)
        _put(expected, path, value)
    elif _has(stored.own, path):
        text = yamltext.remove(text, path)
        _drop(expected, path)
    else:
        raise ValueError(f"{name} is set in a file that it extends")
    changes.append(Change(key_path(path), old, new, key.restart))
    return text


def _edit_list(
    stored: Stored,
    text: str,
    expected: dict[str, Any],
    section: tuple[str, ...],
    keys: tuple[FormKey, ...],
    form: Mapping[str, str],
    changes: list[Change],
) -> str:
    """Carry out what a form says of a list of sections."""
    prefix = ".".join(section)
    items = _at(stored.values, section) or []
    names = [name for name in form if name.startswith(f"{prefix}.")]
    new = {
        key.name: form[f"{prefix}.{_NEW}.{key.name}"].strip()
        for key in keys
        if form.get(f"{prefix}.{_NEW}.{key.name}", "").strip()
    }
    if not any(_touched(stored, name, section, keys, form) for name in names):
        return text
    if items and not _has(stored.own, section):
        # A list replaces the one of the file that is extended: it is written as a whole.
        stored, text = _with_list(stored, text, expected, section, items)
    for index in range(len(items)):
        if form.get(f"{prefix}.{index}.{_REMOVE}"):
            continue
        for key in keys:
            path: yamltext.Path = (*section, index, key.name)
            text = _edit(stored, text, expected, path, key, form, changes)
    for index in reversed(range(len(items))):
        if form.get(f"{prefix}.{index}.{_REMOVE}"):
            item: yamltext.Path = (*section, index)
            text = yamltext.remove(text, item)
            _drop(expected, item)
            was = stored.text_of((*item, keys[0].name), keys[0])
            changes.append(Change(key_path(item), was, "", keys[0].restart))
    # What a choice stands at when nothing was written says nothing of a new item.
    if any(key.name in new for key in keys if not key.options):
        added = {key.name: _value(new[key.name], key) for key in keys if key.name in new}
        text = yamltext.append_item(text, section, added)
        _extend(expected, section, added)
        name = str(new.get(keys[0].name, ""))
        changes.append(Change(f"{prefix}[{len(items)}]", "", name, keys[0].restart))
    return text


def _touched(
    stored: Stored,
    name: str,
    section: tuple[str, ...],
    keys: tuple[FormKey, ...],
    form: Mapping[str, str],
) -> bool:
    """Whether a field of a list says something new."""
    item, _, last = name.removeprefix(".".join(section) + ".").partition(".")
    value = form[name].strip()
    key = next((key for key in keys if key.name == last), None)
    if item == _NEW:
        return bool(value) and key is not None and not key.options
    if not item.isdecimal():
        return False
    if last == _REMOVE:
        return bool(value)
    return key is not None and value != stored.text_of((*section, int(item), last), key)


def _with_list(
    stored: Stored, text: str, expected: dict[str, Any], section: tuple[str, ...], items: list[Any]
) -> tuple[Stored, str]:
    own = copy.deepcopy(dict(stored.own))
    for target in (own, expected):
        _put(target, section, copy.deepcopy(items))
    text = yamltext.set_value(text, section, items)
    changed = Stored(
        stored.path,
        stored.exists,
        stored.text,
        stored.token,
        stored.values,
        own,
        stored.problem,
    )
    return changed, text


def _value(text: str, key: FormKey) -> Any:
    if key.text:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if value is None or isinstance(value, (dict, list)) else value


def _at(values: Any, path: yamltext.Path) -> Any:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _has(values: Any, path: yamltext.Path) -> bool:
    above = _at(values, path[:-1])
    last = path[-1]
    if isinstance(above, list):
        return isinstance(last, int) and last < len(above)
    return isinstance(above, dict) and last in above


def _put(values: dict[str, Any], path: yamltext.Path, value: Any) -> None:
    target: Any = values
    for part in path[:-1]:
        if isinstance(target, dict) and target.get(part) is None:
            target[part] = {}
        target = target[part]
    target[path[-1]] = value


def _drop(values: dict[str, Any], path: yamltext.Path) -> None:
    del _at(values, path[:-1])[path[-1]]


def _filled(value: Any) -> Any:
    """A value without what says nothing: a section or list in which nothing is."""
    if isinstance(value, dict):
        kept = {key: _filled(below) for key, below in value.items()}
        return {key: below for key, below in kept.items() if below not in (None, {}, [])}
    return [_filled(below) for below in value] if isinstance(value, list) else value


def _extend(values: dict[str, Any], path: tuple[str, ...], item: dict[str, Any]) -> None:
    found = _at(values, path)
    if found:
        found.append(item)
    else:
        _put(values, path, [item])


def _field(location: yamltext.Path, stored: Stored, form: Mapping[str, str]) -> str:
    """The field of a form that a problem is about."""
    for path in LISTS:
        if location[: len(path)] == path and len(location) > len(path):
            index = location[len(path)]
            kept = [
                at
                for at in range(len(_at(stored.values, path) or []))
                if not form.get(f"{'.'.join(path)}.{at}.{_REMOVE}")
            ]
            assert isinstance(index, int)
            item = str(kept[index]) if index < len(kept) else _NEW
            return ".".join(map(str, (*path, item, *location[len(path) + 1 :])))
    return ".".join(map(str, location))


def _without_place(problem: str) -> str:
    """A problem without file and line, which are those of what is not saved yet."""
    head, colon, rest = problem.partition(": ")
    return rest if colon and "/" in head else problem


def _diff(stored: Stored, text: str) -> tuple[str, ...]:
    before = yamltext.mask(stored.text, _SECRETS).splitlines()
    after = yamltext.mask(text, _SECRETS).splitlines()
    lines = difflib.unified_diff(
        before, after, stored.path.name, stored.path.name, lineterm="", n=_DIFF_LINES
    )
    return tuple(lines)[2:]


def _refusal(values: Mapping[str, Any]) -> str:
    """Why the file itself forbids changes, even where the rest of it cannot be used."""
    if _at(values, ("dashboard", "allow_config_edit")) is False:
        return "dashboard.allow_config_edit is false: change that in the configuration file"
    return ""


def _not_writable(path: Path) -> str:
    real = Path(os.path.realpath(path))
    if os.path.lexists(real) and not os.access(real, os.W_OK):
        return f"{path} cannot be written by this user: change its mode, or edit it yourself"
    above = real.parent
    if os.path.isdir(above) and not os.access(above, os.W_OK | os.X_OK):
        return f"{above} cannot be written by this user: change its mode, or edit {path} yourself"
    return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other dashboards of this home from saving at the same moment."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield  # a home that cannot be written: the token alone protects
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _write(stored: Stored, text: str) -> None:
    path = Path(os.path.realpath(stored.path))
    try:
        mode = 0o600
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stored.exists:
            mode = path.stat().st_mode & 0o777
            _replace(path.with_name(f"{path.name}.previous"), stored.text, mode)
        _replace(path, text, mode)
    except OSError as error:
        raise RefusedError(
            503,
            f"{path} cannot be written ({error.strerror}), so nothing was saved: free space, or "
            "correct its mode",
        ) from error


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file so that it is there as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(text.encode())
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

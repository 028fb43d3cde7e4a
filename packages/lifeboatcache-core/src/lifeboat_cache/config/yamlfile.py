"""Reading one YAML file strictly, with the line of every key."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lifeboat_cache.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import yaml

__all__ = ["Document", "Location", "key_path", "read_yaml"]

#: The keys and list positions that lead to a value.
Location = tuple[str | int, ...]

# A configuration has some dozens of values; aliases of aliases could make billions.
_MAX_VALUES = 100_000
# It is some kilobytes long. What is longer is another file, and would take long to parse.
_MOST_BYTES = 1 << 20
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Document:
    """The mapping in a YAML file.

    Attributes
    ----------
    data
        The mapping; empty for an empty file.
    lines
        The line, counted from 1, of every key and list item.
    """

    data: dict[str, Any]
    lines: dict[Location, int] = field(default_factory=dict)


def key_path(location: Location) -> str:
    """Write a location as a person would: ``storage.tiers[0].name``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _content(path: Path) -> bytes:
    """What is in a file, without waiting for ever. Raises ``OSError`` or ``ConfigError``."""
    # Opening a pipe waits for somebody who writes to it otherwise.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    raw = b""
    try:
        os.set_blocking(fd, True)
        while len(raw) <= _MOST_BYTES and (more := os.read(fd, _MOST_BYTES)):
            raw += more
        if not raw and stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise ConfigError(f"{path}: a pipe that nobody writes to. Name a file.")
    finally:
        os.close(fd)
    if len(raw) > _MOST_BYTES:
        raise ConfigError(
            f"{path}: longer than {_MOST_BYTES:,} bytes, which no configuration is. "
            "Name the configuration file."
        )
    return raw


def read_yaml(path: Path, raw: bytes | None = None) -> Document:
    """Read the mapping in the YAML file ``path``.

    Parameters
    ----------
    path
        The file.
    raw
        What is in it, or is to be; ``None`` = read it.

    Raises
    ------
    ConfigError
        If the file cannot be read, is not YAML, is not a mapping, has a key twice
        or a key that is not text.
    """
    # Costs some 20 ms that a process without a configuration file need not pay.
    import yaml

    try:
        raw = _content(path) if raw is None else raw
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file. "
            "Correct the path, or make one with: lifeboat-cache init"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Make it a file that this user can read."
        ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8. Save the file as UTF-8.") from None
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            return _Walk(path, loader).document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        # Never the text around it, which str(error) would show: it can be a secret.
        raise ConfigError(
            f"{path}:{line}: not valid YAML: {error.problem or error.context}. "
            "Correct the indentation, quotes or brackets there."
        ) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", "it cannot be read")
        raise ConfigError(f"{path}: not valid YAML: {reason}. Save it as plain text.") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply. Remove the nesting.") from None
    except ValueError as error:
        # A scalar that YAML's own constructors refuse, for example the date 2026-99-99.
        raise ConfigError(
            f"{path}: not valid YAML: {error}. Put the value in quotes if it is text."
        ) from None


class _Walk:
    """Builds the values of a file's nodes."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader
        self._lines: dict[Location, int] = {}
        self._open: set[int] = set()
        self._flat: set[int] = set()
        self._count = 0

    def document(self, node: yaml.Node | None) -> Document:
        if node is None:
            return Document({})
        data = self._value(node, ())
        if data is None:
            return Document({})
        if not isinstance(data, dict):
            raise ConfigError(
                f"{self._path}:{node.start_mark.line + 1}: a {_kind(data)} instead of a mapping. "
                "Start with a section such as 'storage:'."
            )
        return Document(data, self._lines)

    def _value(self, node: yaml.Node, location: Location) -> Any:
        import yaml

        line = node.start_mark.line + 1
        self._lines.setdefault(location, line)
        self._count += 1
        if self._count > _MAX_VALUES:
            raise ConfigError(
                f"{self._path}:{line}: more than {_MAX_VALUES:,} values. Remove the aliases."
            )
        if isinstance(node, yaml.ScalarNode):
            return self._loader.construct_object(node)
        if node.tag not in _PLAIN_TAGS:
            raise ConfigError(
                f"{self._path}:{line}: the tag {node.tag!r} is not supported. Remove it."
            )
        if id(node) in self._open:
            raise ConfigError(f"{self._path}:{line}: an alias of itself. Remove the alias.")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [
                    self._value(item, (*location, index)) for index, item in enumerate(node.value)
                ]
            assert isinstance(node, yaml.MappingNode)
            return self._mapping(node, location)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        # A mapping that an alias leads to a second time has been checked already, and has
        # its merged keys beside its own, which would look like duplicates.
        if id(node) not in self._flat:
            self._refuse_duplicates(node, location)
            # Puts merged pairs first, so that the mapping's own keys win below.
            self._loader.flatten_mapping(node)
            self._flat.add(id(node))
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            inner = (*location, key)
            self._lines[inner] = key_node.start_mark.line + 1
            result[key] = self._value(value_node, inner)
        return result

    def _refuse_duplicates(self, node: yaml.MappingNode, location: Location) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            line = key_node.start_mark.line + 1
            key = self._key(key_node)
            if key in seen:
                raise ConfigError(
                    f"{self._path}:{line}: the key '{key_path((*location, key))}' is there twice, "
                    f"first in line {seen[key]}. Remove one of them."
                )
            seen[key] = line

    def _key(self, node: yaml.Node) -> str:
        key = self._loader.construct_object(node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(
                f"{self._path}:{node.start_mark.line + 1}: the key {key!r} is not text. "
                "Put it in quotes."
            )
        return key


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "single value"

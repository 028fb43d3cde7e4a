"""Changing single values in the text of a YAML file: everything else stays as it was written.

A library that reads the whole file and writes it again would keep comments, but not every
quote, indentation and line break. Here only the lines of what changes are touched, and keys that
stand in a comment (as ``lifeboat-cache init`` writes them) are set where they stand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

__all__ = ["Path", "append_item", "mask", "remove", "set_value"]

#: Keys and list positions.
Path = tuple[str | int, ...]

_INDENT = 2


def set_value(text: str, path: Path, value: Any) -> str:
    """Set what a path leads to; sections that are missing are made.

    Raises
    ------
    ValueError
        If the text is written in a way in which that cannot be done.
    """
    root = _compose(text)
    if root is None:
        return _join(text, _block(path, value, 0))
    node: yaml.Node = root
    owner: yaml.Node | None = None  # the key whose value the node is
    flow = False
    for depth, part in enumerate(path):
        found = _child(node, part)
        if found is None:
            return _add(text, root, node, owner, path[depth:], value)
        flow = flow or _is_flow(node)
        owner, node = found
    return _replace(text, owner, node, value, flow=flow)


def remove(text: str, path: Path) -> str:
    """Remove a key or an item; one that is not there is left.

    Raises
    ------
    ValueError
        As for :func:`set_value`.
    """
    parent: yaml.Node | None = None
    owner: yaml.Node | None = None
    above: yaml.Node | None = None
    node = _compose(text)
    for part in path:
        if node is None:
            return text
        found = _child(node, part)
        if found is None:
            return text
        parent, above = node, owner
        owner, node = found
    assert parent is not None
    assert node is not None
    entries = _entries(parent)
    at = next(index for index, (key, value) in enumerate(entries) if value is node)
    start = (owner or node).start_mark.index if isinstance(path[-1], str) else None
    if _is_flow(parent):
        first, last = entries[at][0] or entries[at][1], entries[at][1]
        if at + 1 < len(entries):
            following = entries[at + 1][0] or entries[at + 1][1]
            return text[: first.start_mark.index] + text[following.start_mark.index :]
        begin = entries[at - 1][1].end_mark.index if at else first.start_mark.index
        return text[:begin] + text[last.end_mark.index :]
    if start is None:  # the dash before an item
        start = text.rindex("-", 0, node.start_mark.index)
    line = text.rfind("\n", 0, start) + 1
    end = _line_end(text, _content_end(text, node))
    if text[line:start].strip():
        # The first key behind a dash: the next one takes its place.
        if at + 1 == len(entries):
            raise ValueError("the only key of an item cannot be removed")
        following = entries[at + 1][0] or entries[at + 1][1]
        return text[:start] + text[following.start_mark.index :]
    if len(entries) == 1 and isinstance(path[-1], int):
        # A list without items would be no list.
        assert above is not None
        key_end = text.index(":", above.end_mark.index)
        return f"{text[: key_end + 1]} []{text[key_end + 1 : line]}{text[end:]}"
    return text[:line] + text[end:]


def append_item(text: str, path: Path, item: Mapping[str, Any]) -> str:
    """Add an item at the end of a list, which is made if it is missing.

    Raises
    ------
    ValueError
        As for :func:`set_value`.
    """
    root = _compose(text)
    node = root
    for part in path:
        found = None if node is None else _child(node, part)
        if found is None:
            return set_value(text, path, [dict(item)])
        node = found[1]
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        return set_value(text, path, [dict(item)])
    if _is_flow(node):
        last = node.value[-1].end_mark.index
        return f"{text[:last]}, {_inline(dict(item))}{text[last:]}"
    column = node.start_mark.column
    end = _line_end(text, _content_end(text, node))
    return _insert(text, end, _items([dict(item)], column))


def mask(text: str, paths: Sequence[Path]) -> str:
    """The text with what some paths lead to replaced by asterisks."""
    places = []
    for path in paths:
        node = _compose(text)
        for part in path:
            found = None if node is None else _child(node, part)
            node = None if found is None else found[1]
        if node is not None and node.end_mark.index > node.start_mark.index:
            places.append((node.start_mark.index, _content_end(text, node)))
    for start, end in sorted(places, reverse=True):
        text = f"{text[:start]}********{text[end:]}"
    return text


def _compose(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError("it is not valid YAML") from error
    if isinstance(node, yaml.ScalarNode) and node.value == "":
        return None
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise ValueError("it is not a mapping")
    return node


def _is_flow(node: yaml.Node) -> bool:
    """Whether it is written between brackets."""
    return isinstance(node, yaml.CollectionNode) and bool(node.flow_style)


def _entries(node: yaml.Node) -> list[tuple[yaml.Node | None, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        return list(node.value)
    return [(None, item) for item in node.value]


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node | None, yaml.Node] | None:
    """Key and value that a part of a path leads to."""
    if isinstance(part, int):
        if not isinstance(node, yaml.SequenceNode) or part >= len(node.value):
            return None
        return None, node.value[part]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == part:
                return key, value
    return None


def _replace(text: str, owner: yaml.Node | None, node: yaml.Node, value: Any, *, flow: bool) -> str:
    start, end = node.start_mark.index, _content_end(text, node)
    if isinstance(value, (list, dict)) and not flow:
        assert owner is not None
        below = _nested(value, owner.start_mark.column + _INDENT)
        return f"{text[:start].rstrip(' ')}\n{below.rstrip()}{text[end:]}"
    gap = " " if start and text[start - 1] == ":" else ""
    return f"{text[:start]}{gap}{_inline(value)}{text[end:]}"


def _add(
    text: str,
    root: yaml.Node,
    node: yaml.Node,
    owner: yaml.Node | None,
    path: Path,
    value: Any,
) -> str:
    """Put keys that are missing into the last node that is there."""
    if any(isinstance(part, int) for part in path):
        raise ValueError("there is no such item")
    if isinstance(node, yaml.MappingNode) and _is_flow(node):
        inner = value
        for part in reversed(path[1:]):
            inner = {part: inner}
        pair = f"{path[0]}: {_inline(inner)}"
        if node.value:
            last = node.value[-1][1].end_mark.index
            return f"{text[:last]}, {pair}{text[last:]}"
        open_at = node.start_mark.index + 1
        return f"{text[:open_at]}{pair}{text[open_at:]}"
    if isinstance(node, yaml.MappingNode):
        column = node.value[0][0].start_mark.column
        after = _line_end(text, _content_end(text, node))
        begin = text.rfind("\n", 0, node.value[0][0].start_mark.index) + 1
    elif isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null") and owner is not None:
        if node.end_mark.index > node.start_mark.index:  # `key: null`, `key: ~`
            text = text[: node.start_mark.index].rstrip(" ") + text[node.end_mark.index :]
        column = owner.start_mark.column + _INDENT
        begin = after = _line_end(text, owner.end_mark.index)
    else:
        raise ValueError("a value stands where a section belongs")
    commented = _commented(text, str(path[0]), column, begin)
    lines = _block(path, value, column)
    if commented is not None:
        start, end = commented
        return f"{text[:start]}{lines}{text[end:]}"
    return _join(text, lines) if node is root else _insert(text, after, lines)


def _commented(text: str, key: str, column: int, begin: int) -> tuple[int, int] | None:
    """Where a key stands in a comment of its section, which begins at ``begin``."""
    wanted = re.compile(rf"#{' ' * column}{re.escape(key)}:")
    at = begin
    while at < len(text):
        end = _line_end(text, at)
        line = text[at:end]
        if wanted.match(line):
            return at, end
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            indent = len(line) - len(line.lstrip(" "))
            if indent < column:
                return None  # the next section
        at = end
    return None


def _block(path: Path, value: Any, column: int) -> str:
    """Lines that set a path, indented."""
    lines = ""
    for part in path[:-1]:
        lines += f"{' ' * column}{part}:\n"
        column += _INDENT
    key = f"{' ' * column}{path[-1]}:"
    if isinstance(value, (list, dict)) and value:
        return f"{lines}{key}\n{_nested(value, column + _INDENT)}"
    return f"{lines}{key} {_inline(value)}\n"


def _nested(value: Any, column: int) -> str:
    if isinstance(value, dict):
        return "".join(_block((key,), below, column) for key, below in value.items())
    return _items(value, column)


def _items(items: Sequence[Any], column: int) -> str:
    lines = ""
    for item in items:
        inner = _nested(item, column + 2) if isinstance(item, dict) else f"{_inline(item)}\n"
        lines += f"{' ' * column}- {inner.lstrip()}"
    return lines


def _inline(value: Any) -> str:
    # In a list, so that a text is quoted that could stand alone but not between brackets.
    shown: str = yaml.safe_dump(
        [value], default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False
    )
    return shown.strip()[1:-1]


def _content_end(text: str, node: yaml.Node) -> int:
    """Where the last character of a node is: a block ends only where the next thing begins."""
    while not isinstance(node, yaml.ScalarNode) and not _is_flow(node) and node.value:
        node = _entries(node)[-1][1]
    end: int = node.end_mark.index
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        end = node.start_mark.index + len(text[node.start_mark.index : end].rstrip())
    return end


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def _insert(text: str, at: int, lines: str) -> str:
    gap = "\n" if at and text[at - 1] != "\n" else ""
    return f"{text[:at]}{gap}{lines}{text[at:]}"


def _join(text: str, lines: str) -> str:
    return _insert(text, len(text), lines)

"""What LifeboatCache says to people while an engine runs, found in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["engine_messages", "found_in", "matches"]

_ROOT = Path(__file__).resolve().parents[2]

#: The command's messages are answers to who typed it, and are not looked up.
_OTHERS = ("cli", "config", "doctor", "testing")

#: Functions that answer with the reason for standing down.
_REASONS = re.compile(r".*reason|_unsupported|unreadable_load_format")

#: Calls whose first or second argument is a message.
_CALLS = frozenset(
    {
        "_StandDownError",
        "_disable",
        "_stand_down",
        "_taint",
        "stand_down",
        "ForeignDataError",
        "IdentityError",
        "SettingsError",
        "TargetError",
    }
)
#: What is known of launches that go without us.
_TABLES = ("TABLE", "MLX_TABLE")

_LEVELS = frozenset({"info", "warning", "error", "exception"})

_FORMAT = re.compile(r"%(?:[.\d]*[a-z])")

#: A pattern with less text of its own matches by chance.
_LEAST_LITERAL = 11

#: Stands for what is only known when it is said.
_SOMETHING = "¤"


def engine_messages() -> dict[str, str]:
    """Every message, with a mark where something is filled in, and where it is said."""
    found: dict[str, str] = {}
    for source in sorted((_ROOT / "packages").glob("*/src")):
        for path in sorted(source.rglob("*.py")):
            if not set(_OTHERS) & set(path.relative_to(source).parts):
                for line, text in _messages(ast.parse(path.read_text())):
                    found[text] = f"{path.name}:{line}"
    return found


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _speaks(node.func):
            for argument in node.args[:2]:
                yield from _texts(argument)
        elif isinstance(node, ast.FunctionDef) and _REASONS.fullmatch(node.name):
            for part in ast.walk(node):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield from _texts(part.value)
        elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") in _TABLES:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant):
                    yield from _texts(part)
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "reason" for target in node.targets
        ):
            yield from _texts(node.value)


def _speaks(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _CALLS
    if not isinstance(function, ast.Attribute):
        return False
    log = function.value
    if isinstance(log, ast.Call) and isinstance(log.func, ast.Attribute):
        return log.func.attr == "getLogger" and function.attr in _LEVELS
    if isinstance(log, ast.Name) and log.id in ("_log", "_logger"):
        return function.attr in _LEVELS
    return function.attr in _CALLS


def _texts(node: ast.expr) -> Iterator[tuple[int, str]]:
    """The texts of an expression; of those that are only parts of others, the others."""
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(part.value) if isinstance(part, ast.Constant) else _SOMETHING
            for part in node.values
        ]
        yield node.lineno, "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if " " in node.value:
            yield node.lineno, _FORMAT.sub(_SOMETHING, node.value)
    elif isinstance(node, ast.BinOp):
        texts = [text for side in (node.left, node.right) for _, text in _texts(side)]
        yield node.lineno, _SOMETHING.join(texts)
    elif isinstance(node, (ast.IfExp, ast.BoolOp)):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _texts(child)


def matches(pattern: str, message: str) -> bool:
    """Whether a message is one that a page shows as ``pattern``, where ``...`` is anything."""
    literal = [part.strip() for part in pattern.split("...")]
    if sum(len(part) for part in literal) < _LEAST_LITERAL:
        return False
    return re.search(".*".join(map(re.escape, filter(None, literal))), message) is not None


def found_in(message: str, line: str) -> bool:
    """Whether a line of a log could be ``message`` with everything filled in."""
    parts = message.split(_SOMETHING)
    return re.fullmatch("(.+)".join(map(re.escape, parts)), line) is not None

"""Makes ``docs/cli.md``: ``python -m lifeboat_cache.cli.reference``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lifeboat_cache.cli.parser import EXIT_CODES, PROGRAM, build_parser
from lifeboat_cache.cli.plugins import ELSEWHERE

__all__ = ["render_reference"]


def _elsewhere() -> str:
    return ", ".join(f"`{name}` ({package})" for name, package in ELSEWHERE.items())


_INTRO = f"""\
# The `{PROGRAM}` command

<!-- Made by: python -m lifeboat_cache.cli.reference > docs/cli.md
     Change the texts in lifeboat_cache/cli/parser.py, not here. -->

Messages and questions that are not the result go to stderr; with `--json` the result on stdout
is one JSON document. Other distributions add commands of their own, which
`{PROGRAM} --help` lists where they are installed: {_elsewhere()}.
"""


def render_reference() -> str:
    """Return the reference page of the command as Markdown.

    It is made from the parser and not from its help texts, whose layout differs
    between versions of Python.
    """
    parts = [_INTRO]
    for parser in _parsers(build_parser(plugins=False)):
        usage = _usage(parser)
        parts.append(f"\n## `{parser.prog}`\n\n{(parser.description or '').strip()}\n")
        parts.append(f"\n```\n{usage}\n```\n")
        rows = [_row(action) for action in _arguments(parser)]
        if rows:
            parts.append("\n| argument | meaning |\n|---|---|\n")
            parts.extend(rows)
    parts.append("\n## Exit codes\n\n| code | meaning |\n|---|---|\n")
    parts.extend(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    return "".join(parts)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
    ]


def _usage(parser: argparse.ArgumentParser) -> str:
    exclusive = {
        id(action): group
        for group in parser._mutually_exclusive_groups
        for action in group._group_actions
    }
    words = [parser.prog]
    done: set[int] = set()
    for action in sorted(_arguments(parser), key=lambda action: not action.option_strings):
        group = exclusive.get(id(action))
        if group is None:
            required = not action.option_strings and action.nargs is None
            words.append(_spelled(action) if required else f"[{_spelled(action)}]")
        elif id(group) not in done:
            done.add(id(group))
            either = " | ".join(map(_spelled, group._group_actions))
            words.append(f"({either})" if group.required else f"[{either}]")
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        words.append("COMMAND ...")
    return " ".join(words)


def _spelled(action: argparse.Action) -> str:
    name = action.option_strings[0] if action.option_strings else ""
    value = str(action.metavar) if action.nargs != 0 and action.metavar else ""
    return " ".join(filter(None, (name, value)))


def _row(action: argparse.Action) -> str:
    return f"| `{_spelled(action)}` | {action.help} |\n"


if __name__ == "__main__":
    print(render_reference(), end="")

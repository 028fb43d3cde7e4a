"""What commands share: tables, times, questions."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from lifeboat_cache.errors import LifeboatError

__all__ = ["RefusedError", "clean", "confirm", "show_time", "table"]


class RefusedError(LifeboatError):
    """A command that would change something and was not told to."""


def clean(text: object) -> str:
    """Return ``text`` on one line, without what could steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "") -> str:
    """Lay out rows under a head, columns aligned."""
    cells = [list(head), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )
    return "\n".join(indent + line for line in lines)


def show_time(seconds: float) -> str:
    """Show a point in time in local time; a dash if it is unknown."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds > 0 else "-"


def confirm(question: str, *, yes: bool) -> bool:
    """Ask on the terminal whether to go on.

    Parameters
    ----------
    question
        Ends in a question mark.
    yes
        The answer is already given.

    Raises
    ------
    RefusedError
        If there is nobody to ask.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise RefusedError(f"{question} There is no terminal to ask on: add --yes to go ahead.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")

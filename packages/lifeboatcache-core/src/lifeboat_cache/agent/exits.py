"""Exit codes of the agent's process."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Exit"]


class Exit(IntEnum):
    """Why the process ended, or, at its start, what has become of the agent."""

    OK = 0
    #: Something in it failed; the log says what.
    FAILED = 1
    #: It was called wrongly, or what it needs cannot be used.
    UNUSABLE = 2
    #: Another agent is there.
    ANOTHER = 3

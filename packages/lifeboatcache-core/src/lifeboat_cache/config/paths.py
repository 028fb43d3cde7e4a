"""Where things are: the home directory, and paths written with ``~`` and ``$NAME``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONFIG_FILE_NAME", "ENV_CONFIG", "ENV_HOME", "ENV_SALT", "Places", "home_directory"]

#: Names a configuration file.
ENV_CONFIG = "LIFEBOAT_CACHE_CONFIG"
#: Names the home directory.
ENV_HOME = "LIFEBOAT_CACHE_HOME"
#: Overrides ``security.namespace_salt``.
ENV_SALT = "LIFEBOAT_CACHE_NAMESPACE_SALT"
#: Overrides ``security.integrity_key``.
ENV_INTEGRITY_KEY = "LIFEBOAT_CACHE_INTEGRITY_KEY"
#: The configuration file in the home directory.
CONFIG_FILE_NAME = "lifeboat.yaml"

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)\}|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")


@dataclass(frozen=True)
class Places:
    """What a path in the configuration may refer to.

    Attributes
    ----------
    environ
        The environment variables.
    home
        The absolute home directory; ``$LIFEBOAT_CACHE_HOME`` in a path means this,
        whether or not the variable is set.
    """

    environ: Mapping[str, str]
    home: Path

    @classmethod
    def current(cls, environ: Mapping[str, str] | None = None) -> Places:
        """Return the places of ``environ``, by default of this process."""
        environ = os.environ if environ is None else environ
        return cls(environ=environ, home=home_directory(environ))

    def expand(self, text: str) -> Path:
        """Expand ``~``, ``$NAME`` and ``${NAME}`` in a path.

        Raises
        ------
        ValueError
            If a variable is not set, or the text cannot be a path.
        """
        return _expand(text, {**self.environ, ENV_HOME: str(self.home)})


def home_directory(environ: Mapping[str, str]) -> Path:
    """Return ``$LIFEBOAT_CACHE_HOME``, by default ``~/.lifeboat_cache``, as an absolute path.

    Raises
    ------
    ValueError
        If the variable refers to one that is not set, or there is no home directory.
    """
    text = environ.get(ENV_HOME) or "~/.lifeboat_cache"
    others = {name: value for name, value in environ.items() if name != ENV_HOME}
    return Path(os.path.abspath(_expand(text, others)))


def _expand(text: str, variables: Mapping[str, str]) -> Path:
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path")

    def value_of(match: re.Match[str]) -> str:
        name = match["bare"] or match["braced"] or ""
        if not variables.get(name):
            # Left as it is, "$NAME" would become a directory of that name.
            raise ValueError(f"the environment variable {name!r} in {text!r} is not set")
        return variables[name]

    # Only a leading "~" of what was written counts, not one out of a variable.
    if text == "~" or text.startswith("~/"):
        user_home = variables.get("HOME") or os.path.expanduser("~")
        if user_home.startswith("~"):
            # A container's user without an entry: "~" would become a directory of that name.
            raise ValueError(f"HOME is not set and this user has no home directory for {text!r}")
        return Path(user_home + _VARIABLE.sub(value_of, text[1:]))
    if text.startswith("~"):
        user, slash, rest = text.partition("/")
        found = os.path.expanduser(user)
        if found == user:
            raise ValueError(f"there is no user {user[1:]!r} on this machine for {text!r}")
        return Path(found + slash + _VARIABLE.sub(value_of, rest))
    return Path(_VARIABLE.sub(value_of, text))

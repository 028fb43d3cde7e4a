"""The error tree of LifeboatCache.

Every error names the condition and ends in the remedy. Each class derives from
:class:`LifeboatError` and from the builtin that fits it, so that callers can
catch either. Storage faults met while an engine runs are *not* raised: they
come back as per-key outcomes (see :mod:`lifeboat_cache.interface`).
"""

__all__ = [
    "ConfigError",
    "ForeignDataError",
    "FormatError",
    "IdentityError",
    "InterfaceError",
    "InvalidConfigError",
    "LifeboatError",
    "NewerFormatError",
    "StoreClosedError",
    "TargetError",
]


class LifeboatError(Exception):
    """Base of every error raised by LifeboatCache."""


class ConfigError(LifeboatError, ValueError):
    """A configuration file, key or value that cannot be used."""


class InvalidConfigError(ConfigError):
    """Keys or values that the schema does not take.

    Attributes
    ----------
    problems
        Each problem, and the keys and list positions that lead to it.
    """

    def __init__(self, message: str, problems: dict[str, tuple[str | int, ...]]) -> None:
        super().__init__(message)
        self.problems = problems


class FormatError(LifeboatError, ValueError):
    """On-disk data that does not parse: torn, corrupt, or not ours."""


class ForeignDataError(FormatError):
    """A file or directory that LifeboatCache did not write."""


class NewerFormatError(FormatError):
    """Data written by a newer format; it is skipped and never deleted."""


class IdentityError(LifeboatError, ValueError):
    """A model, or a part of it, that cannot be identified well enough to share KV."""


class InterfaceError(LifeboatError, ImportError):
    """Distributions of LifeboatCache that do not fit together."""


class StoreClosedError(LifeboatError, RuntimeError):
    """A call on a store that has been closed."""


class TargetError(LifeboatError, OSError):
    """A storage target that cannot be opened, probed or written."""

    def __str__(self) -> str:
        # Without the "[Errno 20]" that OSError puts before it: the message says it in words.
        return self.strerror or super().__str__()

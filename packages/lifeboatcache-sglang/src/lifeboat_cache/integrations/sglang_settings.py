"""The variables ``LIFEBOAT_SGLANG_*``, which say what a launch has left open.

Imports nothing of SGLang's: ``lifeboat-cache doctor`` reads them too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from lifeboat_cache.errors import LifeboatError

__all__ = [
    "AUTO",
    "DEFAULT_PAGE_SIZE",
    "DEFAULT_STAGING_TOKENS",
    "HOST_GB",
    "PAGE_SIZE",
    "STAGING_TOKENS",
    "WRITE_POLICIES",
    "WRITE_POLICY",
    "ZERO_COPY",
    "Settings",
    "SettingsError",
    "read_settings",
]

HOST_GB = "LIFEBOAT_SGLANG_HOST_GB"
PAGE_SIZE = "LIFEBOAT_SGLANG_PAGE_SIZE"
STAGING_TOKENS = "LIFEBOAT_SGLANG_STAGING_TOKENS"
WRITE_POLICY = "LIFEBOAT_SGLANG_WRITE_POLICY"
ZERO_COPY = "LIFEBOAT_SGLANG_ZERO_COPY"

#: The value of :data:`HOST_GB` that sizes the host pool by the accelerator's memory.
AUTO = "auto"

#: Tokens per page where neither the launch nor :data:`PAGE_SIZE` says otherwise.
DEFAULT_PAGE_SIZE = 64

#: Tokens of accelerator memory through which SGLang gathers pages on their way to the host.
DEFAULT_STAGING_TOKENS = 1024

WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


class SettingsError(LifeboatError):
    """A variable holds what it cannot mean; the message ends in the remedy."""


@dataclass(frozen=True)
class Settings:
    """What the variables say.

    Attributes
    ----------
    host_bytes
        Size of the host pool of one rank; :data:`AUTO`; ``None`` = by default.
    page_size
        Tokens per page.
    staging_tokens
        Tokens of the staging buffer; 0 = as SGLang has it.
    write_policy
        One of :data:`WRITE_POLICIES`; ``None`` = as the launch has it.
    zero_copy
        Whether pages move without a copy between host pool and store.
    """

    host_bytes: int | str | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    staging_tokens: int = DEFAULT_STAGING_TOKENS
    write_policy: str | None = None
    zero_copy: bool = True


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the variables.

    Raises
    ------
    SettingsError
        When one holds what it cannot mean.
    """
    return Settings(
        host_bytes=_host(environ),
        page_size=_number(environ, PAGE_SIZE, DEFAULT_PAGE_SIZE, 1, 65536),
        staging_tokens=_number(environ, STAGING_TOKENS, DEFAULT_STAGING_TOKENS, 0, 1 << 20),
        write_policy=_policy(environ),
        zero_copy=_switch(environ, ZERO_COPY, default=True),
    )


def _host(environ: Mapping[str, str]) -> int | str | None:
    text = environ.get(HOST_GB, "").strip().lower()
    if not text:
        return None
    if text == AUTO:
        return AUTO
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 < gigabytes <= 1_000_000:
        raise SettingsError(
            f"{HOST_GB}={text!r} is no size: set it to a number of GB for one rank, or to {AUTO}"
        )
    return round(gigabytes * 1e9)


def _number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        raise SettingsError(
            f"{name}={text!r} is not possible: set it to a whole number from {least} to {most}"
        )
    return int(text)


def _policy(environ: Mapping[str, str]) -> str | None:
    text = environ.get(WRITE_POLICY, "").strip().lower()
    if not text:
        return None
    if text not in WRITE_POLICIES:
        raise SettingsError(
            f"{WRITE_POLICY}={text!r} is none of SGLang's policies: "
            f"set it to {', '.join(WRITE_POLICIES[:-1])} or {WRITE_POLICIES[-1]}"
        )
    return text


def _switch(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environ.get(name, "").strip().lower()
    if not text:
        return default
    if text not in _ON + _OFF:
        raise SettingsError(f"{name}={text!r} is neither on nor off: set it to 1 or to 0")
    return text in _ON

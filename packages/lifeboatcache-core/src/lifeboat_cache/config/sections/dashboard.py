"""The dashboard."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from lifeboat_cache.config.sections.base import Key, Section
from lifeboat_cache.config.sections.values import LiveSwitch

__all__ = ["Dashboard"]


class Dashboard(Section):
    """Pages that show what all engines of this home directory do.

    The agent serves them, if the distribution `lifeboatcache-dashboard` is installed.
    """

    enabled: LiveSwitch = Field(default=True, description="Whether the agent serves them.")
    host: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9.:_-]+$"),
        Key(allowed="an address or a name of this machine", example="0.0.0.0", restart=False),
    ] = Field(
        default="127.0.0.1",
        description="The address that is listened on. Any but a loopback address needs "
        "`auth_token`; without it nothing is served.",
    )
    port: Annotated[
        int,
        Field(ge=1, le=65535),
        Key(allowed="a whole number from 1 to 65535", example="9400", restart=False),
    ] = Field(default=9400, description="Where a browser finds them.")
    auth_token: Annotated[
        SecretStr,
        Key(
            allowed="text (put it in quotes), 16 characters or more",
            example='"..."',
            restart=False,
            secret=True,
        ),
    ] = Field(
        default=SecretStr(""),
        description="What a browser must show once, as `?token=...`, and a program with every "
        "request, as `Authorization: Bearer ...`. Shown masked and never logged. Make one with: "
        "`openssl rand -hex 24`.",
    )
    allow_config_edit: LiveSwitch = Field(
        default=True,
        description="Whether the dashboard may change the configuration file and purge what is "
        "stored. Off: it only shows them.",
    )

"""The arguments of the LMCache servers that LifeboatCache starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lifeboat_cache.config.schema import Config
from lifeboat_cache.engines.memory import available_ram
from lifeboat_cache.errors import ConfigError

__all__ = ["ADAPTER", "adapter_argument", "given", "port_of", "server_arguments"]

#: Where LMCache finds the adapter.
ADAPTER = {
    "type": "plugin",
    "module_path": "lifeboat_cache.integrations.lmcache_adapter",
    "class_name": "LifeboatL2Adapter",
}

#: Of the memory that is available, so much is left to the engine and everybody else.
_SHARE_LEFT = 0.4
_GB = 10**9


def adapter_argument(config: Path | None) -> str:
    """The value of ``--l2-adapter``."""
    params = {} if config is None else {"adapter_params": {"config": str(config)}}
    return json.dumps({**ADAPTER, **params})


def given(arguments: Sequence[str], *names: str) -> bool:
    """Whether arguments hold one of some options."""
    return any(argument.split("=", 1)[0] in names for argument in arguments)


def port_of(arguments: Sequence[str], default: int) -> int:
    """The port that arguments ask for.

    Raises
    ------
    ConfigError
        If it is none.
    """
    value = str(default)
    for number, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name == "--port":
            value = text if equals else "".join(arguments[number + 1 : number + 2])
    if not value.isdecimal() or not 0 < int(value) < 65534:
        raise ConfigError(f"--port is {value!r}: give a number from 1 to 65533")
    return int(value)


def server_arguments(
    config: Config, extra: Sequence[str] = (), *, file: Path | None = None
) -> list[str]:
    """What ``lmcache server`` is started with.

    Parameters
    ----------
    config
        The configuration.
    extra
        Further arguments; where one says something that is set here, it wins.
    file
        The configuration file that was named for this server.

    Raises
    ------
    ConfigError
        If there is too little memory, or an argument that cannot be used.
    """
    port = port_of(extra, config.engine.lmcache_port)
    defaults = [
        ("--host", "127.0.0.1"),
        ("--port", str(port)),
        ("--http-host", "127.0.0.1"),
        ("--http-port", str(port + 1)),
        ("--prometheus-port", str(port + 2)),
        ("--eviction-policy", "LRU"),
        # CPU workers move KV themselves, GPU workers leave it to the server.
        ("--supported-transfer-mode", "auto"),
    ]
    if not given(extra, "--l1-size-gb", "--l1-manager"):
        gigabytes = _memory(config)
        defaults += [("--l1-size-gb", f"{gigabytes:.2f}")]
        if not given(extra, "--l1-init-size-gb"):
            defaults += [("--l1-init-size-gb", "1")]
    out = [part for name, value in defaults if not given(extra, name) for part in (name, value)]
    # Before those of the user's own: LMCache asks adapters in order.
    return [*out, "--l2-adapter", adapter_argument(file), *extra]


def _memory(config: Config) -> float:
    """Gigabytes of LMCache's own memory."""
    wanted = config.engine.native_cpu_gb
    for name, available in available_ram().items():
        usable = available * (1 - _SHARE_LEFT) / _GB
        if usable < 1.0:
            raise ConfigError(
                f"too little memory for an LMCache server ({name}: {available / _GB:.1f} GB): free "
                "memory, or raise the container's limit"
            )
        wanted = min(wanted, usable)
    return max(1.0, wanted)

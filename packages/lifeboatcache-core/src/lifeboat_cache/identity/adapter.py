"""The fingerprint of a LoRA adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity.stamps import FileStamp, stamp
from lifeboat_cache.identity.weights import WeightsIdentity, files_identity

__all__ = ["AdapterIdentity", "adapter_files", "adapter_identity"]

_FORMAT = b"lifeboat adapter 1"
_CONFIG = "adapter_config.json"
#: By preference, as vLLM and peft take them.
_WEIGHTS = (
    ("adapter_model.safetensors", "safetensors"),
    ("adapter_model.bin", "torch"),
    ("adapter_model.pt", "torch"),
)
_MAX_CONFIG_BYTES = 16 << 20
#: Adapters are small. Up to here they are read whole, so that no change is missed.
_WHOLE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """What was found out about an adapter.

    Attributes
    ----------
    digest
        64 hexadecimal digits (BLAKE3) over configuration and weights.
    weights
        The weights by themselves.
    stamps
        The configuration and weight files as they were.
    """

    digest: str
    weights: WeightsIdentity
    stamps: tuple[FileStamp, ...]


def adapter_files(path: Path) -> tuple[Path, Path, str]:
    """Configuration file, weight file and kind of an adapter directory.

    Raises
    ------
    IdentityError
        If one is missing.
    """
    config = path / _CONFIG
    if not config.is_file():
        raise IdentityError(f"{path}: holds no {_CONFIG}: check the adapter's path")
    for name, kind in _WEIGHTS:
        if (path / name).is_file():
            return config, path / name, kind
    raise IdentityError(f"{path}: holds no {_WEIGHTS[0][0]}: check the adapter's path")


def _config_bytes(path: Path) -> tuple[bytes, FileStamp]:
    try:
        found = stamp(path)
        if found.size > _MAX_CONFIG_BYTES:
            raise IdentityError(
                f"{path}: {found.size} bytes are too many for an adapter's configuration: "
                "check the adapter's path"
            )
        config: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        if isinstance(exc, IdentityError):
            raise
        raise IdentityError(
            f"{path}: not an adapter's configuration ({exc}): download or copy it again"
        ) from exc
    if isinstance(config, dict):
        # Where the base model lay when the adapter was trained; nothing reads it here.
        config.pop("base_model_name_or_path", None)
    return json.dumps(config, sort_keys=True).encode(), found


def adapter_identity(
    path: Path,
    *,
    should_stop: Callable[[], bool] | None = None,
    not_after: float | None = None,
) -> AdapterIdentity:
    """Fingerprint a LoRA adapter: its configuration and all of its weights.

    Weights of up to 1 GiB are read whole, larger ones sampled like a model's.

    Parameters
    ----------
    path
        A directory with ``adapter_config.json`` and ``adapter_model.*``.
    should_stop, not_after
        See :func:`lifeboat_cache.identity.weights.files_identity`.

    Raises
    ------
    IdentityError
        If it is not an adapter, is damaged, or changes meanwhile.
    """
    config_path, weights_path, kind = adapter_files(path)
    config, config_stamp = _config_bytes(config_path)
    try:
        whole = weights_path.stat().st_size <= _WHOLE_BYTES
    except OSError as exc:
        raise IdentityError(
            f"{weights_path}: cannot be read ({exc.strerror}): check the adapter's path"
        ) from exc
    weights = files_identity(
        kind, (weights_path,), whole=whole, should_stop=should_stop, not_after=not_after
    )
    if not_after is not None and config_stamp.changed_at > not_after:
        raise IdentityError(
            f"{config_path}: changed after the engine began to load it: restart the engine"
        )
    hasher = blake3(_FORMAT)
    hasher.update(len(config).to_bytes(8, "little") + config)
    hasher.update(bytes.fromhex(weights.digest))
    return AdapterIdentity(hasher.hexdigest(), weights, (config_stamp, *weights.stamps))

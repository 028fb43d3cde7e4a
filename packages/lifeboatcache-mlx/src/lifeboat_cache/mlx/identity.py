"""Whose KV it is: the fingerprint of a model as it lies in memory.

Not of its files: adapters, quantization and whatever else a script does to a model between
loading and using it are in its parameters, and so in the fingerprint.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import mlx.core as mx
from blake3 import blake3
from mlx.utils import tree_flatten

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import jsonable, qualified_name
from lifeboat_cache.identity.sampling import sample_windows, windows_for
from lifeboat_cache.interface import Namespace
from lifeboat_cache.mlx.arrays import bytes_of, dtype_name
from lifeboat_cache.mlx.versions import minor_of

__all__ = ["find_namespace", "fingerprint"]

#: Changes when the bytes of blocks or states, or their keys, mean something else.
_FORMAT = 1

_SALT_CONTEXT = "lifeboatcache 2026 namespace salt v1"


def fingerprint(model: Any) -> dict[str, Any]:
    """Describe a model: its class, its settings, and every parameter, sampled.

    Parameters of up to 64 KiB are read whole, others as of a checkpoint's
    (:mod:`lifeboat_cache.identity.sampling`).

    Raises
    ------
    IdentityError
        If a setting or a parameter cannot be told from another.
    """
    parameters = sorted(tree_flatten(model.parameters()))
    windows = windows_for(len(parameters))
    hasher = blake3(b"mlx parameters 1")
    total = 0
    for name, array in parameters:
        try:
            kind = dtype_name(array.dtype)
        except ValueError as exc:
            raise IdentityError(f"{name}: {exc}") from exc
        memory, owner = bytes_of(array)
        hasher.update(f"{name}\0{kind}\0{list(array.shape)}\0".encode())
        for at, length in sample_windows(name, memory.shape[0], windows):
            hasher.update(memory[at : at + length].data)
        total += memory.shape[0]
        del memory, owner
    return {
        "class": qualified_name(type(model)),
        "modules": _modules(model),
        "settings": _settings(model),
        "parameters": {"count": len(parameters), "bytes": total, "digest": hasher.hexdigest()},
    }


def _settings(model: Any) -> Any:
    """What the model was made with; its RoPE is there, which is in no parameter."""
    found = getattr(model, "args", None) or getattr(model, "config", None)
    if found is None:
        raise IdentityError(
            f"a {type(model).__name__} has no `args`, so its settings are not known: use a model "
            "that mlx_lm.load gives"
        )
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return jsonable(found, "args")


def _modules(model: Any) -> str:
    """A digest of the kinds of all layers, and of their plain settings (RoPE's base, …)."""
    hasher = blake3(b"mlx modules 1")
    for name, module in sorted(model.named_modules()):
        plain = sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str))
        )
        hasher.update(f"{name}\0{qualified_name(type(module))}\0{plain}\0".encode())
    return hasher.hexdigest()


def find_namespace(model: Any, draft: Any, salt: str, block_tokens: int, name: str) -> Namespace:
    """Name the namespace of a model, and of its draft model if there is one.

    Parameters
    ----------
    model, draft
        Models of mlx-lm.
    salt
        ``security.namespace_salt``; only its digest enters.
    block_tokens
        Tokens of a block.
    name
        What to call the model in displays.

    Raises
    ------
    IdentityError
        If a model cannot be identified.
    """
    import mlx_lm

    version, core = str(mlx_lm.__version__), str(mx.__version__)
    identity = {
        "kind": "mlx-lm",
        "adapter": {"name": "lifeboatcache-mlx", "format": _FORMAT},
        "engine": {"name": "mlx-lm", "version": minor_of(version), "mlx": minor_of(core)},
        "platform": {
            "device": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
            "machine": os.uname().machine,
        },
        "model": fingerprint(model),
        "draft": None if draft is None else fingerprint(draft),
        "block_tokens": block_tokens,
        "salt": blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).hexdigest()
        if salt
        else None,
    }
    return Namespace.from_identity(
        identity, {"engine": f"mlx-lm {version}", "model": name, "mlx": core}
    )

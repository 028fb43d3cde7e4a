"""Whose KV an LMCache server holds: the namespace of a model's name.

LMCache knows a model by its name only. ``LifeboatConnector`` therefore appends a fingerprint
of the engine to it (:func:`tagged`). Without one the server looks for the model itself, under
its name, and fingerprints the weights that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import WeightsIdentity, resolve_model_dir, weights_identity
from lifeboat_cache.interface import Namespace

__all__ = ["ADAPTER_FORMAT", "ModelTag", "find_namespace", "read_tag", "tagged", "weights_path"]

_ADAPTER = "lifeboatcache-lmcache"

#: Raised when the adapter stores the same KV under other keys or in another form.
ADAPTER_FORMAT = 1

_SALT_CONTEXT = "lifeboatcache 2026 namespace salt v1"

#: What weights are called.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

_TAG = re.compile(r"~lifeboat-(?P<digest>[0-9a-f]{32})(?P<kind>[ks])$")


@dataclass(frozen=True)
class ModelTag:
    """What ``LifeboatConnector`` says of an engine in the name of its model.

    Attributes
    ----------
    digest
        32 hexadecimal digits: what decides the KV of the engine.
    recurrent
        Whether some of the KV may be recurrent state, which must come back exactly.
    """

    digest: str
    recurrent: bool


def tagged(name: str, tag: ModelTag) -> str:
    """The name of a model with a tag."""
    return f"{name}~lifeboat-{tag.digest}{'s' if tag.recurrent else 'k'}"


def read_tag(name: str) -> tuple[str, ModelTag | None]:
    """A model's name without its tag, and the tag."""
    match = _TAG.search(name)
    if match is None:
        return name, None
    return name[: match.start()], ModelTag(match["digest"], match["kind"] == "s")


def weights_path(name: str) -> Path | None:
    """Where the weights of a model are on this host; ``None`` if they are not."""
    try:
        path = resolve_model_dir(name)
    except IdentityError:
        return None
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return None
    return path


def find_namespace(
    model_name: str, world_size: int, salt: str, version: str, should_stop: Callable[[], bool]
) -> tuple[Namespace, WeightsIdentity | None]:
    """Name the namespace of what engines of one model and size store.

    Ranks share it: a rank is part of every key. May read samples of the model's weights:
    call it on a background thread.

    Parameters
    ----------
    model_name
        As in LMCache's keys.
    world_size
        Shards of the KV.
    salt
        ``security.namespace_salt``.
    version
        Of LMCache: other minor releases may spell the same KV otherwise.
    should_stop
        Asked now and then; true ends the work.

    Returns
    -------
    namespace, weights
        ``weights`` if they were looked for and found here.

    Raises
    ------
    IdentityError
        If weights are here and cannot be identified: by the name alone they would be mistaken for
        others that once could not be, either.
    """
    name, tag = read_tag(model_name)
    weights: WeightsIdentity | None = None
    known: Any = None
    if tag is None:
        path = weights_path(name)
        if path is not None:  # otherwise by its name alone; `by` says so
            weights = weights_identity(path, should_stop=should_stop)
            known = weights.digest
    identity = {
        "kind": "lmcache-l2",
        "adapter": {"name": _ADAPTER, "format": ADAPTER_FORMAT},
        "engine": {"name": "lmcache", "version": ".".join(version.split(".")[:2])},
        "model": {
            "name": name,
            "by": "engine" if tag is not None else "weights" if weights is not None else "name",
            "fingerprint": tag.digest if tag is not None else known,
        },
        "parallel": {"world_size": world_size},
        "salt": blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).hexdigest()
        if salt
        else None,
    }
    display = {
        "engine": f"lmcache {version}",
        "model": name,
        "weights": weights.to_display() if weights is not None else None,
    }
    return Namespace.from_identity(identity, display), weights

"""A model's effective configuration, as it enters an engine's identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity.jsonable import jsonable

__all__ = ["effective_config", "length_matters"]

#: Keys of a model's configuration that say nothing about its KV. They are removed
#: where a model is described, not in what it holds (a quantization's `dtype` stays).
_VOLATILE = frozenset(
    {
        # Where it was loaded from and by which library: not part of the model.
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "_auto_class",
        # What transformers would use; the engine's own choice is named elsewhere.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
        "attn_implementation",
        # The dtype of the checkpoint. The effective one is in `dtype`, the stored
        # one in the weights' digest.
        "dtype",
        "torch_dtype",
        # About the output layer, behind the KV; vLLM rewrites it while it loads.
        "tie_word_embeddings",
    }
)

#: Rotary embeddings whose angles do not depend on the longest context that an engine
#: serves. `longrope`, `dynamic` and whatever comes later do, or may.
_LENGTH_FREE_ROPE = frozenset(
    {
        "bailing_mrope",
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "default",
        "linear",
        "llama3",
        "mllama4",
        "mrope",
        "ntk",
        "openpangu",
        "proportional",
        "yarn",
    }
)


def effective_config(hf_config: Any, where: str = "hf_config") -> dict[str, Any]:
    """A model's configuration after all overrides, as JSON values.

    Parameters
    ----------
    hf_config
        A transformers configuration, or a mapping.
    where
        Its name, for errors.

    Raises
    ------
    IdentityError
        If it holds something without a spelling of its own.
    """
    if isinstance(hf_config, Mapping):
        raw: Any = hf_config
    else:
        try:
            raw = hf_config.to_dict()
        except Exception:
            raw = dict(vars(hf_config))
    cleaned = _clean(jsonable(raw, where), describes_model=True)
    if not isinstance(cleaned, dict):
        raise IdentityError(f"{where}: not a mapping: report this with the model's name")
    return cleaned


def _clean(value: Any, *, describes_model: bool = False) -> Any:
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    describes_model = describes_model or "model_type" in value
    result = {}
    for key, item in value.items():
        if describes_model and key in _VOLATILE:
            continue
        if describes_model and key == "auto_map" and isinstance(item, dict):
            # `org/name--module.Class` when it came from the Hub; the code is digested.
            result[key] = {name: _without_repository(target) for name, target in item.items()}
        else:
            result[key] = _clean(item)
    return result


def _without_repository(target: Any) -> Any:
    if isinstance(target, list):
        return [_without_repository(item) for item in target]
    return target.rpartition("--")[2] if isinstance(target, str) else target


def _rope_types(config: Any, inside: bool = False) -> set[str]:
    """Kinds of rotary embedding that a configuration names, anywhere in it."""
    found: set[str] = set()
    if isinstance(config, list):
        for item in config:
            found |= _rope_types(item, inside)
    elif isinstance(config, dict):
        for key, value in config.items():
            # Older configurations say `type`, which means other things elsewhere.
            if isinstance(value, str) and (key == "rope_type" or (inside and key == "type")):
                found.add(value)
            else:
                found |= _rope_types(value, inside or "rope" in key)
    return found


def length_matters(config: Mapping[str, Any]) -> bool:
    """Whether the longest served context decides the KV of a token.

    With LongRoPE it chooses between two sets of angles, with dynamic NTK scaling
    it scales them, and Llama 4 turns its attention temperature on by it.
    """
    if any(str(name).startswith("Llama4") for name in config.get("architectures") or ()):
        return True
    return bool(_rope_types(dict(config)) - _LENGTH_FREE_ROPE)

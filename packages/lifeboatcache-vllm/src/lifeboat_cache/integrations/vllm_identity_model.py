"""The part of an engine's identity that describes one model, target or draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import (
    PROCESSOR_FILES,
    QUANTIZATION_FILES,
    WeightsIdentity,
    digest_code,
    digest_files,
    jsonable,
    qualified_name,
    resolve_model_dir,
)
from lifeboat_cache.integrations import vllm_identity_fields as rules
from lifeboat_cache.integrations.vllm_identity_fields import select_fields

__all__ = ["effective_config", "length_matters", "model_directory", "model_section"]

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
        # What transformers would use; vLLM's own choice is in `attention`.
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


def _length(model: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    # Some image and video processors fit what they keep of an input to the context.
    multimodal = getattr(model, "multimodal_config", None) is not None
    if not multimodal and not length_matters(config):
        return {}
    overrides = getattr(model, "override_generation_config", None) or {}
    return {
        "max_model_len": jsonable(getattr(model, "max_model_len", None), "max_model_len"),
        "attn_temperature_tuning": jsonable(
            overrides.get("attn_temperature_tuning"), "override_generation_config"
        ),
    }


def _implementation(model: Any) -> str | None:
    """``module:class`` that computes the model; a plugin may have replaced it."""
    try:
        entry = model.registry.models[model.architecture]
    except Exception:
        return None
    module, name = getattr(entry, "module_name", None), getattr(entry, "class_name", None)
    if module and name:
        return f"{module}:{name}"
    found = getattr(entry, "model_cls", None)
    return qualified_name(found) if isinstance(found, type) else None


def model_directory(model: Any, load: Any) -> Path:
    """The local directory that a vLLM ``ModelConfig`` was loaded from.

    Raises
    ------
    IdentityError
        If it is not on this machine.
    """
    revision = getattr(model, "revision", None)
    # vLLM resolves a branch once and keeps the commit beside its name.
    commit = getattr(revision, "commit_hash", None) or getattr(
        getattr(model, "hf_config", None), "_commit_hash", None
    )
    return resolve_model_dir(
        str(model.model),
        str(revision) if revision is not None else None,
        getattr(load, "download_dir", None),
        commit=str(commit) if commit else None,
    )


def _side_files(model: Any, directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    names = set(QUANTIZATION_FILES)
    if getattr(model, "multimodal_config", None) is not None:
        names |= set(PROCESSOR_FILES)
    if any(str(name).startswith("Llama4") for name in config.get("architectures") or ()):
        names.add("generation_config.json")
    found: dict[str, Any] = {"files": digest_files(directory, names)}
    if getattr(model, "trust_remote_code", False):
        # Its own code and that of repositories it names, if there is any.
        code = {"": digest_code(directory)}
        revision = getattr(model, "code_revision", None)
        for place in _foreign_code(model):
            code[place] = digest_code(resolve_model_dir(place, revision))
        if any(code.values()):
            found["code"] = code
    return found


def _foreign_code(model: Any) -> list[str]:
    """Other repositories that a model's code comes from."""
    auto_map = getattr(getattr(model, "hf_config", None), "auto_map", None)
    targets = list(auto_map.values()) if isinstance(auto_map, dict) else []
    flat = [
        item for target in targets for item in (target if isinstance(target, list) else [target])
    ]
    places = {item.rpartition("--")[0] for item in flat if isinstance(item, str)}
    return sorted(places - {"", str(model.model)})


def model_section(
    model: Any, load: Any, weights: WeightsIdentity, where: str
) -> tuple[dict[str, Any], Path | None]:
    """Describe a model, and say where it lies.

    Parameters
    ----------
    model, load
        vLLM's ``ModelConfig`` and ``LoadConfig``.
    weights
        Its weights.
    where
        Its name, for errors.

    Returns
    -------
    dict
        JSON values.
    Path or None
        The model's directory; ``None`` for dummy weights, which have none.

    Raises
    ------
    IdentityError
        If something that matters has no spelling of its own.
    """
    hf_config = model.hf_config
    config = effective_config(hf_config, f"{where}.hf_config")
    section: dict[str, Any] = {
        "architectures": jsonable(getattr(model, "architectures", None), f"{where}.architectures"),
        "implementation": _implementation(model),
        "config": config,
        **select_fields(model, rules.MODEL, where),
        **_length(model, config),
        "weights": weights.to_identity(),
    }
    text = getattr(model, "hf_text_config", None)
    if text is not None and text is not hf_config:
        section["text_config"] = effective_config(text, f"{where}.hf_text_config")
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        section["multimodal"] = select_fields(
            multimodal, rules.MULTIMODAL, f"{where}.multimodal_config"
        )
    implementation = section["implementation"] or ""
    if multimodal is not None or ".transformers" in implementation:
        # Its image processors, or the model itself, are transformers' code.
        section["transformers"] = _minor_of("transformers")
    if weights.kind == "dummy":
        section["seed"] = jsonable(getattr(model, "seed", None), f"{where}.seed")
        return section, None
    directory = model_directory(model, load)
    section.update(_side_files(model, directory, config))
    return section, directory


def _minor_of(module: str) -> str:
    try:
        found = str(__import__(module).__version__)
    except Exception:
        return "absent"
    return ".".join(found.split(".")[:2])

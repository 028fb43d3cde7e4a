"""The part of an engine's identity that describes one model, target or draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifeboat_cache.identity import (
    PROCESSOR_FILES,
    QUANTIZATION_FILES,
    WeightsIdentity,
    digest_code,
    digest_files,
    effective_config,
    jsonable,
    length_matters,
    qualified_name,
    resolve_model_dir,
)
from lifeboat_cache.integrations import vllm_identity_fields as rules
from lifeboat_cache.integrations.vllm_identity_fields import select_fields

__all__ = ["effective_config", "length_matters", "model_directory", "model_section"]


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

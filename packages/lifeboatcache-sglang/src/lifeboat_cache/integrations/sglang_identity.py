"""The namespace identity of an SGLang rank: everything that decides a page's bytes.

The identity is a JSON-able document that a person can read and compare, kept beside the
data. Two engines share pages exactly if their documents are equal and their pools'
pages are alike (:mod:`lifeboat_cache.integrations.sglang_keys`). SGLang itself names
pages by the served name, which another dtype, other weights or another RoPE leave as it
is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import IdentityError, LifeboatError
from lifeboat_cache.identity import (
    PROCESSOR_FILES,
    QUANTIZATION_FILES,
    WeightsIdentity,
    digest_code,
    digest_files,
    effective_config,
    jsonable,
    length_matters,
    process_start_time,
    resolve_model_dir,
    unreadable_load_format,
    weights_identity,
)
from lifeboat_cache.integrations import sglang_identity_fields as fields
from lifeboat_cache.interface import Namespace

__all__ = ["ADAPTER_FORMAT", "find_namespace", "parallel_section"]

_ADAPTER = "lifeboatcache-sglang"

#: Raised when the adapter stores the same pages under other keys or in another form.
ADAPTER_FORMAT = 1

_SALT_CONTEXT = "lifeboatcache 2026 namespace salt v1"

#: Speculation that proposes without a model.
_NO_DRAFT_MODEL = frozenset({"NGRAM"})


def find_namespace(
    storage_config: Any,
    salt: str,
    should_stop: Callable[[], bool],
    more: Mapping[str, Any] | None = None,
) -> Namespace:
    """Name the namespace of this rank.

    Reads samples of the model's weights: call it on a background thread.

    Parameters
    ----------
    storage_config
        SGLang's ``HiCacheStorageConfig``.
    salt
        ``security.namespace_salt``; only its digest enters.
    should_stop
        Asked now and then; true ends the work with :class:`IdentityError`.
    more
        Sections that this rank's identity has besides.

    Raises
    ------
    IdentityError
        If pages of this engine must not be shared; the message says why.
    """
    import sglang
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context

    context = get_context()
    try:
        server_args = context.server_args
        resolved: dict[str, Any] = context.resolved_server_args_dict()
    except Exception as exc:
        raise IdentityError(
            f"this process has no server arguments of SGLang ({exc}), so the model cannot be "
            "identified: use the backend inside SGLang"
        ) from exc
    try:
        return _identify(
            resolved,
            namespace_of(type(server_args)),
            _defaults(type(server_args)),
            storage_config,
            salt,
            str(sglang.__version__),
            should_stop,
            more,
        )
    except LifeboatError:
        raise
    except Exception as exc:
        raise IdentityError(
            f"the model cannot be identified ({type(exc).__name__}: {exc}): report this with "
            "SGLang's version"
        ) from exc


def _identify(
    resolved: Mapping[str, Any],
    namespaces: Mapping[str, str],
    defaults: Mapping[str, Any],
    storage_config: Any,
    salt: str,
    version: str,
    should_stop: Callable[[], bool],
    more: Mapping[str, Any] | None = None,
) -> Namespace:
    model, weights = _model(resolved, should_stop)
    draft, draft_weights = _draft(resolved, should_stop)
    identity = {
        "kind": "sglang-rank",
        "adapter": {"name": _ADAPTER, "format": ADAPTER_FORMAT},
        # SGLang's patch releases change layouts and the hashes of pages.
        "engine": {"name": "sglang", "version": version},
        "platform": _platform(str(resolved.get("device"))),
        "environment": fields.decisive_environment(),
        "model": model,
        "draft": draft,
        "settings": fields.select_settings(resolved, namespaces, defaults),
        "parallel": parallel_section(storage_config),
        "salt": blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).hexdigest()
        if salt
        else None,
        **(more or {}),
    }
    display = {
        "engine": f"sglang {version}",
        "model": str(storage_config.model_name or resolved.get("model_path")),
        "directory": Path(str(resolved.get("model_path"))).name,
        "rank": [int(storage_config.tp_rank), int(storage_config.tp_size)],
        "weights": weights.to_display(),
        "draft_weights": draft_weights.to_display() if draft_weights is not None else None,
    }
    return Namespace.from_identity(identity, display)


def parallel_section(config: Any) -> dict[str, Any]:
    """Which part of the model's KV the pages of a rank are.

    KV that is the same on every rank (MLA and its relatives) is shared by all of them,
    and by engines of another tensor-parallel size; what is not the same there has
    key spaces by rank. Which data-parallel replica computed a page never counts.
    """
    section: dict[str, Any] = {
        "replicated": bool(config.is_mla_model),
        "pp": [int(config.pp_rank), int(config.pp_size)],
        "cp": [int(config.attn_cp_rank), int(config.attn_cp_size)],
        "dcp": [int(getattr(config, "dcp_rank", 0)), int(getattr(config, "dcp_size", 1))],
    }
    if not config.is_mla_model:
        section["tp"] = [int(config.tp_rank), int(config.tp_size)]
    return section


# The model ------------------------------------------------------------------


def _model(
    resolved: Mapping[str, Any], should_stop: Callable[[], bool]
) -> tuple[dict[str, Any], WeightsIdentity]:
    config = _hf_config(
        str(resolved["model_path"]),
        resolved,
        resolved.get("revision"),
        resolved.get("decrypted_config_file"),
    )
    return _section(
        str(resolved["model_path"]),
        resolved.get("revision"),
        str(resolved.get("load_format") or "auto"),
        config,
        resolved,
        should_stop,
    )


def _draft(
    resolved: Mapping[str, Any], should_stop: Callable[[], bool]
) -> tuple[dict[str, Any] | None, WeightsIdentity | None]:
    """The draft model, if it is not in the model's own checkpoint."""
    algorithm = resolved.get("speculative_algorithm")
    path = resolved.get("speculative_draft_model_path")
    if not algorithm or not path or str(algorithm).upper() in _NO_DRAFT_MODEL:
        return None, None
    revision = resolved.get("speculative_draft_model_revision")
    if path == resolved["model_path"] and revision in (None, resolved.get("revision")):
        return None, None
    config = _hf_config(str(path), resolved, revision, resolved.get("decrypted_draft_config_file"))
    load_format = resolved.get("speculative_draft_load_format") or resolved.get("load_format")
    return _section(str(path), revision, str(load_format or "auto"), config, resolved, should_stop)


def _section(
    path: str,
    revision: Any,
    load_format: str,
    hf_config: Any,
    resolved: Mapping[str, Any],
    should_stop: Callable[[], bool],
) -> tuple[dict[str, Any], WeightsIdentity]:
    """Describe a model and fingerprint its weights."""
    config = effective_config(hf_config)
    section: dict[str, Any] = {
        "architectures": jsonable(getattr(hf_config, "architectures", None), "architectures"),
        "config": config,
    }
    multimodal = _is_multimodal(config) and resolved.get("enable_multimodal") is not False
    if multimodal or length_matters(config):
        # Some processors fit what they keep of an image or a video to the context.
        section["context_length"] = jsonable(resolved.get("context_length"), "context_length")
    if multimodal:
        section["transformers"] = _minor_of("transformers")
    if load_format == "dummy":
        section["seed"] = jsonable(resolved.get("random_seed"), "random_seed")
        weights = weights_identity(Path(), load_format="dummy")
        return {**section, "weights": weights.to_identity()}, weights
    reason = unreadable_load_format(load_format)
    if reason is not None:
        raise IdentityError(f"{reason}; use --load-format auto")
    commit = getattr(hf_config, "_commit_hash", None)
    directory = resolve_model_dir(
        path,
        str(revision) if revision is not None else None,
        resolved.get("download_dir"),
        commit=str(commit) if commit else None,
    )
    weights = weights_identity(
        directory,
        load_format=load_format,
        should_stop=should_stop,
        # A snapshot of the Hub is never rewritten; a local directory may be.
        not_after=process_start_time() if os.path.exists(path) else None,
    )
    section["weights"] = weights.to_identity()
    beside = directory if directory.is_dir() else directory.parent
    names = set(QUANTIZATION_FILES) | (set(PROCESSOR_FILES) if multimodal else set())
    section["files"] = digest_files(beside, names)
    if resolved.get("trust_remote_code"):
        code = {"": digest_code(beside), **_foreign_code(hf_config, path)}
        if any(code.values()):
            section["code"] = code
    return section, weights


def _hf_config(path: str, resolved: Mapping[str, Any], revision: Any, override_file: Any) -> Any:
    """The configuration as SGLang reads it; read already by this process, and cached there."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    extra = {"_configuration_file": override_file.strip()} if override_file else {}
    return get_config(
        path,
        trust_remote_code=resolved.get("trust_remote_code", False),
        revision=revision,
        model_override_args=json.loads(resolved.get("json_model_override_args") or "{}"),
        model_config_parser=resolved.get("model_config_parser", "auto"),
        **extra,
    )


def _is_multimodal(config: Mapping[str, Any]) -> bool:
    return any(name.endswith(("vision_config", "audio_config", "mm_config")) for name in config)


def _foreign_code(hf_config: Any, path: str) -> dict[str, Any]:
    """Digests of code that a model takes from other repositories."""
    auto_map = getattr(hf_config, "auto_map", None)
    targets = list(auto_map.values()) if isinstance(auto_map, dict) else []
    flat = [
        item for target in targets for item in (target if isinstance(target, list) else [target])
    ]
    places = {item.rpartition("--")[0] for item in flat if isinstance(item, str)} - {"", path}
    return {place: digest_code(resolve_model_dir(place)) for place in sorted(places)}


# The machine ----------------------------------------------------------------


def _platform(device: str) -> dict[str, Any]:
    """What of the machine decides the bytes: kernels and formats follow from it."""
    section: dict[str, Any] = {"device": device, "machine": os.uname().machine}
    if device.startswith("cuda"):
        import torch

        section["capability"] = list(torch.cuda.get_device_capability())
        section["hip"] = jsonable(getattr(torch.version, "hip", None), "hip")
    return section


def _minor_of(module: str) -> str:
    try:
        found = str(__import__(module).__version__)
    except Exception:
        return "absent"
    return ".".join(found.split(".")[:2])


def _defaults(args_class: Any) -> dict[str, Any]:
    """Defaults of the fields of ``ServerArgs``, a msgspec record, that have one."""
    names: tuple[str, ...] = args_class.__struct_fields__
    defaults: tuple[Any, ...] = args_class.__struct_defaults__
    named = zip(names[len(names) - len(defaults) :], defaults, strict=True)
    # A default that is made anew each time is wrapped.
    return {name: value.factory() if hasattr(value, "factory") else value for name, value in named}

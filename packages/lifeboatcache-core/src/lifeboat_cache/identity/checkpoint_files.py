"""Which files of a model directory an engine loads.

The rules are those of vLLM's default loader (0.32 and 0.33), which SGLang and
transformers share in the main: ``auto`` takes ``consolidated*.safetensors`` if
there are any, else ``*.safetensors`` (those that the index names, if there is
an index), else ``*.bin``, else ``*.pt``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.errors import IdentityError

__all__ = ["CheckpointFiles", "checkpoint_files", "natural_key", "unreadable_load_format"]

_HF_INDEX = "model.safetensors.index.json"
_MISTRAL_INDEX = "consolidated.safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20

#: Written next to the weights by trainers; loaders skip them.
_NOT_WEIGHTS = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)

_SAFETENSORS_FORMATS = frozenset({"safetensors", "fastsafetensors", "instanttensor"})
_EVERY_SAFETENSORS_FORMATS = frozenset(
    {"runai_streamer", "runai_streamer_sharded", "sharded_state"}
)

#: Load formats whose weights are not the files of the model directory.
_ELSEWHERE = {
    "ipc_cache": "its weights come from a daemon that may have loaded other files",
    "modelexpress": "its weights come from another engine",
    "npcache": "it keeps a copy of the weights that may be older than the checkpoint",
    "tensorizer": "its weights come from a tensorizer archive",
}


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The weight files of a checkpoint.

    Attributes
    ----------
    kind
        ``"safetensors"``, ``"torch"`` or ``"gguf"``.
    files
        In the order in which loaders read them: of two tensors with one name
        the later wins.
    """

    kind: str
    files: tuple[Path, ...]


def natural_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which ``x-2`` comes before ``x-10``, as loaders order shards."""
    return tuple(
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"([0-9]+)", path.name)
    )


def unreadable_load_format(load_format: str) -> str | None:
    """Why a load format cannot be identified from a model directory; ``None`` if it can."""
    if load_format in _ELSEWHERE:
        return f"load format {load_format!r} cannot be identified: {_ELSEWHERE[load_format]}"
    known = (
        _SAFETENSORS_FORMATS
        | _EVERY_SAFETENSORS_FORMATS
        | {"auto", "hf", "mistral", "pt", "dummy", "gguf"}
    )
    if load_format not in known:
        return (
            f"load format {load_format!r} cannot be identified: LifeboatCache does not know "
            "which files it reads"
        )
    return None


def _glob(directory: Path, pattern: str) -> list[Path]:
    return sorted(
        (path for path in directory.glob(pattern) if path.is_file()),
        key=lambda path: (natural_key(path), path.name),
    )


def _indexed(directory: Path, index: str, files: list[Path]) -> list[Path]:
    path = directory / index
    if not path.is_file():
        return files
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"larger than {_MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        named = set(weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise IdentityError(
            f"{path}: not an index of safetensors files ({exc}): download or copy it again"
        ) from exc
    missing = named - {file.name for file in files}
    if missing:
        raise IdentityError(
            f"{directory}: {index} names {min(map(str, missing))}, which is not there: "
            "complete the download"
        )
    return [file for file in files if file.name in named]


def _choose(directory: Path, load_format: str) -> CheckpointFiles | None:
    if load_format == "auto":
        load_format = "mistral" if _glob(directory, "consolidated*.safetensors") else "hf"
    if load_format == "mistral":
        files = _glob(directory, "consolidated*.safetensors")
        return CheckpointFiles("safetensors", tuple(_indexed(directory, _MISTRAL_INDEX, files)))
    if load_format in _EVERY_SAFETENSORS_FORMATS:
        return CheckpointFiles("safetensors", tuple(_glob(directory, "*.safetensors")))
    if load_format == "hf" or load_format in _SAFETENSORS_FORMATS:
        files = _glob(directory, "*.safetensors")
        if files or load_format != "hf":
            return CheckpointFiles("safetensors", tuple(_indexed(directory, _HF_INDEX, files)))
    patterns = {"hf": ("*.bin", "*.pt", "*.gguf"), "pt": ("*.pt",), "gguf": ("*.gguf",)}
    for pattern in patterns[load_format]:
        files = [path for path in _glob(directory, pattern) if path.name not in _NOT_WEIGHTS]
        if files:
            return CheckpointFiles("gguf" if pattern == "*.gguf" else "torch", tuple(files))
    return None


def checkpoint_files(path: Path, load_format: str = "auto") -> CheckpointFiles:
    """Choose the weight files that an engine would load.

    Parameters
    ----------
    path
        A model directory, or a single weight file.
    load_format
        vLLM's name for how weights are loaded; not ``"dummy"``, which has none.

    Raises
    ------
    IdentityError
        If there are none, the checkpoint is incomplete, or the format's
        weights are not files of that directory.
    """
    reason = unreadable_load_format(load_format)
    if reason is not None:
        raise IdentityError(f"{reason}: load the model from a local directory to share its KV")
    if re.match(r"[a-z][a-z0-9+.-]*:/", str(path)):  # pathlib has made one slash of two
        raise IdentityError(
            f"{path}: remote weights cannot be identified: copy the model to a local directory"
        )
    if path.is_file():
        suffix = path.suffix.lower()
        kind = {".safetensors": "safetensors", ".gguf": "gguf"}.get(suffix, "torch")
        return CheckpointFiles(kind, (path,))
    if not path.is_dir():
        raise IdentityError(f"{path}: no such directory: check the model's path")
    chosen = _choose(path, load_format)
    if chosen is None or not chosen.files:
        raise IdentityError(
            f"{path}: holds no weights that load format {load_format!r} reads: "
            "check the model's path and the load format"
        )
    return chosen

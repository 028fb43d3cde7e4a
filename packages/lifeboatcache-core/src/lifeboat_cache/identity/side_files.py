"""Files beside the weights that change what a model computes.

The effective configuration and the weights do not say everything: a model may
bring its own Python code, a quantization description in a file of its own, or
settings of its image processor, which decide what an image becomes while the
image's hash stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from lifeboat_cache.errors import IdentityError

__all__ = ["PROCESSOR_FILES", "QUANTIZATION_FILES", "digest_code", "digest_files"]

#: How images, video and audio are prepared for a multi-modal model.
PROCESSOR_FILES = (
    "image_processor_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

#: Quantization and sparsity that ``config.json`` does not describe.
QUANTIZATION_FILES = (
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "sparse_attention_config.json",
)

_MAX_BYTES = 64 << 20
_MAX_CODE_FILES = 1000
_CODE_DEPTH = 3


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise IdentityError(
            f"{path}: cannot be read ({exc.strerror}): make it readable for the engine's user"
        ) from exc
    if len(content) > _MAX_BYTES:
        raise IdentityError(
            f"{path}: larger than {_MAX_BYTES} bytes: remove it if it does not belong to the model"
        )
    return blake3(content).hexdigest()


def digest_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Digest those of the named files that a model directory holds.

    Returns
    -------
    dict
        File name to 64 hexadecimal digits (BLAKE3 of the content).

    Raises
    ------
    IdentityError
        If one cannot be read.
    """
    if not directory.is_dir():
        return {}
    return {
        name: _digest(directory / name)
        for name in sorted(set(names))
        if (directory / name).is_file()
    }


def digest_code(directory: Path) -> dict[str, str]:
    """Digest the Python files that a model directory brings along.

    Raises
    ------
    IdentityError
        If one cannot be read, or there are too many for a model.
    """
    found: dict[str, str] = {}
    if not directory.is_dir():
        return found
    for parent, directories, files in os.walk(directory):
        depth = len(Path(parent).relative_to(directory).parts)
        # Hidden ones (.git, .cache) hold nothing that a model imports.
        directories[:] = sorted(
            name for name in directories if depth + 1 < _CODE_DEPTH and not name.startswith(".")
        )
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            if len(found) == _MAX_CODE_FILES:
                raise IdentityError(
                    f"{directory}: more than {_MAX_CODE_FILES} Python files: "
                    "move the model to a directory of its own"
                )
            path = Path(parent, name)
            found[str(path.relative_to(directory))] = _digest(path)
    return found

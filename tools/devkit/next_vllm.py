"""The newest vLLM that LifeboatCache claims to work with, for which no CPU build exists.

Its wheel is unpacked beside the environment of the older release and put in front
of it on Python's path. The compiled kernels do not load there, so no model runs, but
everything that the adapter meets is Python: configuration, tiering, scheduler.
"""

import os
import shutil
from pathlib import Path

from devkit import recipes
from devkit.places import dev_home
from devkit.shell import locked, note, run

__all__ = ["NEXT_VLLM", "make_next_vllm"]

#: The release that is unpacked.
NEXT_VLLM = "0.33.0"


def make_next_vllm() -> Path:
    """Unpack the release, once, and return the directory for ``PYTHONPATH``."""
    target = dev_home() / "envs" / f"vllm-{NEXT_VLLM}"
    python = recipes.vllm().make()
    with locked(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            note(f"unpacking vLLM {NEXT_VLLM} to {target} (once)")
            part = target.with_name(f"{target.name}.part-{os.getpid()}")
            for left_over in target.parent.glob(f"{target.name}.part-*"):
                shutil.rmtree(left_over)
            run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input",
                 "--no-deps", "--target", part, f"vllm=={NEXT_VLLM}"])  # fmt: skip
            # vLLM takes the CPU platform only if its version says that it was built for it.
            metadata = part / f"vllm-{NEXT_VLLM}.dist-info"
            text = (metadata / "METADATA").read_text()
            shown = f"\nVersion: {NEXT_VLLM}\n"
            (metadata / "METADATA").write_text(
                text.replace(shown, f"\nVersion: {NEXT_VLLM}+cpu\n", 1)
            )
            metadata.rename(part / f"vllm-{NEXT_VLLM}+cpu.dist-info")
            part.rename(target)
    return target

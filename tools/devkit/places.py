"""Where things are in the checkout and where private files go."""

import os
from pathlib import Path

__all__ = ["DISTRIBUTIONS", "ROOT", "SUPPORT", "dev_home"]

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
#: Distributions in the order in which they depend on each other.
DISTRIBUTIONS = (
    "lifeboatcache-core",
    "lifeboatcache-vllm",
    "lifeboatcache-sglang",
    "lifeboatcache-dashboard",
    "lifeboatcache-mlx",
    "lifeboatcache-lmcache",
    "lifeboatcache",
)


def dev_home() -> Path:
    """Return the directory for environments, the model and caches.

    ``.dev`` in the checkout, or what ``LIFEBOAT_DEV_HOME`` says.
    """
    return Path(os.environ.get("LIFEBOAT_DEV_HOME") or ROOT / ".dev").resolve()

"""The ``sglang.srt.plugins`` entry point.

Outside the ``lifeboat_cache`` namespace, so that it also runs, and says what
to do, when another distribution hides the namespace.
"""

import logging
from pathlib import Path

__all__ = ["register"]


def register() -> None:
    """Register the adapter with SGLang; a failure is one warning and never stops the engine."""
    try:
        import lifeboat_entry
    except Exception as error:
        logging.getLogger("lifeboat_cache").warning(
            "LifeboatCache is off in this process: %s; reinstall lifeboatcache-core", error
        )
        return
    lifeboat_entry.register(
        "lifeboat_cache.integrations.sglang_plugin", root=Path(__file__).resolve().parent
    )

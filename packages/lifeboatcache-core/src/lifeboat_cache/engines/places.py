"""Whether KV could be kept anywhere, asked before an engine takes memory for it."""

from __future__ import annotations

import threading

from lifeboat_cache.config import Config
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.mover.hanging import can_hang
from lifeboat_cache.targets.base import Target
from lifeboat_cache.targets.opening import target_of

__all__ = ["PATIENCE_S", "places_reason"]

#: A disk that does not answer for so many seconds hangs.
PATIENCE_S = 20.0


def places_reason(config: Config, patience_s: float = PATIENCE_S) -> str | None:
    """Why no configured place can be used, ending in the remedy; ``None`` if one can.

    Creates the directory of the first that can be, as the store would do soon after.
    A full disk counts as usable: what is there can be loaded. So does a place that can hang:
    no thread of an engine may ask it, and it may be usable a moment later.

    Parameters
    ----------
    config
        Of LifeboatCache.
    patience_s
        Seconds until a place that does not answer counts as unusable.
    """
    reasons = []
    perhaps = False
    for tier in config.storage.places:
        if can_hang(tier):
            perhaps = True
            continue
        reason = _place_reason(target_of(tier), patience_s)
        if reason is None:
            return None
        reasons.append(reason)
    if perhaps:
        return None
    problems = "; ".join(reasons or ["no place is configured"])
    return f"nothing can be kept: {problems}"


def _place_reason(target: Target, patience_s: float) -> str | None:
    reasons: list[str | None] = []

    def work() -> None:
        try:
            target.probe()
        except (OSError, ValueError, LifeboatError) as error:
            reasons.append(str(error))
        except Exception:  # a fault of ours, of which the store will say more
            reasons.append(None)
        else:
            reasons.append(None)

    # A system call on a dead disk cannot be given up, so it must not hold the launch.
    worker = threading.Thread(target=work, name="lifeboat-probe", daemon=True)
    worker.start()
    worker.join(patience_s)
    if worker.is_alive():
        return f"{target.location} has not answered for {patience_s:g} s: check the mount"
    return reasons[0]

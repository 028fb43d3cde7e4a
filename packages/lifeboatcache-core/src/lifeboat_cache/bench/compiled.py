"""Making sure that a benchmark measures compiled kernels, as an engine gets them."""

from __future__ import annotations

from collections.abc import Callable

from lifeboat_cache import kernels

__all__ = ["ready_kernels", "without_kernels"]


def ready_kernels(say: Callable[[str], None], *, compiling: bool) -> bool:
    """Load the kernels of this process, or compile them.

    Parameters
    ----------
    say
        Told what is going on.
    compiling
        Whether to compile what is not there.

    Returns
    -------
    bool
        Whether they are there. If not, their twins in Python are measured.
    """
    if kernels.ready() or kernels.load():
        return True
    if compiling:
        say("compiling kernels, once for this machine and release")
        if kernels.compile_all():
            return True
    say(f"without compiled kernels: {kernels.reason()}")
    return False


def without_kernels() -> str:
    """What the name of a case ends in: nothing if the kernels are there."""
    return "" if kernels.ready() else ", without kernels"

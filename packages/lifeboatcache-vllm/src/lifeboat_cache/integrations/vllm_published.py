"""What the tier adds to ``lifeboat-cache status`` and the agent's metrics."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.config.paths import home_directory
from lifeboat_cache.integrations.vllm_prompts import prompts
from lifeboat_cache.integrations.vllm_requests import split_key
from lifeboat_cache.interface import Outcome, PromptCounts
from lifeboat_cache.registry import stands_down

__all__ = ["Published", "show_stand_down"]

_log = logging.getLogger("lifeboat_cache")


def show_stand_down(reason: str) -> None:
    """Have ``lifeboat-cache status`` show that this engine runs without the cache."""
    import vllm

    try:
        stands_down(
            home_directory(os.environ), reason, engine="vllm", version=str(vllm.__version__)
        )
    except ValueError as exc:  # there is no home directory
        _log.debug("LifeboatCache: the status cannot show it: %s", exc)


class Published:
    """Counts the tokens that one store has given back, and shows those of all prompts.

    Parameters
    ----------
    spec
        vLLM's offloading spec, which says how many tokens a chunk holds.
    counts
        Where the process counts them.
    """

    def __init__(self, spec: Any, counts: PromptCounts = prompts) -> None:
        self._counts = counts
        self._served = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        blocks = getattr(spec, "blocks_per_chunk", 0)
        # Of the groups of layers in vLLM's order; unknown in a release that says it otherwise.
        self._tokens = [
            int(tokens) * int(blocks) for tokens in getattr(spec, "tokens_per_block", ())
        ]

    def loaded(self, keys: Sequence[bytes], outcomes: npt.NDArray[np.uint8]) -> None:
        """Count a load job. Every group of layers holds the same tokens: they count once."""
        if len(self._tokens) == 1:
            groups: dict[int, int] = {0: outcomes.tobytes().count(Outcome.OK)}
        else:
            groups = Counter(
                split_key(key)[1]
                for key, outcome in zip(keys, outcomes.tolist(), strict=True)
                if outcome == Outcome.OK
            )
        tokens = max(
            (
                count * self._tokens[group]
                for group, count in groups.items()
                if group < len(self._tokens)
            ),
            default=0,
        )
        if tokens:
            self._served += tokens
            self._counts.served(tokens)

    def facts(self) -> dict[str, Any]:
        """What is published; asked on a thread of the store."""
        import vllm

        for name, more in self._counts.take().items():
            self._sums[name] += more
        own = {"served_tokens": self._served}
        return {"engine": "vllm", "version": vllm.__version__, **self._sums, **own}

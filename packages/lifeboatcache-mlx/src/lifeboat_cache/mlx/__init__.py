"""Prompt caches of mlx-lm that outlive the process.

>>> from lifeboat_cache.mlx import PersistentPromptCache
>>> cache = PersistentPromptCache(model, tokenizer)
>>> text = cache.generate("…")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lifeboat_cache.mlx.prompt_cache import PersistentPromptCache

__all__ = ["PersistentPromptCache"]


def __getattr__(name: str) -> Any:
    """Import MLX when it is needed: the command and the doctor run where there is none."""
    if name == "PersistentPromptCache":
        from lifeboat_cache.mlx.prompt_cache import PersistentPromptCache

        return PersistentPromptCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

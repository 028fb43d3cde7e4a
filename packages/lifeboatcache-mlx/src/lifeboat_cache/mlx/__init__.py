"""Prompt caches of mlx-lm that outlive the process.

from lifeboat_cache.mlx import PersistentPromptCache

cache = PersistentPromptCache(model, tokenizer)
text = cache.generate("…")
"""

from lifeboat_cache.mlx.prompt_cache import PersistentPromptCache

__all__ = ["PersistentPromptCache"]

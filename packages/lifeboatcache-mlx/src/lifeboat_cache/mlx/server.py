"""``lifeboat-cache mlx-server``: mlx-lm's server, with a prompt cache that outlives it.

Takes the arguments of ``mlx_lm.server`` and behaves like it; the prompt caches that it
keeps in memory are stored as well, and prompts are looked up there too.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm import server as mlx_server
from mlx_lm.models.cache import LRUPromptCache

from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.mlx.prompt_cache import PersistentPromptCache
from lifeboat_cache.mlx.spaces import Quantization

__all__ = ["StoredPromptCache", "main"]

_log = logging.getLogger("lifeboat_cache")

_NOTHING: tuple[list[Any], int] | None = None


class StoredPromptCache(LRUPromptCache):
    """The server's prompt caches in memory, with those on storage behind them.

    Parameters
    ----------
    provider
        The server's ``ModelProvider``, which says what model is loaded.
    size
        How many prompt caches stay in memory.
    config
        LifeboatCache's configuration file, ``None`` for the usual resolution.
    """

    def __init__(self, provider: Any, size: int, config: Path | None = None) -> None:
        super().__init__(size)
        self._provider = provider
        self._config = config
        self._key: Any = None
        self._stored: PersistentPromptCache | None = None

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """The longest prefix in memory, or on storage if there is a longer one."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        found = self._fetch(model, tokens, len(tokens) - len(rest))
        return (cache, rest) if found is None else (found[0], tokens[found[1] :])

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **kwargs: Any
    ) -> None:
        """Keep a prompt cache in memory and on storage."""
        super().insert_cache(model, tokens, prompt_cache, **kwargs)
        self._insert(model, tokens, prompt_cache)

    @guarded(_NOTHING)
    def _fetch(self, model: Any, tokens: list[int], held: int) -> tuple[list[Any], int] | None:
        stored = self._of(model)
        if stored is None:
            return None
        return stored.fetch_beyond(tokens, held, None, self._quantization())

    @guarded(None)
    def _insert(self, model: Any, tokens: list[int], prompt_cache: list[Any]) -> None:
        stored, how = self._of(model), self._quantization()
        if stored is None:
            return
        if how is None:
            stored.store(tokens, prompt_cache)
        else:
            stored.store(
                tokens,
                prompt_cache,
                kv_bits=how.bits,
                kv_group_size=how.group_size,
                quantized_kv_start=how.start,
            )

    def _quantization(self) -> Quantization | None:
        given = self._provider.cli_args
        if given.kv_bits is None:
            return None
        return Quantization(given.kv_bits, given.kv_group_size, given.quantized_kv_start)

    def _of(self, model: Any) -> PersistentPromptCache | None:
        """What is stored of the model that is loaded, if it is the one that is meant."""
        provider = self._provider
        if model != provider.model_key or provider.model is None:
            return None
        if model != self._key:
            self._leave()
            self._key = model
            if provider.is_distributed:
                _log.error(
                    "LifeboatCache stands down: a model that is spread over several machines is "
                    "not supported; start the server without --pipeline and mlx.launch"
                )
            else:
                self._stored = PersistentPromptCache(
                    provider.model,
                    draft_model=provider.draft_model,
                    name=Path(str(model[0])).name,
                    config=self._config,
                )
        return self._stored

    def close(self) -> None:
        """Finish what is on its way to storage; nothing is stored afterwards."""
        stored, self._stored = self._stored, None
        if stored is not None:
            stored.close()

    def _leave(self) -> None:
        """Close the store of another model, which may have to wait."""
        old, self._stored = self._stored, None
        if old is not None:
            threading.Thread(target=old.close, name="lifeboat-retire", daemon=True).start()


def main(arguments: Sequence[str], config: Path | None = None) -> int:
    """Run the server until it is told to end.

    Parameters
    ----------
    arguments
        Those of ``mlx_lm.server``.
    config
        LifeboatCache's configuration file, ``None`` for the usual resolution.

    Raises
    ------
    ConfigError
        If the model that the arguments name cannot be loaded, or the port is taken. mlx-lm's own
        server would go on without ever answering.
    """
    provider_class, generator_class = mlx_server.ModelProvider, mlx_server.ResponseGenerator
    providers: list[Any] = []
    generators: list[Any] = []
    failures: list[Exception] = []

    class Provider(provider_class):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            providers.append(self)

        def load_default(self) -> None:
            try:
                super().load_default()
            except Exception as exc:
                failures.append(exc)
                raise

    def prompt_cache(size: int = 10) -> StoredPromptCache:
        return StoredPromptCache(providers[-1], size, config)

    class Generator(generator_class):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            generators.append(self)
            super().__init__(*args, **kwargs)

        def _run_generate(self) -> None:
            super()._run_generate()
            if failures:
                os.kill(os.getpid(), signal.SIGTERM)

        def stop_and_join(self) -> None:
            # Before its thread ends: with MLX's CPU backend that ends the process.
            self.prompt_cache.close()
            super().stop_and_join()

    def end(_number: int, _frame: object) -> None:
        # As Ctrl-C: what is on its way to storage arrives.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    before = sys.argv
    sys.argv = ["lifeboat-cache mlx-server", *arguments]
    mlx_server.ModelProvider, mlx_server.ResponseGenerator = Provider, Generator
    mlx_server.LRUPromptCache = prompt_cache
    try:
        mlx_server.main()
    except KeyboardInterrupt:  # it came before the server listened
        if not failures:
            raise
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        given = providers[-1].cli_args
        raise ConfigError(
            f"port {given.port} of {given.host} is taken: stop what listens there, or give "
            "another --port"
        ) from exc
    finally:
        for generator in generators:
            generator._stop = True  # Python does not end before its thread
        sys.argv = before
        mlx_server.ModelProvider, mlx_server.ResponseGenerator = provider_class, generator_class
        mlx_server.LRUPromptCache = LRUPromptCache
    if failures:
        given = providers[-1].cli_args
        named = filter(None, (given.model, given.adapter_path, given.draft_model))
        raise ConfigError(
            f"mlx-lm cannot load {' with '.join(named)} ({' '.join(str(failures[0]).split())}): "
            "correct --model, --adapter-path or --draft-model"
        )
    return 0

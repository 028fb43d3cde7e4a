"""``PersistentPromptCache``: the longest stored prefix of a prompt as a ready prompt cache."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache

from lifeboat_cache import kernels
from lifeboat_cache.config import load_config
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.engines.guard import guarded
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.interface import Store, open_block_store, require_interface
from lifeboat_cache.mlx import chain, kinds
from lifeboat_cache.mlx.identity import find_namespace
from lifeboat_cache.mlx.keep import Keeper
from lifeboat_cache.mlx.published import Published
from lifeboat_cache.mlx.restore import Restored, Restorer
from lifeboat_cache.mlx.spaces import Quantization, expected
from lifeboat_cache.mlx.versions import describe_tested, is_tested
from lifeboat_cache.registry import attach

__all__ = ["BLOCK_TOKENS", "PersistentPromptCache"]

_log = logging.getLogger("lifeboat_cache")

#: Tokens of a block. Of a model with 128 KiB of KV per token that is 8 MiB.
BLOCK_TOKENS = 64

#: How long a load may take, in seconds, before a prompt is computed instead.
_LOAD_S = 60.0

#: How long the end of the process waits for what is on its way to storage, in seconds.
_CLOSE_S = 30.0

_NOTHING: Restored | None = None

#: When mlx-lm begins to quantize, unless it is told otherwise.
_QUANTIZED_FROM = 5000


class PersistentPromptCache:
    """Keeps prompt caches of one model on storage, and finds them again.

    A fault never reaches the caller: storage that fails means a prompt that is computed.

    Parameters
    ----------
    model
        From ``mlx_lm.load``. Its parameters are part of the identity: who changes them
        afterwards needs a new object.
    tokenizer
        From ``mlx_lm.load``; only :meth:`generate` and :meth:`stream_generate` need it.
    draft_model
        If generation uses one.
    name
        What to call the model in ``lifeboat-cache status``.
    config
        A configuration file; without it the usual resolution applies.
    wait_s
        How long the first :meth:`fetch` waits for the store to know what is there, in seconds.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        draft_model: Any = None,
        name: str = "",
        config: str | Path | None = None,
        wait_s: float = 5.0,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._draft = draft_model
        self._wait_s = wait_s
        self._store: Store | None = None
        self._reason = ""
        self._published = Published(name or _name_of(model))
        try:
            self._begin(name or _name_of(model), config)
        except LifeboatError as exc:
            self._stand_down(str(exc))
        except Exception:
            _log.exception("LifeboatCache stands down: it could not start; please report this")
            self._stand_down("it could not start: see the log, and report this")

    def _begin(self, name: str, config: str | Path | None) -> None:
        import mlx_lm

        require_interface(1, 4, "lifeboatcache-mlx")
        if not is_tested(str(mlx_lm.__version__)):
            _log.warning(
                "LifeboatCache was tested with mlx-lm %s, this is %s: if something is wrong, use "
                "a tested version or a newer lifeboatcache-mlx",
                describe_tested(),
                mlx_lm.__version__,
            )
        loaded = load_config(Path(config) if config is not None else None)
        salt = loaded.config.security.namespace_salt.get_secret_value()
        namespace = find_namespace(self._model, self._draft, salt, BLOCK_TOKENS, name)
        store = open_block_store(LiveConfig(loaded), namespace, native=True, page_cache=True)
        attach(store, self._published.facts)
        self._store = store
        self._restorer = Restorer(store, BLOCK_TOKENS, _LOAD_S)
        self._keeper = Keeper(store, BLOCK_TOKENS)
        _open.add(self)

    def _stand_down(self, reason: str) -> None:
        self._reason = reason
        _log.error("LifeboatCache stands down: %s", reason)

    @property
    def reason(self) -> str:
        """Why nothing is stored or restored; empty if it is."""
        return self._reason or ("" if self._store is None else self._store.reason)

    # Prefixes ---------------------------------------------------------------

    def fetch(
        self,
        tokens: Sequence[int],
        *,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = _QUANTIZED_FROM,
    ) -> tuple[list[Any], int]:
        """A prompt cache that holds the longest stored prefix of a prompt.

        Parameters
        ----------
        tokens
            The whole prompt. Its last token is always left to be computed.
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start
            What generation will be told.

        Returns
        -------
        list
            A prompt cache for ``mlx_lm``, new if nothing is stored.
        int
            How many of the first tokens it holds: give the others to ``mlx_lm``.
        """
        how = _quantization(kv_bits, kv_group_size, quantized_kv_start)
        restored = self.fetch_beyond(tokens, 0, max_kv_size, how)
        return (self._fresh(max_kv_size), 0) if restored is None else restored

    def fetch_beyond(
        self,
        tokens: Sequence[int],
        held: int,
        max_kv_size: int | None,
        quantization: Quantization | None,
    ) -> tuple[list[Any], int] | None:
        """As :meth:`fetch`, if more than ``held`` tokens are stored; otherwise ``None``."""
        restored = self._restore(tokens, held, max_kv_size, quantization)
        more = 0 if restored is None else restored.tokens - held
        self._published.asked(len(tokens), held, more)
        if restored is None:
            return None
        return restored.cache, restored.tokens

    def store(
        self,
        tokens: Sequence[int],
        prompt_cache: Sequence[Any],
        *,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = _QUANTIZED_FROM,
    ) -> None:
        """Keep a prompt cache, in the background; it may be used and updated meanwhile.

        Parameters
        ----------
        tokens
            What it holds, from the first token on.
        prompt_cache
            From :meth:`fetch` or ``mlx_lm``, of one sequence.
        kv_bits, kv_group_size, quantized_kv_start
            What generation was told.
        """
        self._keep(tokens, prompt_cache, _quantization(kv_bits, kv_group_size, quantized_kv_start))

    @guarded(_NOTHING)
    def _restore(
        self,
        tokens: Sequence[int],
        held: int,
        max_kv_size: int | None,
        how: Quantization | None,
    ) -> Restored | None:
        known = chain.as_tokens(tokens)
        if self._store is None or known is None or known.shape[0] - 1 <= held:
            return None
        self._store.wait_recovered(self._wait_s)
        fresh = self._fresh(max_kv_size)
        leaves = kinds.leaves_of(fresh)
        found = self._restorer.restore(known[:-1], expected(leaves, how), leaves, beyond=held)
        return found and Restored(kinds.regroup(fresh, found.cache), found.tokens)

    @guarded(None)
    def _keep(
        self, tokens: Sequence[int], prompt_cache: Sequence[Any], how: Quantization | None
    ) -> None:
        known = chain.as_tokens(tokens)
        if self._store is None or known is None or not known.shape[0]:
            return
        kept = self._keeper.keep(known, kinds.leaves_of(prompt_cache), how)
        if kept is not None:
            self._restorer.remember(*kept)

    def _fresh(self, max_kv_size: int | None) -> list[Any]:
        cache = list(make_prompt_cache(self._model, max_kv_size=max_kv_size))
        return cache if self._draft is None else cache + make_prompt_cache(self._draft)

    # Generation -------------------------------------------------------------

    def stream_generate(
        self, prompt: str | Sequence[int] | mx.array, **kwargs: Any
    ) -> Generator[GenerationResponse, None, None]:
        """``mlx_lm.stream_generate`` that computes only what is not stored.

        Parameters
        ----------
        prompt
            Text or tokens.
        kwargs
            As for ``mlx_lm.stream_generate``, without ``prompt_cache`` and ``draft_model``.
        """
        tokens = self._tokens(prompt)
        settings = {
            name: kwargs[name]
            for name in ("kv_bits", "kv_group_size", "quantized_kv_start")
            if name in kwargs
        }
        cache, held = self.fetch(tokens, max_kv_size=kwargs.get("max_kv_size"), **settings)
        told = kwargs.pop("prompt_progress_callback", None)
        if self._draft is not None:
            kwargs["draft_model"] = self._draft

        def progress(done: int, total: int) -> None:
            # Here a state is that of a known number of tokens, which it is not again later.
            if done and done < total:
                self.store(tokens[: held + done], cache, **settings)
            if told is not None:
                told(done, total)

        first, began = len(tokens), time.monotonic()
        try:
            for response in mlx_stream_generate(
                self._model,
                self._tokenizer,
                tokens[held:],
                prompt_cache=cache,
                prompt_progress_callback=progress,
                **kwargs,
            ):
                if len(tokens) == first:
                    self._published.computed(first - held, began, time.monotonic())
                tokens.append(int(response.token))
                yield response
        finally:
            self.store(tokens, cache, **settings)

    def generate(self, prompt: str | Sequence[int] | mx.array, **kwargs: Any) -> str:
        """``mlx_lm.generate`` that computes only what is not stored: returns the text."""
        return "".join(part.text for part in self.stream_generate(prompt, **kwargs))

    def _tokens(self, prompt: str | Sequence[int] | mx.array) -> list[int]:
        """Tokens of a prompt, as ``mlx_lm.stream_generate`` makes them."""
        if self._tokenizer is None:
            raise ValueError(
                "there is no tokenizer: give PersistentPromptCache the one of mlx_lm.load"
            )
        if isinstance(prompt, mx.array):
            return [int(token) for token in prompt.tolist()]
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        begin = self._tokenizer.bos_token
        special = begin is None or not prompt.startswith(begin)
        return list(self._tokenizer.encode(prompt, add_special_tokens=special))

    # The end ----------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything given to :meth:`store` is on storage, or was dropped.

        Returns
        -------
        bool
            Whether it is.
        """
        return True if self._store is None else self._store.drain(timeout)

    def close(self, timeout: float = _CLOSE_S) -> None:
        """Finish what is on its way to storage. Happens by itself at the end of Python."""
        store, self._store = self._store, None
        self._reason = self._reason or "it is closed"
        if store is not None:
            store.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _quantization(bits: int | None, group_size: int, start: int) -> Quantization | None:
    return None if bits is None else Quantization(int(bits), int(group_size), int(start))


def _name_of(model: Any) -> str:
    return str(getattr(model, "model_type", "") or type(model).__name__)


_open: weakref.WeakSet[PersistentPromptCache] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for cache in list(_open):
        cache.close()


# It takes a second, in which a script loads its model. Python waits for it before it ends.
with contextlib.suppress(RuntimeError):  # no threads are left: a store loads them later
    threading.Thread(target=kernels.load, name="lifeboat-kernels").start()

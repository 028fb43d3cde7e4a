"""The codecs of one store: what is chosen, what was done, and how exact it was."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lifeboat_cache import kernels
from lifeboat_cache.codecs.counts import CodecCounts
from lifeboat_cache.codecs.guard import Guard
from lifeboat_cache.codecs.ladder import Choice, Ladder, Mode, Rung, rung_of
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import CodecName, codec_name
from lifeboat_cache.codecs.rates import Rates, decoding_cores
from lifeboat_cache.codecs.speed import read_codec_rates, read_target_rate
from lifeboat_cache.config.live import LiveConfig
from lifeboat_cache.config.schema import Compression, Config, Rungs
from lifeboat_cache.targets.base import Target

__all__ = ["CodecPolicy"]

_log = logging.getLogger("lifeboat_cache")


@dataclass(frozen=True)
class _Epoch:
    """Choices as long as nothing changes that they depend on."""

    ladder: Ladder
    choices: dict[int, tuple[KVLayout, Choice]]


class CodecPolicy:
    """Chooses codecs for the blocks of one store.

    Jobs ask :meth:`choose`, which never waits. :meth:`look` takes in what has changed: to be
    called every few seconds on a thread that may wait for files.

    Parameters
    ----------
    config
        What the process runs with. A :class:`LiveConfig` is followed while it runs.
    native
        Whether the store is that of an engine's native mode, which is exact unless
        ``engine.native_codec`` says otherwise.
    home
        The home directory, where measured speeds are found; ``None`` = nothing is measured.

    Attributes
    ----------
    counts
        What has gone through which codec.
    guard
        Compares blocks with what is stored of them.
    exact
        Whether only blocks may be served that are stored without loss.
    """

    def __init__(
        self, config: Config | LiveConfig, *, native: bool = False, home: Path | None = None
    ) -> None:
        self._live = config if isinstance(config, LiveConfig) else None
        self._fixed = config if isinstance(config, Config) else None
        self._native = native
        self._needs_kernels = True
        self._cached = False
        loaded = config.config if isinstance(config, LiveConfig) else config
        self.exact = native and loaded.engine.native_codec == "exact"
        self._home = home
        self._target: Target | None = None
        self.counts = CodecCounts()
        self.guard = Guard()
        self._epoch = _Epoch(self._ladder(Rates(cores=self._cores())), {})

    @classmethod
    def fixed(cls, name: CodecName) -> CodecPolicy:
        """One that stores all KV with one codec, with kernels or without, and watches nothing."""
        policy = cls.__new__(cls)
        policy._live, policy._fixed, policy._native = None, None, False
        policy.exact = policy._needs_kernels = policy._cached = False
        policy._home = policy._target = None
        policy.counts = CodecCounts()
        policy.guard = Guard(active=False)
        settings = Compression.model_construct(
            ladder=Rungs.model_construct(local=name), lossless_8bit="remote"
        )
        policy._epoch = _Epoch(Ladder(settings), {})
        return policy

    # For jobs ---------------------------------------------------------------

    def choose(self, layout: KVLayout) -> Choice:
        """How blocks of a layout are stored from now on."""
        epoch = self._epoch
        if self._needs_kernels and epoch.ladder.compiled != kernels.ready():
            self._renew(replace(epoch.ladder, compiled=kernels.ready()))
            epoch = self._epoch
        known = epoch.choices.get(layout.tag)
        if known is not None:
            return known[1]
        choice = epoch.ladder.choose(layout)
        epoch.choices[layout.tag] = (layout, choice)
        return choice

    # For the store's other threads ------------------------------------------

    def opened(self, target: Target) -> None:
        """Say where blocks go. Never waits."""
        self._target = target

    def expect_cached(self) -> None:
        """Say that most of what is read lies in the page cache."""
        self._cached = True

    def rung_of(self, target: Target) -> Rung:
        """The rung of a target."""
        return target.rung or rung_of(target.type)

    def look(self) -> None:
        """Take in a changed configuration, measured speeds and verdicts of the guard."""
        if self._live is not None:
            self._live.look()
        if self._live is None and self._fixed is None:
            return
        self._renew(self._ladder(self._rates()))

    def follow(self, config: Config) -> None:
        """Use another configuration from the next :meth:`look` on; not beside a live one."""
        self._fixed = config

    def values(self) -> dict[str, int]:
        """What has gone through which codec; see :meth:`CodecCounts.values`."""
        return self.counts.values()

    def close(self) -> None:
        """End what goes on in the background. Idempotent."""
        self.guard.close()

    def facts(self) -> dict[str, Any]:
        """What is published of it."""
        epoch = self._epoch
        ladder = epoch.ladder
        return {
            "mode": ladder.mode,
            "rung": ladder.rung,
            "choices": [
                {
                    "layout": f"{layout.tag:016x}",
                    "codec": codec_name(choice.codec),
                    "reason": choice.reason,
                }
                for layout, choice in list(epoch.choices.values())
            ],
            "guard": self.guard.facts(),
        }

    def config_facts(self) -> dict[str, Any]:
        """What is published of the configuration."""
        live = self._live
        if live is None:
            return {}
        return {"problem": live.problem, "restart": list(live.restart)}

    # What it depends on -----------------------------------------------------

    def _config(self) -> Config:
        if self._live is not None:
            return self._live.config
        if self._fixed is None:
            raise RuntimeError("a policy with one codec has no configuration")
        return self._fixed

    def _cores(self) -> int:
        return decoding_cores(self._config().engine.io_workers)

    def _ladder(self, rates: Rates) -> Ladder:
        config = self._config()
        mode: Mode = config.engine.native_codec if self._native else "ladder"
        rung: Rung = "local" if self._target is None else self.rung_of(self._target)
        return Ladder(
            config.compression, rung, mode, rates, self.guard.ruled_out(), kernels.ready()
        )

    def _rates(self) -> Rates:
        rates = Rates(cores=self._cores(), cached=self._cached)
        home, target = self._home, self._target
        if home is None:
            return rates
        rates = replace(rates, codecs=read_codec_rates(home))
        if target is not None:
            read = read_target_rate(home, target.location)
            if read is not None:
                rates = replace(rates, read=read, read_measured=True)
        return rates

    def _renew(self, ladder: Ladder) -> None:
        """Choose anew if anything is different; say what that changes."""
        old = self._epoch
        if ladder == old.ladder:
            return
        fresh = {
            tag: (layout, ladder.choose(layout)) for tag, (layout, _) in list(old.choices.items())
        }
        self._epoch = _Epoch(ladder, fresh)
        for tag, (_, choice) in fresh.items():
            before = old.choices[tag][1]
            if choice.codec != before.codec:
                _log.info(
                    "LifeboatCache: blocks of layout %016x become %s from now on, not %s: %s",
                    tag,
                    codec_name(choice.codec),
                    codec_name(before.codec),
                    choice.reason,
                )

"""Which codec a block is stored with, and why.

Pure: settings, measured speeds and verdicts of the accuracy guard go in, a choice comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import (
    AUTO,
    DENSE,
    FP8,
    LBQ4,
    LOSSLESS,
    RAW,
    codec_name,
    codec_number,
    more_precise,
)
from lifeboat_cache.codecs.rates import Rates
from lifeboat_cache.config.schema import Compression

__all__ = [
    "AUTO_CODECS",
    "EXACT_CODECS",
    "SPEED",
    "Choice",
    "Kind",
    "Ladder",
    "Mode",
    "Rung",
    "rung_of",
]

#: A kind of target, by how fast it is. Another one is one name here, one key of
#: :class:`~lifeboat_cache.config.schema.Rungs`, and a place in :data:`SPEED`.
Rung = Literal["local", "shared", "archive"]

#: The places of rungs, the fastest first.
SPEED: dict[Rung, int] = {"local": 0, "shared": 1, "archive": 2}

#: ``exact``: as vLLM's native mode by default. ``ladder``: as the configuration says.
Mode = Literal["exact", "ladder"]

#: What a block holds, as far as that decides how it is stored: KV of 16 bits or more, 8-bit
#: KV, recurrent state, or what nothing is known of.
Kind = Literal["kv", "kv8", "state", "unknown"]

_RUNGS: dict[str, Rung] = {
    "filesystem": "local",
    "nfs": "shared",
    "ontap": "shared",
    "s3": "archive",
}

#: Codecs among which the fastest is chosen where every bit must be kept.
EXACT_CODECS = (RAW, LOSSLESS, DENSE)

#: Codecs among which ``auto`` chooses; less precise ones must be asked for.
AUTO_CODECS = (RAW, LOSSLESS, DENSE, FP8, LBQ4)

_KV = ("key", "value", "latent")

#: A codec that is faster by less is not worth its loss, or the engine's CPU time.
_MARGIN = 0.9

#: Of exact codecs that are about as fast: ``dense`` takes several times the CPU time of
#: ``lossless``, and ``raw`` takes more space.
_PREFERRED = (LOSSLESS, DENSE, RAW)


def rung_of(target_type: str) -> Rung:
    """The rung of a target of a type, as in ``storage.tiers[].type``."""
    return _RUNGS[target_type]


@dataclass(frozen=True)
class Choice:
    """How blocks of one layout are stored.

    Attributes
    ----------
    codec
        Number of the codec.
    reason
        Why, for people.
    """

    codec: int
    reason: str


@dataclass(frozen=True)
class Ladder:
    """Chooses codecs.

    Attributes
    ----------
    settings
        The section ``compression`` of the configuration.
    rung
        That of the target.
    mode
        Whether blocks must come back exactly.
    rates
        What restores cost, measured or assumed.
    ruled_out
        By layout tag and codec: why the accuracy guard does not want it.
    compiled
        Whether there are compiled kernels. What serves without them is slower than computing
        KV anew, so nothing is stored in a way that needs them.
    """

    settings: Compression
    rung: Rung = "local"
    mode: Mode = "ladder"
    rates: Rates = field(default_factory=Rates)
    ruled_out: Mapping[tuple[int, int], str] = field(default_factory=dict)
    compiled: bool = True

    def choose(self, layout: KVLayout) -> Choice:
        """How to store blocks of a layout."""
        kind = kind_of(layout)
        if kind == "unknown":
            return Choice(RAW, "nothing is known of what these blocks hold")
        if not self.compiled:
            return Choice(RAW, "there are no compiled kernels (yet)")
        if kind == "kv8":
            return self._checked(self._eight_bits(), layout)
        if kind == "state":
            return self._fastest(EXACT_CODECS, layout, "recurrent state is kept exactly")
        if self.mode == "exact":
            return self._fastest(EXACT_CODECS, layout, "engine.native_codec is exact")
        name = getattr(self.settings.ladder, self.rung)
        key = f"compression.ladder.{self.rung}"
        if name == AUTO:
            choice = self._auto(layout, f"{key} is auto")
        else:
            choice = Choice(codec_number(name), f"{key} is {name}")
        return self._checked(choice, layout)

    def _eight_bits(self) -> Choice:
        setting = self.settings.lossless_8bit
        why = f"8-bit KV, compression.lossless_8bit is {setting}"
        if setting == "on" or (setting == "remote" and self.rung != "local"):
            return Choice(LOSSLESS, why)
        return Choice(RAW, f"{why} and this is the rung {self.rung}" if setting != "off" else why)

    def _auto(self, layout: KVLayout, why: str) -> Choice:
        if not self.rates.measured:
            return Choice(FP8, f"{why}; nothing has been measured yet, so this is the default")
        return self._fastest(AUTO_CODECS, layout, why)

    def _fastest(self, codecs: Sequence[int], layout: KVLayout, why: str) -> Choice:
        """The most precise of those that are about as fast as the fastest."""
        rates = self.rates
        if not rates.measured:
            return Choice(RAW, f"{why}; what decoding costs has not been measured yet")
        dtype = _dtype_of(layout)
        codecs = [c for c in codecs if c == RAW or (layout.tag, c) not in self.ruled_out]
        speeds = {codec: rates.restore(codec, dtype) for codec in codecs}
        best = max(speeds.values())
        close = [codec for codec in codecs if speeds[codec] >= _MARGIN * best]
        codec = next((exact for exact in _PREFERRED if exact in close), min(close))
        others = sorted((c for c in codecs if c != codec), key=lambda c: -speeds[c])
        beside = ", ".join(f"{codec_name(c)} {_gb(speeds[c])}" for c in others)
        return Choice(
            codec,
            f"{why}: {codec_name(codec)} restores {_gb(speeds[codec])} of KV per second "
            f"({rates.explain(codec, dtype)}), {beside}",
        )

    def _checked(self, choice: Choice, layout: KVLayout) -> Choice:
        """Step up the ladder where the accuracy guard says so."""
        codec, said = choice.codec, choice.reason
        while (layout.tag, codec) in self.ruled_out:
            why = self.ruled_out[layout.tag, codec]
            codec = more_precise(codec)
            said = f"{said}, but {why}: {codec_name(codec)} instead"
            if codec == RAW:
                break
        return Choice(codec, said)


def kind_of(layout: KVLayout) -> Kind:
    """What a block holds."""
    known = [tensor for tensor in layout.tensors if tensor.dtype != "bytes"]
    widths = [tensor.item_bytes for tensor in known if tensor.role in _KV]
    if widths:
        return "kv" if max(widths) > 1 else "kv8"
    return "state" if any(tensor.role == "state" for tensor in known) else "unknown"


def _dtype_of(layout: KVLayout) -> str:
    """The dtype that most of the bytes have."""
    sizes: dict[str, int] = {}
    for tensor in layout.tensors:
        if tensor.dtype != "bytes":
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _gb(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB"

"""What restoring KV costs: the target's bandwidth, and what decoding takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lifeboat_cache.codecs.names import RAW
from lifeboat_cache.system import usable_cpus

__all__ = ["DEFAULT_READ", "CodecRate", "Rates", "decoding_cores"]

#: Bytes per second that a target is taken to deliver until that is measured: a plain NVMe
#: disk, or the better of the virtual ones.
DEFAULT_READ = 2e9


@dataclass(frozen=True)
class CodecRate:
    """One codec for KV of one dtype.

    Attributes
    ----------
    decode
        Bytes of KV that one core restores per second from memory, checksum included.
    ratio
        Bytes of KV per stored byte.
    """

    decode: float
    ratio: float


def decoding_cores(workers: int) -> int:
    """How many cores decode at the same time: all but one, which stays the engine's."""
    return max(1, min(workers, usable_cpus() - 1))


@dataclass(frozen=True)
class Rates:
    """What is known of the speed of restores.

    Attributes
    ----------
    codecs
        By dtype and codec; empty until measured.
    read
        Bytes per second that the target delivers.
    read_measured
        Whether that was measured; otherwise it is :data:`DEFAULT_READ`.
    cores
        Cores that decode.
    cached
        Whether what is read lies in the page cache: then nothing but the cores limits it.
    """

    codecs: Mapping[tuple[str, int], CodecRate] = field(default_factory=dict)
    read: float = DEFAULT_READ
    read_measured: bool = False
    cores: int = 1
    cached: bool = False

    @property
    def measured(self) -> bool:
        """Whether the codecs have been measured."""
        return bool(self.codecs)

    def of(self, codec: int, dtype: str) -> CodecRate:
        """One codec's rate; for a dtype or a codec that was not measured, that of ``raw``."""
        found = self.codecs.get((dtype, codec)) or self.codecs.get((dtype, RAW))
        return found or self.codecs.get(("bfloat16", RAW)) or CodecRate(self.read, 1.0)

    def ratio(self, codec: int, dtype: str) -> float:
        """Bytes of KV per stored byte."""
        return self.of(codec, dtype).ratio

    def restore(self, codec: int, dtype: str) -> float:
        """Bytes of KV restored per second: reading and decoding go on at the same time."""
        rate = self.of(codec, dtype)
        decoded = self.cores * rate.decode
        return decoded if self.cached else min(self.read * rate.ratio, decoded)

    def explain(self, codec: int, dtype: str) -> str:
        """How :meth:`restore` comes about, for people."""
        rate = self.of(codec, dtype)
        known = "" if self.read_measured else " assumed"
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        if self.cached:
            return f"from the page cache; {cores} decode {self.cores * rate.decode / 1e9:.3g} GB/s"
        return (
            f"the target reads {self.read / 1e9:.3g} GB/s{known}, x {rate.ratio:.2f}; "
            f"{cores} decode {self.cores * rate.decode / 1e9:.3g} GB/s"
        )

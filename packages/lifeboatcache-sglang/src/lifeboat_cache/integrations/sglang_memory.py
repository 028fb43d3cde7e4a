"""How large a host pool of SGLang's hierarchical cache may be.

SGLang refuses to start when its host pools do not leave a reserve of the machine's
memory free. So what is asked for is what will certainly be there; where that is too
little, LifeboatCache does without a host pool and stands down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lifeboat_cache.integrations.sglang_settings import AUTO

__all__ = ["MINIMUM_BYTES", "RESERVE_BYTES", "HostPool", "size_host_pool"]

#: What SGLang 0.5.23 leaves free of the memory that is available.
RESERVE_BYTES = 10 << 30

#: Below this a pool holds so few pages that restoring and storing wait for each other.
MINIMUM_BYTES = 256 << 20

_SHARE = 0.1
_DEFAULT_BYTES = (2_000_000_000, 16_000_000_000)

#: What the processes of one rank take between the launch and the building of the pool.
_RANK_BYTES = 3 << 30


@dataclass(frozen=True)
class HostPool:
    """The decision about the host pool.

    Attributes
    ----------
    bytes
        Size for one rank; 0 = too little memory.
    reason
        What decided it, for the log.
    """

    bytes: int
    reason: str

    @property
    def gigabytes(self) -> float:
        """The size as SGLang takes it, rounded down to 10 MB."""
        return self.bytes // 10_000_000 / 100


def size_host_pool(
    wanted: int | str | None,
    ranks: int,
    limits: Mapping[str, int],
    *,
    device_bytes: int | None = None,
    reserve: int = RESERVE_BYTES,
) -> HostPool:
    """Decide on the size of the pool of one rank.

    Parameters
    ----------
    wanted
        ``Settings.host_bytes``.
    ranks
        Ranks that this launch starts on this host.
    limits
        Bytes available, by what limits them.
    device_bytes
        Memory of one accelerator, for :data:`~.sglang_settings.AUTO`; ``None`` if unknown.
    reserve
        Bytes that SGLang leaves free.
    """
    ranks = max(1, ranks)
    if not limits:
        return HostPool(0, "the available memory is unknown")
    limit, available = min(limits.items(), key=lambda item: item[1])
    if isinstance(wanted, int):
        size, reason = wanted, "as configured"
    elif wanted == AUTO and device_bytes:
        size, reason = 2 * device_bytes, "twice the accelerator's memory"
        half = max(0, available - reserve) // 2 // ranks
        if half < size:
            size, reason = half, "half of the memory left after the reserve"
    else:
        least, most = _DEFAULT_BYTES
        within = f"within {least // 10**9} to {most // 10**9} GB"
        share = int(available * _SHARE)
        size, reason = (
            min(max(share, least), most),
            f"{_SHARE:.0%} of the available memory, {within}",
        )
    fits = (available - reserve) // ranks - _RANK_BYTES
    if fits < size:
        size, reason = max(0, fits), f"what {limit} of {available / 1e9:.1f} GB leaves"
    return HostPool(size if size >= MINIMUM_BYTES else 0, reason)

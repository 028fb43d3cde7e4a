"""What has gone through which codec."""

from __future__ import annotations

import threading
from collections import Counter

from lifeboat_cache.codecs.names import CODEC_NAMES, codec_name

__all__ = ["CodecCounts"]


#: Their places in what is shown.
_ORDER: dict[str, int] = {name: number for number, name in enumerate(CODEC_NAMES)}


class CodecCounts:
    """Blocks and bytes by codec since the store was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def stored(self, codec: int, blocks: int, raw: int, kept: int) -> None:
        """Account for blocks that were written.

        Parameters
        ----------
        codec
            Number of their codec.
        blocks
            How many.
        raw, kept
            Bytes of their payloads, and of what is stored.
        """
        self._add("encoded", codec, blocks, raw, kept)

    def loaded(self, codec: int, blocks: int, raw: int, kept: int) -> None:
        """Account for blocks that were restored; see :meth:`stored`."""
        self._add("decoded", codec, blocks, raw, kept)

    def _add(self, verb: str, codec: int, blocks: int, raw: int, kept: int) -> None:
        if not blocks:
            return
        name = codec_name(codec)
        with self._lock:
            self._values[f"{verb}_blocks:{name}"] += blocks
            self._values[f"{verb}_raw_bytes:{name}"] += raw
            self._values[f"{verb}_bytes:{name}"] += kept

    def values(self) -> dict[str, int]:
        """Totals by name: ``encoded_`` or ``decoded_``, what, and ``:`` with the codec.

        ``encoded_blocks:fp8``, ``encoded_raw_bytes:fp8``, ``encoded_bytes:fp8``, …; in the
        order of the codecs, only those that were used.
        """
        with self._lock:
            values = dict(self._values)
        return dict(
            sorted(values.items(), key=lambda item: _ORDER.get(item[0].partition(":")[2], 99))
        )

"""What has gone through which codec."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.names import CODEC_NAMES, codec_name

__all__ = ["CodecCounts"]


_Numbers = npt.NDArray[np.uint16]
_Sizes = npt.NDArray[np.int64]

#: Their places in what is shown.
_ORDER: dict[str, int] = {name: number for number, name in enumerate(CODEC_NAMES)}


class CodecCounts:
    """Blocks and bytes by codec since the store was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def stored(
        self,
        codecs: npt.NDArray[np.uint16],
        raw: npt.NDArray[np.int64],
        kept: npt.NDArray[np.int64],
    ) -> None:
        """Account for blocks that were written.

        Parameters
        ----------
        codecs
            uint16 ``(n,)``: number of each block's codec.
        raw, kept
            int64 ``(n,)``: bytes of its payload, and of what is stored.
        """
        self._add("encoded", codecs, raw, kept)

    def loaded(
        self,
        codecs: npt.NDArray[np.uint16],
        raw: npt.NDArray[np.int64],
        kept: npt.NDArray[np.int64],
    ) -> None:
        """Account for blocks that were restored; see :meth:`stored`."""
        self._add("decoded", codecs, raw, kept)

    def _add(self, verb: str, codecs: _Numbers, raw: _Sizes, kept: _Sizes) -> None:
        more: dict[str, int] = {}
        for number in np.unique(codecs).tolist():
            mine = codecs == number
            name = codec_name(number)
            more[f"{verb}_blocks:{name}"] = int(mine.sum())
            more[f"{verb}_raw_bytes:{name}"] = int(raw[mine].sum())
            more[f"{verb}_bytes:{name}"] = int(kept[mine].sum())
        with self._lock:
            self._values.update(more)

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

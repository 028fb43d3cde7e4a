"""Which blocks of a batch go through which coders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.names import CODECS, RAW
from lifeboat_cache.codecs.recipes import CodedLayout, coded_layout
from lifeboat_cache.kernels import io_layout as layout

__all__ = ["PAGE", "Coding", "Codings", "whole_pages"]

#: A stored block begins on such a boundary.
PAGE = 4096


def whole_pages(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sizes in bytes, rounded up to whole pages."""
    rounded: npt.NDArray[np.int64] = -(-sizes // PAGE) * PAGE
    return rounded


@dataclass(frozen=True, eq=False)
class Coding:
    """What the blocks of a task go through.

    Attributes
    ----------
    coded
        Their layout and codec.
    which, within
        In which piece of a block each tensor lies, and where it begins there (int64
        ``(n_tensors,)``); ``None`` if the pieces differ or cut a tensor: then the blocks are
        put together first, in Python.
    """

    coded: CodedLayout
    which: npt.NDArray[np.int64] | None
    within: npt.NDArray[np.int64] | None

    @property
    def native(self) -> bool:
        """Whether the native I/O threads can do it: blocks have to fit into their buffers."""
        return self.which is not None and self.coded.most_bytes <= layout.SCRATCH_BYTES - PAGE


class Codings:
    """The layouts that a store has been told, and the codecs of their blocks."""

    def __init__(self) -> None:
        self._layouts: dict[int, KVLayout] = {}
        self._places: dict[tuple[int, int, bytes], Coding] = {}

    def describe(self, described: KVLayout) -> int:
        """Make a layout known; returns its tag."""
        tag = described.tag
        self._layouts[tag] = described
        return tag

    def layout(self, tag: int) -> KVLayout | None:
        """The layout with a tag, if it is known."""
        return self._layouts.get(tag)

    def known(
        self,
        codecs: npt.NDArray[np.uint16],
        tags: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Which blocks can be restored, given their codecs, layouts and own sizes."""
        known: npt.NDArray[np.bool_] = codecs == RAW
        if known.all():
            return known
        coded = np.isin(codecs, list(CODECS))
        for tag in set(tags[~known].tolist()):
            described = self._layouts.get(tag)
            if described is not None:
                known |= coded & (tags == np.uint64(tag)) & (sizes == described.nbytes)
        return known

    def coding(
        self, tag: int, codec: int, iov: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64]
    ) -> Coding | None:
        """The coders for blocks of one layout and codec; ``None`` if they are stored raw.

        Parameters
        ----------
        tag, codec
            Of all blocks.
        iov, starts
            Their pieces; see :func:`lifeboat_cache.store.io_task.gather_pieces`.
        """
        described = self._layouts.get(tag)
        if codec == RAW or described is None:
            return None
        count = starts.shape[0] - 1
        pieces = int(starts[1]) if count else 0
        lengths = iov[:, 1]
        alike = pieces * count == lengths.shape[0] and (
            count < 2 or bool((np.diff(starts) == pieces).all())
        )
        if alike and count > 1:
            table = lengths.reshape(count, pieces)
            alike = bool((table == table[0]).all())
        if not alike:
            return Coding(coded_layout(described, codec), None, None)
        name = (tag, codec, lengths[:pieces].tobytes())
        made = self._places.get(name)
        if made is None:
            coded = coded_layout(described, codec)
            places = coded.places(lengths[:pieces].astype(np.int64))
            made = Coding(coded, *places) if places is not None else Coding(coded, None, None)
            self._places[name] = made
        return made

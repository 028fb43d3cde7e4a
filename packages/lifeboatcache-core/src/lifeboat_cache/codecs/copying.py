"""The coder that stores a tensor as it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["Copying"]


class Copying:
    """Vectors as they are, in the order of tokens and heads."""

    number = columns.CODER_COPY

    def takes(self, tensor: TensorLayout) -> bool:
        """Every tensor."""
        del tensor
        return True

    def fixed_bytes(self, tensor: TensorLayout, bits: int) -> int | None:
        """The tensor's own bytes."""
        del bits
        return tensor.nbytes

    def most_bytes(self, tensor: TensorLayout, bits: int) -> int:
        """The tensor's own bytes."""
        del bits
        return tensor.nbytes

    def encode(
        self, tensor: TensorLayout, payload: npt.NDArray[np.uint8], bits: int
    ) -> npt.NDArray[np.uint8]:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        del bits
        return tensor.gather(payload).reshape(-1)

    def decode(
        self,
        tensor: TensorLayout,
        stored: npt.NDArray[np.uint8],
        payload: npt.NDArray[np.uint8],
        bits: int,
    ) -> int:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        del bits
        size = tensor.nbytes
        if stored.shape[0] < size:
            raise FormatError("a stored tensor is cut short: it is computed again")
        tensor.scatter(stored[:size], payload)
        return size

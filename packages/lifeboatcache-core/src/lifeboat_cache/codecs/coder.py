"""What a coder is: one way to store one tensor of a block."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout

__all__ = ["Coder"]


class Coder(Protocol):
    """The numpy twin of a coder's kernel; both give the same bytes.

    A stored tensor begins where the one before it ends, and says itself where it ends: its
    length follows from its layout, or stands at its beginning.
    """

    #: Number of the coder in kernels (``CODER_*``).
    number: int

    def takes(self, tensor: TensorLayout) -> bool:
        """Whether the coder can store such a tensor."""

    def fixed_bytes(self, tensor: TensorLayout, bits: int) -> int | None:
        """Bytes of every stored tensor of this layout; ``None`` if that depends on the values."""

    def most_bytes(self, tensor: TensorLayout, bits: int) -> int:
        """Bytes that no stored tensor of this layout exceeds."""

    def encode(
        self, tensor: TensorLayout, payload: npt.NDArray[np.uint8], bits: int
    ) -> npt.NDArray[np.uint8]:
        """Store a tensor of a payload (uint8, 1-D); returns its stored bytes (uint8, 1-D)."""

    def decode(
        self,
        tensor: TensorLayout,
        stored: npt.NDArray[np.uint8],
        payload: npt.NDArray[np.uint8],
        bits: int,
    ) -> int:
        """Restore a tensor into a payload; returns how many bytes of ``stored`` it took.

        Raises
        ------
        FormatError
            If these bytes are not a stored tensor of this layout.
        """

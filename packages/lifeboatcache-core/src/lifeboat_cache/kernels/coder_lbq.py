"""The coder LBQ: 2, 3 or 4 bits per element, after a rotation, along a trellis.

What is stored, and why, stands in ``codecs/lbq.py``, the numpy twin of these kernels.
"""

from __future__ import annotations

from lifeboat_cache.kernels.lbq_decode import decode
from lifeboat_cache.kernels.lbq_encode import encode

__all__ = ["decode", "encode"]

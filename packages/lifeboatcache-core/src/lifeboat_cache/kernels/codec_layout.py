"""Tables of 64-bit words that say how a tensor lies in a block; see ``codecs/layout.py``."""

from __future__ import annotations

# The words of a row: one tensor of a block, with the coder that it gets.
#: A coder's number (``CODER_*``).
ROW_CODER = 0
#: ``DTYPE_*``.
ROW_DTYPE = 1
#: ``ROLE_*``.
ROW_ROLE = 2
ROW_LAYER = 3
#: The vector of token ``o * INNER + i`` and head ``h`` begins ``o * OUTER_STRIDE +
#: i * INNER_STRIDE + h * HEAD_STRIDE`` bytes after the tensor's first byte, and its ``DIM``
#: elements follow each other.
ROW_OUTER = 4
ROW_OUTER_STRIDE = 5
ROW_INNER = 6
ROW_INNER_STRIDE = 7
ROW_HEADS = 8
ROW_HEAD_STRIDE = 9
ROW_DIM = 10
#: Bytes from the beginning of the block's payload to the tensor's first byte.
ROW_OFFSET = 11
#: Bits per element of coders that have a choice.
ROW_BITS = 12
ROW_WORDS = 16

DTYPE_BYTES = 0
DTYPE_BF16 = 1
DTYPE_FP16 = 2
DTYPE_FP32 = 3
DTYPE_E4M3 = 4
DTYPE_E5M2 = 5

ROLE_OPAQUE = 0
ROLE_KEY = 1
ROLE_VALUE = 2
#: Recurrent state: always exact.
ROLE_STATE = 3
#: Keys and values in one, as in multi-head latent attention.
ROLE_LATENT = 4

#: Vectors as they are, in the order of tokens and heads.
CODER_COPY = 0
CODER_LOSSLESS = 1
CODER_DENSE = 2
CODER_FP8 = 3
CODER_LBQ = 4

#: Bytes of a thread's working memory for coders, aligned to 64.
SCRATCH_BYTES = 4 << 20

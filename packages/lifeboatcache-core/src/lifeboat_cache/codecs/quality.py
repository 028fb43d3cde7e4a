"""How far KV that a codec gives back is from what was stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout

__all__ = ["attention_shift", "compare", "output_error", "relative_error", "to_float32"]

Floats = npt.NDArray[np.float32]

#: Tokens whose keys stand in for queries.
_QUERIES = 32

#: Spread of the attention logits over a block, as a standard deviation: with this one the shift
#: follows that of real queries best (see ``docs/codecs.md``).
_SPREAD = 1.5


def to_float32(tensor: TensorLayout, payload: npt.NDArray[np.uint8]) -> Floats:
    """A tensor of a payload as float32 ``(heads, tokens, dim)``.

    Raises
    ------
    ValueError
        If its elements are not numbers of 16 or 32 bits.
    """
    vectors = np.ascontiguousarray(tensor.gather(payload).transpose(1, 0, 2))
    if tensor.dtype == "bfloat16":
        words = vectors.view("<u2").astype(np.uint32) << np.uint32(16)
        return words.view(np.float32)
    if tensor.dtype == "float16":
        return vectors.view("<f2").astype(np.float32)
    if tensor.dtype == "float32":
        return vectors.view("<f4").astype(np.float32, copy=False)
    raise ValueError(f"{tensor.dtype} is stored exactly and not compared")


def relative_error(original: Floats, restored: Floats) -> float:
    """Norm of the difference by the norm of the original.

    Elements that are not finite must come back as they are; where they do not, the error is
    infinite.
    """
    finite = np.isfinite(original)
    if not np.array_equal(original[~finite], restored[~finite], equal_nan=True):
        return float("inf")
    if not finite.all():
        original, restored = np.where(finite, original, 0), np.where(finite, restored, 0)
    size = _norm(original.astype(np.float64))
    difference = _norm(restored.astype(np.float64) - original)
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def attention_shift(keys: Floats, restored: Floats) -> float:
    """The part of attention that goes elsewhere, from 0 to 1, with keys as queries.

    Each head's own keys, less their mean, ask all tokens of the block; queries are scaled so
    that logits spread as real ones do. The mean total variation distance between attention
    over the original keys and over the restored ones.

    Parameters
    ----------
    keys, restored
        float32 ``(heads, tokens, dim)``.
    """
    queries = _queries(keys)
    before, after = _attention(queries, keys), _attention(queries, restored)
    return float(np.abs(before - after).sum(axis=-1).mean() / 2)


def output_error(keys: Floats, values: Floats, restored: Floats) -> float:
    """Relative error of what attention makes of restored values; see :func:`attention_shift`."""
    weights = _attention(_queries(keys), keys)
    return relative_error(_mix(weights, values), _mix(weights, restored))


def compare(
    tensor: TensorLayout,
    keys: TensorLayout,
    original: npt.NDArray[np.uint8],
    restored: npt.NDArray[np.uint8],
) -> tuple[float, float]:
    """Relative error and attention error of a tensor of a block.

    Parameters
    ----------
    tensor
        The tensor.
    keys
        The keys of its layer in the same block; the tensor itself if it has none.
    original, restored
        The payloads (uint8, 1-D); of ``restored`` only the tensor counts.

    Returns
    -------
    float, float
        :func:`relative_error`; and for keys (and latents) :func:`attention_shift`, for values
        :func:`output_error`.
    """
    before, after = to_float32(tensor, original), to_float32(tensor, restored)
    error = relative_error(before, after)
    asked = before if keys == tensor else to_float32(keys, original)
    if not (np.isfinite(before).all() and np.isfinite(after).all() and np.isfinite(asked).all()):
        return error, error
    if tensor.role == "value" and asked.shape[:2] == before.shape[:2]:
        return error, output_error(asked, before, after)
    return error, attention_shift(before, after)


# Nothing here goes through matrix multiplication, which would wake as many threads as there
# are cores beside the engine's own.


def _norm(elements: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(elements).sum()))


def _queries(keys: Floats) -> Floats:
    """float32 ``(heads, queries, dim)``: some keys, scaled to be asked."""
    centred = keys - keys.mean(axis=1, keepdims=True)
    chosen: Floats = centred[:, :: max(1, keys.shape[1] // _QUERIES)]
    logits = _products(chosen, centred)
    spread = (logits - logits.mean(axis=-1, keepdims=True)).std(axis=(1, 2), keepdims=True)
    scaled: Floats = chosen * (_SPREAD / np.maximum(spread, np.float32(1e-20)))
    return scaled


def _products(queries: Floats, keys: Floats) -> Floats:
    """float32 ``(heads, queries, tokens)``."""
    out: Floats = np.einsum("hqd,htd->hqt", queries, keys)
    return out


def _mix(weights: Floats, values: Floats) -> Floats:
    """float32 ``(heads, queries, dim)``."""
    out: Floats = np.einsum("hqt,htd->hqd", weights, values)
    return out


def _attention(queries: Floats, keys: Floats) -> Floats:
    """float32 ``(heads, queries, tokens)``."""
    # The mean over tokens shifts all logits of a query alike.
    logits = _products(queries, keys - keys.mean(axis=1, keepdims=True))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return shares

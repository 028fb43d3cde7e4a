"""The coder LBQ: 2, 3 or 4 bits per element, after a rotation, along a trellis."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache.codecs.layout import TensorLayout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns
from lifeboat_cache.kernels import lbq_tables as tables
from lifeboat_cache.kernels.lbq_tables import CENTRED, PRECISE, TURNING

__all__ = ["CENTRED", "PRECISE", "TURNING", "Lbq"]

_MOST_DIM = 4096
_MOST_CHANNELS = 1 << 16
_MOST_VECTORS = 1 << 16

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[Any]

_MOST = np.float32(np.finfo(np.float32).max)

_LARGEST = {
    "bfloat16": np.float32(2.0**128 - 2.0**120),
    "float16": np.float32(65504.0),
    "float32": _MOST,
}


class Lbq:
    """Rotated vectors, quantised to 2, 3 or 4 bits per element along the paths of a trellis.

    ``bits`` is the width, and more for each of these:

    - :data:`CENTRED`: the mean of each channel over the tensor's tokens is stored apart.
    - :data:`TURNING`, with ``CENTRED``, if ``dim`` is a multiple of 32: means turn. Rotary
      embeddings turn pairs of a key's channels from token to token, each pair by its own angle,
      and so do their means. Which channels are pairs and what their angles are is found in the
      block itself; pairs whose means do not turn have the angle 0.
    - :data:`PRECISE`: of each head, the tokens that are furthest from the channels' means for
      their length have 8 bits per element: ``max(1, tokens // 32)`` of keys, ``max(1, tokens //
      128)`` of others. Attention goes to few tokens, and these are often among them.

    A stored tensor is one after the other, all numbers little-endian:

    - One byte: ``B``, an exponent that no scale exceeds, biased as in float32, at least 16.
    - If turning: uint16, how many channels apart those of a pair are: ``dim / 2``, 1 or
      ``dim / 4`` (if ``dim`` is a multiple of 64); int16, the cosine and then the sine of every
      pair's angle, times 32767. Pair ``p`` is channel ``p // apart * 2 * apart + p % apart``
      and the one ``apart`` behind.
    - If centred: for each head ``dim`` means as bfloat16; if they turn, first those of pairs'
      first channels, then of the others.
    - One byte per unit, in the order of tokens, heads and units: its scale. A unit is 128
      elements of a vector if ``dim`` is a multiple of 128, else 64 if it is a multiple of 64,
      else the vector. 0 is a unit of zeros; ``s`` is ``(1 + s % 16 / 16) * 2 ** (B - 142 +
      s // 16)``.
    - The units' elements, ``width / 8`` bytes each, in the same order.
    - If precise, for each head the uint16 numbers of its tokens, ascending; then the scale of
      each as bfloat16; then ``dim`` int8 of each: they are multiplied by it, and replace what
      the other bytes say of the token.

    How a unit is restored, all in float32, each operation rounded once and in this order:

    1. **Levels.** The elements come in chunks of 64 (the last one may have 16, 32 or 48).
       Element ``t`` of a chunk has a bit ``w`` of the path, a sign ``s`` and ``width - 2``
       bits ``h``. First come ``w + 2 s`` of all elements, two bits each, from the lowest bit of
       the first byte on; then ``h`` of all, ``width - 2`` bits each. With ``w'``, ``w''``
       and ``w'''`` the path's bits one, two and three elements before (0 at the beginning of a
       chunk), the element is ``+`` or (``s``) ``-`` level number ``4 h + 2 ((w ^ w' ^ w''') ^ s)
       + (w'' ^ s)`` of the width.
    2. **Order.** Element ``t`` of a chunk of ``c`` lies at ``t % 4 * c / 4 + t // 4``; in units
       of 64 and 128 the element there is the one that ``lbq_tables.ORDERS`` says.
    3. **Rotation.** A unit is ``m`` groups of 128, 64, 32 or 16. If there are several, twice
       their mean is taken off each of them (a reflection). Each group goes through the
       butterflies of a Hadamard matrix in the order of ``lbq_tables.STAGES``.
    4. Multiplied by the scale divided by the square root of the group's size, with the sign
       that the element has in ``lbq_tables.SIGNS``; the mean is added (turned: with cosine and
       sine ``c``, ``s`` of the token, ``x c - y s`` and ``y c + x s``; they begin with 1 and 0,
       and from token to token become ``c c1 - s s1`` and ``c s1 + s c1``); what is beyond the
       largest number of the dtype becomes that; rounded to it, ties to even.

    To store, the same backwards. The scale is the root of the mean square, and the path the one
    with the least squared error. Infinities and NaN count as missing: they are left out of
    means and scales, and come back as about their channel's mean (not centred, or in a precise
    token: as about zero). A unit whose scale is not more than ``2 ** (B - 142)``, that is
    ``2 ** -15`` of the tensor's largest element, becomes its channels' means.
    """

    number = columns.CODER_LBQ

    def takes(self, tensor: TensorLayout) -> bool:
        """Keys, values and latents of 16- or 32-bit floats, in vectors of multiples of 16.

        Up to 4,096 elements in a vector, 65,536 channels and 65,536 vectors.
        """
        return (
            tensor.dtype in _LARGEST
            and tensor.role not in ("state", "opaque")
            and tensor.dim % 16 == 0
            and tensor.dim <= _MOST_DIM
            and tensor.heads * tensor.dim <= _MOST_CHANNELS
            and tensor.vectors <= _MOST_VECTORS
        )

    def fixed_bytes(self, tensor: TensorLayout, bits: int) -> int | None:
        """What follows from the shape."""
        return self.most_bytes(tensor, bits)

    def most_bytes(self, tensor: TensorLayout, bits: int) -> int:
        """What follows from the shape."""
        width = _width(tensor, bits)
        channels = tensor.heads * tensor.dim
        units = tensor.vectors * (tensor.dim // tables.unit_of(tensor.dim))
        return (
            1
            + (2 + 2 * tensor.dim if bits & TURNING else 0)
            + (2 * channels if bits & CENTRED else 0)
            + units
            + tensor.vectors * tensor.dim * width // 8
            + (tensor.heads * _precise(tensor) * (4 + tensor.dim) if bits & PRECISE else 0)
        )

    def encode(
        self, tensor: TensorLayout, payload: npt.NDArray[np.uint8], bits: int
    ) -> npt.NDArray[np.uint8]:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        width = _width(tensor, bits)
        unit = tables.unit_of(tensor.dim)
        group = tables.group_of(unit)
        elements = tensor.gather(payload)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            values = _as_floats(tensor.dtype, elements)
            finite = np.isfinite(values)
            values = np.where(finite, values, np.float32(0))
            chosen = np.zeros((0, tensor.heads), dtype=np.int64)
            apart: list[npt.NDArray[np.uint8]] = []
            if bits & PRECISE:
                chosen = _chosen(values, finite, _precise(tensor))
                apart = _coarse(values, chosen)
            # What is kept apart is missing here.
            np.put_along_axis(finite, chosen[:, :, None], values=False, axis=0)
            values = np.where(finite, values, np.float32(0))
            parts, means = _taken_off(values, finite, chosen, bits)
            rest = _clamped(values - means, _MOST)
        units = np.where(finite, rest, np.float32(0)).reshape(-1, unit)
        # Every unit by a power of two that makes its largest element about 1.
        most = np.abs(units).max(axis=1)
        # No scale is larger than the largest element, rounded in the same way.
        peak = int(most.max().view(np.int32))
        top = min(max((peak + 0x3FFFF + ((peak >> 19) & 1)) >> 23, 16), 254)
        raised = np.maximum(254 - np.maximum(most.view(np.int32) >> 23, 1), 1)
        units = units * (raised << 23).astype(np.int32).view(np.float32)[:, None]
        energy = np.zeros(units.shape[0], dtype=np.float32)
        for element in range(unit):
            energy = energy + units[:, element] * units[:, element]
        found = np.sqrt(energy / np.float32(unit)).view(np.int32)
        scales = (found + 0x3FFFF + ((found >> 19) & 1)) >> 19
        lifted = 16 * (raised - 127)
        scales = np.where(most > 0, np.minimum(scales - lifted, 16 * 254 + 15), 0)
        codes = np.clip(scales - 16 * (top - 15), 0, 255)
        parts.append(codes.astype(np.uint8))
        raised_scales = ((scales + lifted) << 19).astype(np.int32).view(np.float32)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            by = np.float32(1) / (raised_scales * _root(group))
        by = np.where(codes > 0, by, np.float32(0))
        rotated = _rotate(units * _signs(unit), group, mixed_last=True) * by[:, None]
        parts.append(_quantise(rotated, width).reshape(-1))
        return np.concatenate((np.array([top], dtype=np.uint8), *parts, *apart))

    def decode(
        self,
        tensor: TensorLayout,
        stored: npt.NDArray[np.uint8],
        payload: npt.NDArray[np.uint8],
        bits: int,
    ) -> int:
        """See :class:`lifeboat_cache.codecs.coder.Coder`."""
        width = _width(tensor, bits)
        unit = tables.unit_of(tensor.dim)
        group = tables.group_of(unit)
        size = self.most_bytes(tensor, bits)
        if stored.shape[0] < size:
            raise FormatError("a stored tensor is cut short: it is computed again")
        if stored[0] < 16:
            raise FormatError("the exponent of a stored tensor is wrong: it is computed again")
        with np.errstate(over="ignore", invalid="ignore"):
            at, means = _added(stored, tensor, bits)
        units = tensor.vectors * (tensor.dim // unit)
        codes = stored[at : at + units].astype(np.int32)
        scales = np.minimum(codes + 16 * (int(stored[0]) - 15), 16 * 254 + 15)
        scales = np.where(codes > 0, scales, 0)
        by = (scales << 19).astype(np.int32).view(np.float32) * _over_root(group)
        end = at + units + tensor.vectors * tensor.dim * width // 8
        levels = _levels(stored[at + units : end].reshape(units, -1), unit, width)
        with np.errstate(over="ignore", invalid="ignore"):
            rotated = _rotate(levels, group, mixed_last=False)
            values = rotated * (by[:, None] * _signs(unit))
            values = values.reshape(tensor.tokens, tensor.heads, tensor.dim) + means
        elements = _as_elements(tensor.dtype, _clamped(values, _LARGEST[tensor.dtype]))
        if bits & PRECISE:
            _put_back(stored[end:size], tensor, elements)
        tensor.scatter(elements, payload)
        return size


def _precise(tensor: TensorLayout) -> int:
    return tables.precise_of(tensor.tokens, tensor.role == "key")


def _width(tensor: TensorLayout, bits: int) -> int:
    width, more = bits & tables.WIDTH_MASK, bits & ~tables.WIDTH_MASK
    if (
        not Lbq().takes(tensor)
        or width not in tables.WIDTHS
        or more & ~(CENTRED | PRECISE | TURNING)
        or (more & TURNING and (not more & CENTRED or tensor.dim % 32))
    ):
        raise ValueError(
            f"lbq does not store {tensor.role} of {tensor.dtype} in vectors of {tensor.dim} with "
            f"bits {bits}: see lifeboat_cache.codecs.lbq.Lbq for what it takes"
        )
    return width


def _as_floats(dtype: str, elements: npt.NDArray[np.uint8]) -> Floats:
    if dtype == "bfloat16":
        return _wide(elements.view("<u2"))
    return elements.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _as_elements(dtype: str, values: Floats) -> npt.NDArray[np.uint8]:
    if dtype == "bfloat16":
        return _narrow(values).view(np.uint8)
    return values.astype("<f2" if dtype == "float16" else "<f4").view(np.uint8)


def _wide(bits: npt.NDArray[np.uint16]) -> Floats:
    """Numbers of bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(values: Floats) -> npt.NDArray[np.uint16]:
    """Finite numbers to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _clamped(values: Floats, most: np.float32) -> Floats:
    """No further from zero than ``most``; what is not a number becomes that."""
    values = np.where(values < most, values, most)
    return np.where(values > -most, values, -most)


def _total(numbers: Floats) -> Floats:
    """Sum along the first axis, from zero on, one after the other."""
    total: Floats = np.cumsum(numbers, axis=0, dtype=np.float32)[-1] + np.float32(0)
    return total


def _usable(means: Floats) -> npt.NDArray[np.uint16]:
    """Means as bfloat16; 0 where they are not finite."""
    return _narrow(np.where(np.abs(means) <= _LARGEST["bfloat16"], means, np.float32(0)))


def _chosen(values: Floats, finite: npt.NDArray[np.bool_], count: int) -> Ints:
    """``(count, heads)``: tokens that are furthest from the mean for their length, ascending."""
    one = np.float32(1)
    means = np.divide(
        _total(values), np.maximum(_total(finite.astype(np.float32)), one), dtype=np.float32
    )
    rest = np.where(finite, values - means, np.float32(0))
    ratio = _lane_sums(rest * rest) / _lane_sums(values * values)
    ratio = np.where(ratio >= 0, ratio, np.float32(0))  # no number: 0 of 0
    order = np.argsort(-ratio, axis=0, kind="stable")[:count]
    return np.sort(order, axis=0)


def _lane_sums(numbers: Floats) -> Floats:
    """Sum along the last axis, in 16 lanes and then over these."""
    lanes = np.moveaxis(numbers.reshape(*numbers.shape[:2], -1, 16), 2, 0)
    return _total(np.moveaxis(_total(lanes), 2, 0))


def _coarse(values: Floats, chosen: Ints) -> list[npt.NDArray[np.uint8]]:
    """How the chosen tokens are stored."""
    vectors = np.take_along_axis(values, chosen[:, :, None], axis=0).transpose(1, 0, 2)
    most = np.abs(vectors).max(axis=2) / np.float32(127)
    scales = ((most.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    steps = np.rint(vectors / _wide(scales)[:, :, None])
    steps = np.where(scales[:, :, None] > 0, np.clip(steps, -127, 127), 0).astype(np.int8)
    return [
        chosen.T.astype("<u2").reshape(-1).view(np.uint8),
        scales.reshape(-1).view(np.uint8),
        steps.reshape(-1).view(np.uint8),
    ]


def _put_back(
    stored: npt.NDArray[np.uint8], tensor: TensorLayout, elements: npt.NDArray[np.uint8]
) -> None:
    """Restore the chosen tokens."""
    heads, count = tensor.heads, _precise(tensor)
    size = 2 * heads * count
    tokens = stored[:size].copy().view("<u2").reshape(heads, count).astype(np.int64)
    if (tokens >= tensor.tokens).any():
        raise FormatError("a token of a stored tensor is wrong: it is computed again")
    scales = _wide(stored[size : 2 * size].copy().view("<u2").reshape(heads, count))
    steps = stored[2 * size :].view(np.int8).reshape(heads, count, tensor.dim)
    with np.errstate(over="ignore", invalid="ignore"):
        values = steps.astype(np.float32) * scales[:, :, None]
    vectors = _as_elements(tensor.dtype, _clamped(values, _LARGEST[tensor.dtype]))
    # One after the other: malformed bytes may name a token twice.
    for number in range(count):
        elements[tokens[:, number], np.arange(heads)] = vectors[:, number]


def _taken_off(
    values: Floats, finite: npt.NDArray[np.bool_], chosen: Ints, bits: int
) -> tuple[list[npt.NDArray[np.uint8]], Floats]:
    """How what is taken off is stored, and what it is: ``(tokens or 1, heads, dim)``."""
    tokens, heads, dim = values.shape
    if not bits & CENTRED:
        return [], np.zeros((1, heads, dim), dtype=np.float32)
    one = np.float32(1)
    if not bits & TURNING:
        count = np.maximum(_total(finite.astype(np.float32)), one)
        mean = np.divide(_total(values), count, dtype=np.float32)
        stored = _usable(mean)
        return [stored.reshape(-1).view(np.uint8)], _wide(stored)[None]
    left = tokens - chosen.shape[0]
    whole = left >= 2 and int(finite.sum()) == left * heads * dim
    distance = _distance(values[:, :1], left) if whole else dim // 2
    pairs = _pairs(values, distance)
    count = np.maximum(_total(_pairs(finite.astype(np.float32), distance)), one)
    still = np.divide(_total(pairs), count, dtype=np.float32)
    step: npt.NDArray[np.int16] = np.zeros((2, dim // 2), dtype=np.int16)
    step[0] = tables.UNITY
    means = still
    if whole:
        turns = _turns(pairs)
        turning = _projected(pairs, _phases(turns, tokens), left)
        better = _energy(turning) > _energy(still)
        step = np.where(better, turns, step).astype(np.int16)
        means = np.where(better, turning, still)
    stored = _usable(means)
    parts = [
        np.array([distance], dtype="<u2").view(np.uint8),
        step.astype("<i2").reshape(-1).view(np.uint8),
        stored.reshape(-1).view(np.uint8),
    ]
    return parts, _turned(_wide(stored), step, tokens, distance)


def _added(stored: npt.NDArray[np.uint8], tensor: TensorLayout, bits: int) -> tuple[int, Floats]:
    """Where in a stored tensor scales begin, and the means: ``(tokens or 1, heads, dim)``."""
    heads, dim = tensor.heads, tensor.dim
    at = 1
    if not bits & CENTRED:
        return at, np.zeros((1, heads, dim), dtype=np.float32)
    distance, step = 0, np.zeros((2, 0), dtype=np.int16)
    if bits & TURNING:
        distance = int(stored[1]) | int(stored[2]) << 8
        if distance not in tables.distances_of(dim):
            raise FormatError("channels of a stored tensor are wrong: it is computed again")
        step = stored[3 : 3 + 2 * dim].copy().view("<i2").reshape(2, dim // 2)
        at += 2 + 2 * dim
    means = _wide(stored[at : at + 2 * heads * dim].copy().view("<u2"))
    at += 2 * heads * dim
    if not bits & TURNING:
        return at, means.reshape(1, heads, dim)
    means = means.reshape(heads, 2, dim // 2)
    return at, _turned(means, step, tensor.tokens, distance)


def _pairs(values: Floats, distance: int) -> Floats:
    """``(tokens, heads, 2, dim / 2)``: channels and those that turn with them."""
    tokens, heads, dim = values.shape
    blocks = values.reshape(tokens, heads, dim // (2 * distance), 2, distance)
    return np.ascontiguousarray(blocks.transpose(0, 1, 3, 2, 4)).reshape(tokens, heads, 2, -1)


def _unpaired(pairs: Floats, distance: int) -> Floats:
    """The contrary."""
    tokens, heads = pairs.shape[:2]
    blocks = pairs.reshape(tokens, heads, 2, -1, distance).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(blocks).reshape(tokens, heads, -1)


def _distance(values: Floats, left: int) -> int:
    """The distance of channels with which turning means take most off the first head."""
    best, most = 0, -1.0
    for distance in tables.distances_of(values.shape[2]):
        pairs = _pairs(values, distance)
        turns = _turns(pairs)
        turning = _energy(_projected(pairs, _phases(turns, pairs.shape[0]), left))
        mean: Floats = _total(pairs) / np.float32(left)
        still = _energy(mean)
        energies = np.where(turning > still, turning, still).astype(np.float64)
        total = float(np.cumsum(energies)[-1])
        if total > most:
            best, most = distance, total
    return best or values.shape[2] // 2


def _turns(pairs: Floats) -> npt.NDArray[np.int16]:
    """int16 ``(2, dim / 2)``: cosine and sine by which each pair turns from token to token.

    The angle between tokens at a small distance is rough, but tells which of the angles is
    right that a larger distance leaves open.
    """
    tokens = pairs.shape[0]
    cosine = sine = np.zeros(0)
    for lag in tables.LAGS:
        if lag >= tokens:
            break
        x0, y0 = pairs[:-lag, :, 0], pairs[:-lag, :, 1]
        x1, y1 = pairs[lag:, :, 0], pairs[lag:, :, 1]
        across = _total(_heads_first(x1 * x0 + y1 * y0)).astype(np.float64)
        along = _total(_heads_first(y1 * x0 - x1 * y0)).astype(np.float64)
        size = np.sqrt(across * across + along * along)
        usable = (size > 0) & (size < np.inf)
        across = np.where(usable, across / size, 1.0)
        along = np.where(usable, along / size, 0.0)
        if lag == 1:
            cosine, sine = across, along
            continue
        far_cosine, far_sine, reached = cosine, sine, 1
        while reached < lag:
            far_cosine, far_sine = (
                far_cosine * far_cosine - far_sine * far_sine,
                2.0 * far_cosine * far_sine,
            )
            reached *= 2
        ahead = across * far_cosine + along * far_sine
        off = along * far_cosine - across * far_sine
        off = np.where(ahead > 0, off, np.where(off > 0, 1.0, -1.0))
        off = np.where(usable, off, 0.0) / lag
        cosine, sine = cosine - off * sine, sine + off * cosine
        size = np.sqrt(cosine * cosine + sine * sine)
        cosine, sine = cosine / size, sine / size
    both = np.stack((cosine, sine)) * tables.UNITY + 32768.5
    return (both.astype(np.int64) - 32768).astype(np.int16)


def _heads_first(numbers: Floats) -> Floats:
    """``(tokens, heads, n)`` as ``(heads * tokens, n)``."""
    return numbers.transpose(1, 0, 2).reshape(-1, numbers.shape[2])


def _phases(turns: npt.NDArray[np.int16], tokens: int) -> Floats:
    """float32 ``(tokens, 2, dim / 2)``: cosine and sine at each token, from 1 and 0 on."""
    c, s = turns.astype(np.float32) / np.float32(tables.UNITY)
    phases = np.empty((tokens, 2, turns.shape[1]), dtype=np.float32)
    cosine, sine = np.ones_like(c), np.zeros_like(s)
    for token in range(tokens):
        phases[token, 0], phases[token, 1] = cosine, sine
        cosine, sine = cosine * c - sine * s, cosine * s + sine * c
    return phases


def _projected(pairs: Floats, phases: Floats, count: int) -> Floats:
    """float32 ``(heads, 2, dim / 2)``: means of pairs turned back, of so many tokens."""
    x, y = pairs[:, :, 0], pairs[:, :, 1]
    c, s = phases[:, None, 0], phases[:, None, 1]
    totals = np.stack((_total(x * c + y * s), _total(y * c - x * s)), axis=1)
    means: Floats = totals / np.float32(count)
    return means


def _energy(means: Floats) -> Floats:
    """float32 ``(dim / 2,)``: of all heads together."""
    return _total(means[:, 0] * means[:, 0] + means[:, 1] * means[:, 1])


def _turned(means: Floats, step: npt.NDArray[np.int16], tokens: int, distance: int) -> Floats:
    """float32 ``(tokens, heads, dim)``: means at each token."""
    phases = _phases(step, tokens)
    x, y = means[None, :, 0], means[None, :, 1]
    c, s = phases[:, None, 0], phases[:, None, 1]
    return _unpaired(np.stack((x * c - y * s, y * c + x * s), axis=2), distance)


def _root(group: int) -> np.float32:
    return np.float32(np.sqrt(np.float64(group)))


def _over_root(group: int) -> np.float32:
    return np.float32(1 / np.sqrt(np.float64(group)))


@cache
def _signs(unit: int) -> Floats:
    """float32 ``(unit,)``: 1 and -1."""
    bits = [(tables.SIGNS >> (element % 128)) & 1 for element in range(unit)]
    return np.array([-1.0 if bit else 1.0 for bit in bits], dtype=np.float32)


def _rotate(units: Floats, group: int, *, mixed_last: bool) -> Floats:
    """Hadamard matrix within groups (not normalised), and a reflection between them."""
    parts = units.reshape(units.shape[0], -1, group)
    if not mixed_last:
        parts = _reflect(parts)
    for bit in tables.STAGES[group]:
        pairs = parts.reshape(*parts.shape[:2], group >> (bit + 1), 2, 1 << bit)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        parts = np.stack((first + second, first - second), axis=-2).reshape(parts.shape)
    if mixed_last:
        parts = _reflect(parts)
    return parts.reshape(units.shape)


def _reflect(parts: Floats) -> Floats:
    groups = parts.shape[1]
    if groups == 1:
        return parts
    total = parts[:, 0]
    for number in range(1, groups):
        total = total + parts[:, number]
    return parts - (total * np.float32(2 / groups))[:, None]


def _chunks(unit: int) -> list[tuple[int, int]]:
    """First element and size of each chunk."""
    return [(at, min(tables.CHUNK, unit - at)) for at in range(0, unit, tables.CHUNK)]


@cache
def _order(unit: int) -> Ints:
    """Which rotated element each element in the order of storage is."""
    places: Ints = np.concatenate(
        [at + np.arange(size).reshape(4, size // 4).T.reshape(-1) for at, size in _chunks(unit)]
    )
    if unit in tables.ORDERS:
        places = np.array(tables.ORDERS[unit])[places]
    return places


@cache
def _branches() -> tuple[Ints, Ints]:
    """``(8, 2)``: from which state, and through which subset, each state is reached."""
    before = np.array([[(state >> 1) | (old << 2) for old in (0, 1)] for state in range(8)])
    subsets = [
        [tables.subset_of(before[state][old], state & 1) for old in (0, 1)] for state in range(8)
    ]
    return before, np.array(subsets)


@cache
def _all_levels(width: int) -> Floats:
    """All levels, ascending."""
    positive = np.array(tables.LEVELS[width], dtype=np.float32)
    return np.concatenate((-positive[::-1], positive))


def _quantise(rotated: Floats, width: int) -> npt.NDArray[np.uint8]:
    """uint8 ``(units, unit * width / 8)``: the path with the least squared error."""
    rotated = rotated[:, _order(rotated.shape[1])]
    parts = [_path(rotated[:, at : at + size], width) for at, size in _chunks(rotated.shape[1])]
    return np.concatenate(parts, axis=1)


def _path(chunk: Floats, width: int) -> npt.NDArray[np.uint8]:
    before, subsets = _branches()
    levels = _all_levels(width)
    half = levels.shape[0] // 2
    units, length = chunk.shape
    cost = np.full((units, 8), np.float32(1e30), dtype=np.float32)
    cost[:, 0] = 0
    nearest = np.empty((length, units, 4), dtype=np.int64)
    taken = np.empty((length, units, 8), dtype=np.int64)
    for t in range(length):
        errors = np.empty((units, 4), dtype=np.float32)
        for subset in range(4):
            own = levels[subset::4]
            between = (own[:-1] + own[1:]) * np.float32(0.5)
            number = (chunk[:, t, None] > between).sum(axis=1)
            nearest[t, :, subset] = 4 * number + subset
            difference = chunk[:, t] - own[number]
            errors[:, subset] = difference * difference
        costs = [cost[:, before[:, old]] + errors[:, subsets[:, old]] for old in (0, 1)]
        taken[t] = costs[1] < costs[0]
        cost = np.where(taken[t] == 1, costs[1], costs[0])
    state = cost.argmin(axis=1)
    row = np.arange(units)
    path = np.empty((units, length), dtype=np.int64)
    level = np.empty((units, length), dtype=np.int64)
    for t in range(length - 1, -1, -1):
        old = taken[t, row, state]
        path[:, t] = state & 1
        level[:, t] = nearest[t, row, subsets[state, old]]
        state = before[state, old]
    negative = level < half
    magnitude = np.where(negative, half - 1 - level, level - half)
    return np.concatenate(
        (_packed(path | (negative << 1), 2), _packed(magnitude >> 2, width - 2)), axis=1
    )


def _packed(numbers: Ints, bits: int) -> npt.NDArray[np.uint8]:
    """Numbers of a few bits, from the lowest bit of the first byte on."""
    single = (numbers[:, :, None] >> np.arange(bits)) & 1
    flat = single.reshape(numbers.shape[0], -1).astype(np.uint8)
    return np.packbits(flat, axis=1, bitorder="little")


def _unpacked(packed: npt.NDArray[np.uint8], bits: int) -> Ints:
    single = np.unpackbits(packed, axis=1, bitorder="little").astype(np.int64)
    if not bits:
        return np.zeros(1, dtype=np.int64)
    numbers: Ints = (single.reshape(packed.shape[0], -1, bits) << np.arange(bits)).sum(axis=2)
    return numbers


def _levels(stored: npt.NDArray[np.uint8], unit: int, width: int) -> Floats:
    """float32 ``(units, unit)``: what the elements are before the rotation is undone."""
    positive = np.array(tables.LEVELS[width], dtype=np.float32)
    parts = []
    at = 0
    for _, size in _chunks(unit):
        low = _unpacked(stored[:, at : at + size // 4], 2)
        at += size // 4
        high = _unpacked(stored[:, at : at + size * (width - 2) // 8], width - 2)
        at += size * (width - 2) // 8
        path, negative = low & 1, low >> 1
        past = np.pad(path, ((0, 0), (3, 0)))
        one, two, three = past[:, 2:-1], past[:, 1:-2], past[:, :-3]
        number = 4 * high + 2 * (path ^ one ^ three ^ negative) + (two ^ negative)
        parts.append(np.where(negative == 1, -positive[number], positive[number]))
    ordered = np.concatenate(parts, axis=1)
    units = np.empty_like(ordered)
    units[:, _order(unit)] = ordered
    return units

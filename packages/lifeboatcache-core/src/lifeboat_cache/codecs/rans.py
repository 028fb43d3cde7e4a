"""Sixty-four range coders side by side: the twin of ``kernels.rans``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["LANES", "LEAST", "SLOTS", "SYMBOLS", "decode_symbols", "encode_symbols"]

LANES = 64
SLOT_BITS = 10
SLOTS = 1 << SLOT_BITS
SYMBOLS = 32
LEAST = 1 << 16

Words = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]


def encode_symbols(
    symbols: npt.NDArray[np.uint8], classes: npt.NDArray[np.uint8], frequencies: Numbers
) -> tuple[Numbers, Words]:
    """Encode symbols.

    Parameters
    ----------
    symbols, classes
        uint8 ``(n,)``: symbols, and the table of each.
    frequencies
        int64 ``(tables, SYMBOLS)``: slots of each symbol.

    Returns
    -------
    tuple
        int64 ``(LANES,)``: the states with which decoding begins; uint16: the words.
    """
    starts = np.cumsum(frequencies, axis=1) - frequencies
    slots = frequencies[classes, symbols]
    first = starts[classes, symbols]
    states = np.full(LANES, LEAST, dtype=np.int64)
    words = []
    for begin in range((symbols.shape[0] - 1) // LANES * LANES, -1, -LANES):
        few = slots[begin : begin + LANES]
        state = states[: few.shape[0]]
        full = state >= few << (32 - SLOT_BITS)
        words.append((state[full] & 0xFFFF).astype(np.uint16))
        state = np.where(full, state >> 16, state)
        place = state % few + first[begin : begin + LANES]
        states[: few.shape[0]] = (state // few << SLOT_BITS) + place
    return states, np.concatenate(words[::-1])


def decode_symbols(
    states: Numbers, words: Words, classes: npt.NDArray[np.uint8], frequencies: Numbers
) -> npt.NDArray[np.uint8] | None:
    """Decode as many symbols as there are ``classes``; ``None`` if the words are not theirs."""
    tables = frequencies.shape[0]
    every = np.tile(np.arange(SYMBOLS), tables)
    symbol_of = np.repeat(every, frequencies.reshape(-1)).reshape(tables, SLOTS)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    out = np.empty(classes.shape[0], dtype=np.uint8)
    states = states.copy()
    at = 0
    for begin in range(0, classes.shape[0], LANES):
        table = classes[begin : begin + LANES]
        state = states[: table.shape[0]]
        slot = state & (SLOTS - 1)
        symbol = symbol_of[table, slot]
        out[begin : begin + LANES] = symbol
        state = frequencies[table, symbol] * (state >> SLOT_BITS) + slot - starts[table, symbol]
        low = state < LEAST
        count = int(low.sum())
        if at + count > words.shape[0]:
            return None
        state[low] = (state[low] << 16) | words[at : at + count]
        at += count
        states[: table.shape[0]] = state
    settled = at == words.shape[0] and bool((states == LEAST).all())
    return out if settled else None

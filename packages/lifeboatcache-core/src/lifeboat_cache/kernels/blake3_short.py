"""BLAKE3 of short inputs, sixteen at a time: the checksums of journals and access logs.

An input of up to 1,024 bytes is one chunk of BLAKE3: a chain of compressions and no
tree. Many inputs of the same length go through the compression side by side, one per
lane of a vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lifeboat_cache.kernels import raw
from lifeboat_cache.kernels.jit import helper, inline, kernel

__all__ = [
    "CHUNK_BYTES",
    "check_accesses",
    "check_entries",
    "hash_chunk",
    "hash_short",
    "seal_accesses",
    "seal_entries",
]

#: Longest input of :func:`hash_chunk`.
CHUNK_BYTES = 1024

_LANES = 16
_INITIAL = (
    0x6A09E667,
    0xBB67AE85,
    0x3C6EF372,
    0xA54FF53A,
    0x510E527F,
    0x9B05688C,
    0x1F83D9AB,
    0x5BE0CD19,
)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
#: Columns, then diagonals.
_MIXED = (
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)
_ROUNDS = 7

# Flags of a compression.
_START = 1
_END = 2
_ROOT = 8

_U32 = ir.IntType(32)


def _rotate_right(builder: Any, value: Any, by: int) -> Any:
    kind = value.type
    right, left = (
        ir.Constant(kind, bits if kind is _U32 else [bits] * kind.count) for bits in (by, 32 - by)
    )
    return builder.or_(builder.lshr(value, right), builder.shl(value, left))


def _mix(builder: Any, state: list[Any], at: tuple[int, ...], x: Any, y: Any) -> None:
    a, b, c, d = at
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        state[a] = builder.add(builder.add(state[a], state[b]), word)
        state[d] = _rotate_right(builder, builder.xor(state[d], state[a]), first)
        state[c] = builder.add(state[c], state[d])
        state[b] = _rotate_right(builder, builder.xor(state[b], state[c]), second)


def _compressor(lanes: int) -> Any:
    kind = _U32 if lanes == 1 else ir.VectorType(_U32, lanes)

    def constant(word: int) -> Any:
        return ir.Constant(kind, word if lanes == 1 else [word] * lanes)

    def everywhere(builder: Any, word: Any) -> Any:
        if lanes == 1:
            return word
        value = ir.Constant(kind, ir.Undefined)
        for lane in range(lanes):
            value = builder.insert_element(value, word, ir.Constant(_U32, lane))
        return value

    def compress(typing_context: Any, chain: Any, block: Any, length: Any, flags: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            chain_, block_ = (
                builder.inttoptr(
                    context.cast(builder, value, given, types.uint64), kind.as_pointer()
                )
                for value, given in zip(arguments[:2], signature.args[:2], strict=True)
            )
            length_, flags_ = (
                everywhere(builder, context.cast(builder, value, given, types.uint32))
                for value, given in zip(arguments[2:], signature.args[2:], strict=True)
            )

            def word_at(base: Any, number: int) -> Any:
                loaded = builder.load(builder.gep(base, [ir.Constant(_U32, number)]))
                loaded.align = 4
                return loaded

            message = [word_at(block_, number) for number in range(16)]
            state = [word_at(chain_, number) for number in range(8)]
            state += [constant(word) for word in _INITIAL[:4]]
            # The counter of the chunk: the only one there is.
            state += [constant(0), constant(0), length_, flags_]
            for _ in range(_ROUNDS):
                for step, at in enumerate(_MIXED):
                    _mix(builder, state, at, message[2 * step], message[2 * step + 1])
                message = [message[number] for number in _PERMUTATION]
            for number in range(8):
                builder.store(
                    builder.xor(state[number], state[number + 8]),
                    builder.gep(chain_, [ir.Constant(_U32, number)]),
                ).align = 4
            return context.get_dummy_value()

        return types.void(chain, block, length, flags), generate

    return intrinsic(compress)


_compress_one = _compressor(1)
_compress_many = _compressor(_LANES)

_INITIAL_WORDS = np.array(_INITIAL, dtype=np.uint32)
_CHAIN_BYTES = 8 * 4 * _LANES
_BLOCK_BYTES = 16 * 4 * _LANES


@helper
def _compress16(chain: Any, block: Any, length: Any, flags: Any) -> None:
    """One compression of sixteen inputs; word w of lane i is at ``4 * (16 * w + i)``."""
    _compress_many(chain, block, length, flags)


@inline
def _begin16(chain: Any) -> None:
    for word in range(8):
        for lane in range(16):
            raw.store_u32(chain + np.uint64(4 * (16 * word + lane)), _INITIAL_WORDS[word])


@helper
def hash_chunk(address: Any, length: Any, out: Any) -> None:
    """Write the 32 bytes of BLAKE3 of up to 1,024 bytes at an address to ``out``."""
    block = raw.stack(64)
    for word in range(8):
        raw.store_u32(out + np.uint64(4 * word), _INITIAL_WORDS[word])
    at = np.uint64(address)
    left = np.uint64(length)
    flags = np.uint32(_START)
    while left > 64:
        _compress_one(out, at, np.uint32(64), flags)
        flags = np.uint32(0)
        at += np.uint64(64)
        left -= np.uint64(64)
    raw.zero(block, np.uint64(64))
    raw.copy(block, at, left)
    _compress_one(out, block, np.uint32(left), flags | np.uint32(_END | _ROOT))


@kernel("void(uint64, uint64, uint64)")
def hash_short(address: Any, length: Any, out: Any) -> None:
    """:func:`hash_chunk`, for Python."""
    hash_chunk(address, length, out)


# A journal entry: 128 bytes, of which the last 8 are the checksum; its segment is at 88.
_ENTRY = 128
_SEGMENT = 88
_CHECKSUM = 120


@helper
def _entry_checksums(
    entries: Any, number: Any, count: Any, writer: Any, index: Any, namespace: Any, chain: Any
) -> None:
    """Checksums of sixteen entries from ``number`` on, as words 0 and 1 in ``chain``."""
    block = raw.stack(_BLOCK_BYTES)
    _begin16(chain)
    # What is hashed: writer (16), segment (4), index (8), namespace (32), then 120 bytes of the
    # entry, of which 4 are in the first block, 64 in the second and 52 in the third.
    for lane in range(16):
        # Lanes behind the end repeat the last entry.
        mine = min(number + np.uint64(lane), count - np.uint64(1))
        entry = entries + mine * np.uint64(_ENTRY)
        to = block + np.uint64(4 * lane)
        for word in range(4):
            raw.store_u32(to + np.uint64(64 * word), raw.load_u32(writer + np.uint64(4 * word)))
        raw.store_u32(to + np.uint64(64 * 4), raw.load_u32(entry + np.uint64(_SEGMENT)))
        place = index + mine
        raw.store_u32(to + np.uint64(64 * 5), np.uint32(place & np.uint64(0xFFFFFFFF)))
        raw.store_u32(to + np.uint64(64 * 6), np.uint32(place >> np.uint64(32)))
        for word in range(8):
            raw.store_u32(
                to + np.uint64(64 * (7 + word)), raw.load_u32(namespace + np.uint64(4 * word))
            )
        raw.store_u32(to + np.uint64(64 * 15), raw.load_u32(entry))
    _compress16(chain, block, np.uint32(64), np.uint32(_START))
    for lane in range(16):
        mine = min(number + np.uint64(lane), count - np.uint64(1))
        entry = entries + mine * np.uint64(_ENTRY) + np.uint64(4)
        to = block + np.uint64(4 * lane)
        for word in range(16):
            raw.store_u32(to + np.uint64(64 * word), raw.load_u32(entry + np.uint64(4 * word)))
    _compress16(chain, block, np.uint32(64), np.uint32(0))
    raw.zero(block, np.uint64(_BLOCK_BYTES))
    for lane in range(16):
        mine = min(number + np.uint64(lane), count - np.uint64(1))
        entry = entries + mine * np.uint64(_ENTRY) + np.uint64(68)
        to = block + np.uint64(4 * lane)
        for word in range(13):
            raw.store_u32(to + np.uint64(64 * word), raw.load_u32(entry + np.uint64(4 * word)))
    _compress16(chain, block, np.uint32(52), np.uint32(_END | _ROOT))


@kernel("void(uint64, uint64, uint64, uint64, uint64)")
def seal_entries(entries: Any, count: Any, writer: Any, first_index: Any, namespace: Any) -> None:
    """Put the checksums into journal entries.

    Parameters
    ----------
    entries, count
        Address of the first entry, and how many there are.
    writer, namespace
        Addresses of their 16 and 32 bytes.
    first_index
        Index of the first entry in its journal.
    """
    chain = raw.stack(_CHAIN_BYTES)
    number = np.uint64(0)
    while number < count:
        _entry_checksums(entries, number, count, writer, first_index, namespace, chain)
        for lane in range(min(np.uint64(16), count - number)):
            at = entries + (number + np.uint64(lane)) * np.uint64(_ENTRY) + np.uint64(_CHECKSUM)
            mine = chain + np.uint64(4) * np.uint64(lane)
            raw.store_u32(at, raw.load_u32(mine))
            raw.store_u32(at + np.uint64(4), raw.load_u32(mine + np.uint64(64)))
        number += np.uint64(16)


@kernel("void(uint64, uint64, uint64, uint64, uint64, boolean[::1])")
def check_entries(
    entries: Any, count: Any, writer: Any, first_index: Any, namespace: Any, good: Any
) -> None:
    """Say which journal entries have the right checksum; parameters as :func:`seal_entries`.

    ``good`` has room for ``count`` answers.
    """
    chain = raw.stack(_CHAIN_BYTES)
    number = np.uint64(0)
    while number < count:
        _entry_checksums(entries, number, count, writer, first_index, namespace, chain)
        for lane in range(min(np.uint64(16), count - number)):
            mine = number + np.uint64(lane)
            at = entries + mine * np.uint64(_ENTRY) + np.uint64(_CHECKSUM)
            word = chain + np.uint64(4) * np.uint64(lane)
            good[mine] = raw.load_u32(at) == raw.load_u32(word) and raw.load_u32(
                at + np.uint64(4)
            ) == raw.load_u32(word + np.uint64(64))
        number += np.uint64(16)


# An access: 32 bytes, of which the last 4 are the checksum.
_ACCESS = 32


@helper
def _access_checksums(accesses: Any, number: Any, count: Any, chain: Any) -> None:
    """Checksums of sixteen accesses from ``number`` on, as word 0 in ``chain``."""
    block = raw.stack(_BLOCK_BYTES)
    _begin16(chain)
    raw.zero(block, np.uint64(_BLOCK_BYTES))
    for lane in range(16):
        mine = min(number + np.uint64(lane), count - np.uint64(1))
        access = accesses + mine * np.uint64(_ACCESS)
        to = block + np.uint64(4 * lane)
        for word in range(7):
            raw.store_u32(to + np.uint64(64 * word), raw.load_u32(access + np.uint64(4 * word)))
    _compress16(chain, block, np.uint32(28), np.uint32(_START | _END | _ROOT))


@kernel("void(uint64, uint64)")
def seal_accesses(accesses: Any, count: Any) -> None:
    """Put the checksums into ``count`` accesses at an address."""
    chain = raw.stack(_CHAIN_BYTES)
    number = np.uint64(0)
    while number < count:
        _access_checksums(accesses, number, count, chain)
        for lane in range(min(np.uint64(16), count - number)):
            at = accesses + (number + np.uint64(lane)) * np.uint64(_ACCESS)
            word = chain + np.uint64(4) * np.uint64(lane)
            raw.store_u32(at + np.uint64(28), raw.load_u32(word))
        number += np.uint64(16)


@kernel("void(uint64, uint64, boolean[::1])")
def check_accesses(accesses: Any, count: Any, good: Any) -> None:
    """Say which of ``count`` accesses at an address have the right checksum."""
    chain = raw.stack(_CHAIN_BYTES)
    number = np.uint64(0)
    while number < count:
        _access_checksums(accesses, number, count, chain)
        for lane in range(min(np.uint64(16), count - number)):
            mine = number + np.uint64(lane)
            at = accesses + mine * np.uint64(_ACCESS)
            word = chain + np.uint64(4) * np.uint64(lane)
            good[mine] = raw.load_u32(at + np.uint64(28)) == raw.load_u32(word)
        number += np.uint64(16)

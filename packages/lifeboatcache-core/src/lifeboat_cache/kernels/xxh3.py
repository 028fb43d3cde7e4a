"""XXH3-128 of inputs of more than 240 bytes, in pieces anywhere in memory.

The state is :data:`STATE_BYTES` of memory, of the caller's::

    state = raw.stack(xxh3.STATE_BYTES)
    xxh3.begin(state)
    xxh3.update(state, address, length)     # as often as needed, any lengths
    low, high = xxh3.finish(state)

The canonical digest is ``high`` and ``low``, each big-endian (:func:`store_digest`).
The loops over memory are written as vectors of eight lanes: the compiler maps them
to what the processor has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lifeboat_cache.kernels import raw, xxh3_secret
from lifeboat_cache.kernels.jit import helper, inline, kernel

__all__ = [
    "STATE_BYTES",
    "begin",
    "finish",
    "payload_xxh3",
    "store_digest",
    "update",
    "xxh3_add",
    "xxh3_begin",
    "xxh3_blocks",
    "xxh3_end",
    "xxh3_of",
]

#: Bytes of memory that a state takes.
STATE_BYTES = 256

# The state: eight lanes, the last stripe that was consumed, the pending stripe, then numbers.
# A stripe is consumed when it is known that something follows it, because the end of the input
# counts once more, with another secret.
_LAST = 64
_PENDING = 128
_FILL = 192
_STRIPE = 200
_TOTAL = 208

_LANES = 8
_STRIPE_BYTES = 64
_STRIPES = 16
_BLOCK_BYTES = _STRIPES * _STRIPE_BYTES

_U64 = ir.IntType(64)
_VECTOR = ir.VectorType(_U64, _LANES)
_SWAP = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [1, 0, 3, 2, 5, 4, 7, 6])

_SECRET = xxh3_secret.WORDS


def _constant(words: list[int]) -> Any:
    return ir.Constant(_VECTOR, words)


def _splat(word: int) -> Any:
    return _constant([word] * _LANES)


def _secret_at(offset: int) -> list[int]:
    return [_SECRET[offset + 8 * lane] for lane in range(_LANES)]


def _accumulate(builder: Any, lanes: Any, data: Any, secret: Any) -> Any:
    """The lanes after one stripe."""
    keyed = builder.xor(data, secret)
    low = builder.and_(keyed, _splat(0xFFFFFFFF))
    high = builder.lshr(keyed, _splat(32))
    swapped = builder.shuffle_vector(data, ir.Constant(_VECTOR, ir.Undefined), _SWAP)
    return builder.add(lanes, builder.add(swapped, builder.mul(low, high)))


def _scramble(builder: Any, lanes: Any) -> Any:
    """The lanes at the end of a block."""
    mixed = builder.xor(lanes, builder.lshr(lanes, _splat(47)))
    mixed = builder.xor(mixed, _constant(_secret_at(128)))
    return builder.mul(mixed, _splat(xxh3_secret.PRIME32_1))


def _load_vector(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(pointer)
    loaded.align = 1
    return loaded


@intrinsic  # type: ignore[untyped-decorator]
def _consume_blocks(typing_context: Any, state: Any, address: Any, count: Any) -> Any:  # noqa: ARG001
    """Consume ``count`` whole blocks of 1,024 bytes, starting at a block's first stripe."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        state_, address_, count_ = (
            context.cast(builder, value, kind, types.uint64)
            for value, kind in zip(arguments, signature.args, strict=True)
        )
        lanes_at = builder.inttoptr(state_, _VECTOR.as_pointer())
        first = _load_vector(builder, lanes_at)
        before = builder.block
        function = builder.function
        head = function.append_basic_block("blocks.head")
        body = function.append_basic_block("blocks.body")
        done = function.append_basic_block("blocks.done")
        builder.branch(head)
        builder.position_at_end(head)
        number = builder.phi(_U64)
        lanes = builder.phi(_VECTOR)
        number.add_incoming(ir.Constant(_U64, 0), before)
        lanes.add_incoming(first, before)
        builder.cbranch(builder.icmp_unsigned("<", number, count_), body, done)
        builder.position_at_end(body)
        start = builder.add(address_, builder.mul(number, ir.Constant(_U64, _BLOCK_BYTES)))
        base = builder.inttoptr(start, _VECTOR.as_pointer())
        now = lanes
        for stripe in range(_STRIPES):
            at = builder.gep(base, [ir.Constant(_U64, stripe)])
            data = _load_vector(builder, at)
            now = _accumulate(builder, now, data, _constant(_secret_at(8 * stripe)))
        now = _scramble(builder, now)
        number.add_incoming(builder.add(number, ir.Constant(_U64, 1)), builder.block)
        lanes.add_incoming(now, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        builder.store(lanes, lanes_at).align = 1
        return context.get_dummy_value()

    return types.void(state, address, count), generate


@intrinsic  # type: ignore[untyped-decorator]
def _consume_stripe(typing_context: Any, state: Any, address: Any, secret: Any) -> Any:  # noqa: ARG001
    """Consume the 64 bytes at an address, with the secret at another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        state_, address_, secret_ = (
            builder.inttoptr(context.cast(builder, value, kind, types.uint64), _VECTOR.as_pointer())
            for value, kind in zip(arguments, signature.args, strict=True)
        )
        lanes = _load_vector(builder, state_)
        data = _load_vector(builder, address_)
        now = _accumulate(builder, lanes, data, _load_vector(builder, secret_))
        builder.store(now, state_).align = 1
        return context.get_dummy_value()

    return types.void(state, address, secret), generate


@intrinsic  # type: ignore[untyped-decorator]
def _scramble_lanes(typing_context: Any, state: Any) -> Any:  # noqa: ARG001
    """End a block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        state_ = builder.inttoptr(
            context.cast(builder, arguments[0], signature.args[0], types.uint64),
            _VECTOR.as_pointer(),
        )
        builder.store(_scramble(builder, _load_vector(builder, state_)), state_).align = 1
        return context.get_dummy_value()

    return types.void(state), generate


@intrinsic  # type: ignore[untyped-decorator]
def _secret_address(typing_context: Any) -> Any:  # noqa: ARG001
    """Where the 192 bytes of the secret are, in constant memory of the code itself."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        name = ".lifeboat.xxh3.secret"
        module = builder.module
        place = module.globals.get(name)
        if place is None:
            content = ir.Constant(ir.ArrayType(ir.IntType(8), 192), bytearray(xxh3_secret.SECRET))
            place = ir.GlobalVariable(module, content.type, name)
            place.initializer = content
            place.global_constant = True
            place.linkage = "internal"
            place.align = 64
        return builder.ptrtoint(place, _U64)

    return types.uint64(), generate


_INITIAL = np.array(xxh3_secret.INITIAL, dtype=np.uint64)


@inline
def begin(state: Any) -> None:
    """Start a digest."""
    for lane in range(8):
        raw.store_u64(state + np.uint64(8 * lane), _INITIAL[lane])
    raw.store_u64(state + np.uint64(_FILL), 0)
    raw.store_u64(state + np.uint64(_STRIPE), 0)
    raw.store_u64(state + np.uint64(_TOTAL), 0)


@helper
def _consume(state: Any, address: Any, count: Any) -> None:
    """Consume ``count`` stripes, and remember the last one."""
    secret = _secret_address()
    stripe = raw.load_u64(state + np.uint64(_STRIPE))
    at = address
    left = count
    while left > 0:
        if stripe == 0 and left >= 16:
            blocks = left // np.uint64(16)
            _consume_blocks(state, at, blocks)
            at += blocks * np.uint64(_BLOCK_BYTES)
            left -= blocks * np.uint64(16)
            continue
        _consume_stripe(state, at, secret + np.uint64(8) * stripe)
        at += np.uint64(_STRIPE_BYTES)
        left -= np.uint64(1)
        stripe += np.uint64(1)
        if stripe == 16:
            _scramble_lanes(state)
            stripe = np.uint64(0)
    raw.store_u64(state + np.uint64(_STRIPE), stripe)
    raw.copy(state + np.uint64(_LAST), at - np.uint64(_STRIPE_BYTES), np.uint64(_STRIPE_BYTES))


@helper
def update(state: Any, address: Any, length: Any) -> None:
    """Add bytes at an address to a digest."""
    at = np.uint64(address)
    left = np.uint64(length)
    if left == 0:
        return
    full = np.uint64(_STRIPE_BYTES)
    fill = raw.load_u64(state + np.uint64(_FILL))
    raw.store_u64(state + np.uint64(_TOTAL), raw.load_u64(state + np.uint64(_TOTAL)) + left)
    if fill + left <= full:
        raw.copy(state + np.uint64(_PENDING) + fill, at, left)
        raw.store_u64(state + np.uint64(_FILL), fill + left)
        return
    if fill > 0:
        missing = full - fill
        raw.copy(state + np.uint64(_PENDING) + fill, at, missing)
        _consume(state, state + np.uint64(_PENDING), np.uint64(1))
        at += missing
        left -= missing
    stripes = (left - np.uint64(1)) // full
    if stripes > 0:
        _consume(state, at, stripes)
        at += stripes * full
        left -= stripes * full
    raw.copy(state + np.uint64(_PENDING), at, left)
    raw.store_u64(state + np.uint64(_FILL), left)


@inline
def _fold(a: Any, b: Any) -> Any:
    """Low and high half of the product, combined."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    low = (a & mask) * (b & mask)
    middle = (a >> half) * (b & mask)
    other = (a & mask) * (b >> half)
    high = (a >> half) * (b >> half)
    cross = (low >> half) + (middle & mask) + other
    upper = (middle >> half) + (cross >> half) + high
    return upper ^ ((cross << half) | (low & mask))


@helper
def _merge(state: Any, secret: Any, start: Any) -> Any:
    mixed = start
    for lane in range(0, 8, 2):
        at = np.uint64(8 * lane)
        mixed += _fold(
            raw.load_u64(state + at) ^ raw.load_u64(secret + at),
            raw.load_u64(state + at + np.uint64(8)) ^ raw.load_u64(secret + at + np.uint64(8)),
        )
    mixed ^= mixed >> np.uint64(37)
    mixed *= np.uint64(0x165667919E3779F9)
    mixed ^= mixed >> np.uint64(32)
    return mixed


@helper
def finish(state: Any) -> Any:
    """The digest as two ``uint64``, low and high; the state is used up.

    The input must have had more than 240 bytes.
    """
    secret = _secret_address()
    fill = raw.load_u64(state + np.uint64(_FILL))
    total = raw.load_u64(state + np.uint64(_TOTAL))
    # The last 64 bytes of the input: the end of the stripe before, and what is pending.
    end = state + np.uint64(_LAST) + fill
    _consume_stripe(state, end, secret + np.uint64(192 - 64 - 7))
    low = _merge(state, secret + np.uint64(11), total * np.uint64(0x9E3779B185EBCA87))
    high = _merge(
        state,
        secret + np.uint64(192 - 64 - 11),
        ~(total * np.uint64(0xC2B2AE3D27D4EB4F)),
    )
    return low, high


@inline
def _swapped(word: Any) -> Any:
    """The bytes of a word in the other order."""
    pairs = np.uint64(0x00FF00FF00FF00FF)
    quads = np.uint64(0x0000FFFF0000FFFF)
    word = ((word >> np.uint64(8)) & pairs) | ((word & pairs) << np.uint64(8))
    word = ((word >> np.uint64(16)) & quads) | ((word & quads) << np.uint64(16))
    return (word >> np.uint64(32)) | (word << np.uint64(32))


@inline
def store_digest(address: Any, low: Any, high: Any) -> None:
    """Write the canonical 16 bytes of a digest."""
    raw.store_u64(address, _swapped(high))
    raw.store_u64(address + np.uint64(8), _swapped(low))


@helper
def payload_xxh3(binding: Any, addresses: Any, lengths: Any, first: Any, last: Any) -> Any:
    """Checksum (algorithm 2) of a payload.

    Parameters
    ----------
    binding
        Address of the 96 bytes of its binding.
    addresses, lengths
        Arrays ``uint64`` of pieces in memory.
    first, last
        The payload is the pieces from ``first`` up to before ``last``.

    Returns
    -------
    tuple
        Low and high half of the digest; :func:`store_digest` writes it.
    """
    state = raw.stack(STATE_BYTES)
    padded = raw.stack(256)
    raw.copy(padded, binding, np.uint64(96))
    raw.zero(padded + np.uint64(96), np.uint64(160))
    begin(state)
    update(state, padded, np.uint64(256))
    for piece in range(first, last):
        update(state, addresses[piece], lengths[piece])
    return finish(state)


@kernel("void(uint8[:, ::1], uint64[::1], uint64[::1], int64[::1], uint8[:, ::1])")
def xxh3_blocks(bindings: Any, addresses: Any, lengths: Any, starts: Any, out: Any) -> None:
    """Checksums (algorithm 2) of many payloads.

    Parameters
    ----------
    bindings
        ``(n, 96)``.
    addresses, lengths
        Pieces of all payloads in memory.
    starts
        ``(n + 1,)``: payload i is the pieces from ``starts[i]`` up to before ``starts[i + 1]``.
    out
        ``(n, 16)``: gets the canonical digests.
    """
    for number in range(bindings.shape[0]):
        low, high = payload_xxh3(
            np.uint64(bindings[number].ctypes.data),
            addresses,
            lengths,
            starts[number],
            starts[number + 1],
        )
        store_digest(np.uint64(out[number].ctypes.data), low, high)


@kernel("void(uint64[::1], uint64[::1], uint8[::1])")
def xxh3_of(addresses: Any, lengths: Any, out: Any) -> None:
    """XXH3-128 of pieces of together more than 240 bytes; ``out`` gets the 16 bytes."""
    state = raw.stack(STATE_BYTES)
    begin(state)
    for piece in range(addresses.shape[0]):
        update(state, addresses[piece], lengths[piece])
    low, high = finish(state)
    store_digest(np.uint64(out.ctypes.data), low, high)


@kernel("void(uint8[::1])")
def xxh3_begin(state: Any) -> None:
    """Begin a digest over several calls; ``state`` has :data:`STATE_BYTES`."""
    begin(np.uint64(state.ctypes.data))


@kernel("void(uint8[::1], uint64, uint64)")
def xxh3_add(state: Any, address: Any, length: Any) -> None:
    """Add bytes at an address to the digest."""
    update(np.uint64(state.ctypes.data), address, length)


@kernel("void(uint8[::1], uint8[::1])")
def xxh3_end(state: Any, out: Any) -> None:
    """Write the 16 bytes of the digest; the input must have had more than 240."""
    low, high = finish(np.uint64(state.ctypes.data))
    store_digest(np.uint64(out.ctypes.data), low, high)

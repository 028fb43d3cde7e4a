"""Digests of parts of a file: whole, or sampled at fixed places.

What a sample of a tensor sees
------------------------------
Tensors of up to 64 KiB are read whole. Of a larger one, ``W`` windows of 4 KiB:
the first, the last, and one in each of ``W - 2`` equal strata between them, at
an offset that a hash of the tensor's name decides.

* Training and merging (full fine-tune, LoRA merge, a merge of models, another
  quantization) changes nearly every value of the tensors it touches. In bf16 a
  small step leaves many values as they were, so suppose it changes one value in
  a thousand, scattered: a window of 2,048 values then misses it with 0.13, four
  windows with 3e-4, and one tensor suffices. This is why every tensor is
  sampled, and not every file: a fine-tune of one layer changes few tensors.
* An edit of few rows (new tokens in an embedding, one expert's row, a patched
  neuron) lies in a window with probability about ``W * 4096 / size`` only. It
  may be missed; ``docs/identity.md`` says so and what to do (a salt).
* It is no protection against somebody who wants a collision: who can write the
  checkpoint can change what the engine serves anyway.

``W`` shrinks as tensors get more, so that a checkpoint costs about 16,384 reads
(a second or so on a local disk), but never below four.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.system import advise

__all__ = [
    "WHOLE_BYTES",
    "WINDOW_BYTES",
    "FingerprintStoppedError",
    "Region",
    "digest_regions",
    "sample_windows",
    "windows_for",
]

WINDOW_BYTES = 4096
WHOLE_BYTES = 64 * 1024
_TOTAL_WINDOWS = 16384
_MIN_WINDOWS = 4
_MAX_WINDOWS = 16

#: Pieces closer than this are fetched by one read: the last window of a tensor
#: and the first of the next lie side by side.
_MERGE_GAP = 4096
_MAX_READ = 1 << 20

#: Reads that the kernel is told of ahead. It fetches them together, and a read
#: that need not wait comes back before another thread takes the GIL: beside a
#: thread that never lets go of it, every read that waits costs 5 ms.
_AHEAD = 64


class FingerprintStoppedError(IdentityError):
    """The caller asked a fingerprint to stop before it was complete."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a file that gets a digest of its own.

    Attributes
    ----------
    name
        Decides where the windows lie.
    offset, length
        Bytes from the start of the file; bytes.
    whole
        Read all of it however long it is.
    """

    name: str
    offset: int
    length: int
    whole: bool = False


def windows_for(regions: int) -> int:
    """How many windows each of that many regions gets."""
    return min(_MAX_WINDOWS, max(_MIN_WINDOWS, _TOTAL_WINDOWS // max(regions, 1)))


def sample_windows(name: str, length: int, windows: int) -> list[tuple[int, int]]:
    """Where to read a region: ``(offset within it, bytes)``, ascending, disjoint.

    Depends on nothing but the arguments, so that the same tensor in another
    file, at another place, gives the same sample.
    """
    if length <= WHOLE_BYTES:
        return [(0, length)] if length else []
    between = windows - 2
    stratum = (length - 2 * WINDOW_BYTES) // between
    jitter = blake3(name.encode("utf-8", "surrogatepass")).digest(length=8 * between)
    pieces = [(0, WINDOW_BYTES)]
    for number in range(between):
        pick = int.from_bytes(jitter[8 * number : 8 * number + 8], "little")
        start = WINDOW_BYTES + number * stratum + pick % (stratum - WINDOW_BYTES + 1)
        pieces.append((start, WINDOW_BYTES))
    pieces.append((length - WINDOW_BYTES, WINDOW_BYTES))
    return pieces


def _whole_pieces(length: int) -> list[tuple[int, int]]:
    return [(at, min(_MAX_READ, length - at)) for at in range(0, length, _MAX_READ)]


def _read_exactly(fd: int, into: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < into.nbytes:
        try:
            got = os.preadv(fd, [into[done:]], offset + done)
        except OSError as exc:
            raise IdentityError(
                f"{path}: cannot be read at byte {offset + done} ({exc.strerror}): "
                "check the file and its filesystem"
            ) from exc
        if got == 0:
            raise IdentityError(
                f"{path}: ends at byte {offset + done}, {into.nbytes - done} bytes too early: "
                "download or copy the file again"
            )
        done += got


def digest_regions(
    fd: int,
    path: Path,
    regions: Sequence[Region],
    windows: int,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[list[bytes], int]:
    """Digest regions of an open file.

    Parameters
    ----------
    fd, path
        The open file, and its name for errors.
    regions
        In any order; they may overlap.
    windows
        See :func:`windows_for`.
    should_stop
        Asked before every read.

    Returns
    -------
    list of bytes
        One BLAKE3 digest (32 bytes) for each region, in order.
    int
        Bytes that went into the digests.

    Raises
    ------
    IdentityError
        If the file cannot be read or is shorter than a region says.
    FingerprintStoppedError
        If ``should_stop`` said so.
    """
    pieces = []
    for number, region in enumerate(regions):
        plan = (
            _whole_pieces(region.length)
            if region.whole
            else sample_windows(region.name, region.length, windows)
        )
        pieces += [(region.offset + at, length, number) for at, length in plan]
    # By place in the file: close pieces share a read, and a rotating disk or a
    # network mount sees ascending offsets. Within a region the order stays.
    pieces.sort()
    runs = _runs(pieces)
    hashers = [blake3() for _ in regions]
    buffer = memoryview(bytearray(_MAX_READ))
    advised = 0
    for number, (start, end, first, behind) in enumerate(runs):
        if should_stop is not None and should_stop():
            raise FingerprintStoppedError(
                f"{path}: the fingerprint was stopped before it was complete: start it again"
            )
        if advised <= number:
            advised = min(number + _AHEAD, len(runs))
            _advise(fd, runs[number:advised])
        run = buffer[: end - start]
        _read_exactly(fd, run, start, path)
        for offset, length, region_number in pieces[first:behind]:
            hashers[region_number].update(run[offset - start : offset - start + length])
    return [hasher.digest() for hasher in hashers], sum(length for _, length, _ in pieces)


def _runs(pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Gather sorted pieces into reads: ``(start, end, first piece, piece behind the last)``."""
    runs = []
    first = 0
    while first < len(pieces):
        start = pieces[first][0]
        end = start + pieces[first][1]
        behind = first + 1
        while behind < len(pieces):
            offset, length, _ = pieces[behind]
            merged = max(end, offset + length)
            if offset - end > _MERGE_GAP or merged - start > _MAX_READ:
                break
            end = merged
            behind += 1
        runs.append((start, end, first, behind))
        first = behind
    return runs


def _advise(fd: int, runs: Sequence[tuple[int, int, int, int]]) -> None:
    for start, end, _, _ in runs:
        advise(fd, "willneed", start, end - start)

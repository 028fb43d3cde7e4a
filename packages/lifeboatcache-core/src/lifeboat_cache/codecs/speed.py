"""Measured speeds: of the codecs on this machine, and of targets. The agent measures them.

::

    $LIFEBOAT_CACHE_HOME/speeds/codecs-<kernels>.json   what this machine's kernels decode
    $LIFEBOAT_CACHE_HOME/speeds/target-<place>.json     what a target delivers

Nothing here is needed: without them, defaults hold. An engine only reads them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.checksum import ALGORITHM_XXH3, BINDING_BYTES, payload_checksum
from lifeboat_cache.codecs.blocks import decode_block, encode_block
from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, KVLayout, TensorLayout
from lifeboat_cache.codecs.names import CODEC_NAMES, RAW, codec_name
from lifeboat_cache.codecs.rates import CodecRate
from lifeboat_cache.codecs.recipes import coded_layout
from lifeboat_cache.kernels import cache
from lifeboat_cache.mover.hanging import resolved
from lifeboat_cache.registry.files import read_json, replace_json
from lifeboat_cache.registry.host import boot_id
from lifeboat_cache.system import advise
from lifeboat_cache.targets.direct import open_direct
from lifeboat_cache.targets.files import close_file, open_file
from lifeboat_cache.targets.layout import parse_name

__all__ = [
    "MEASURED_DTYPES",
    "Probe",
    "codecs_measured",
    "ensure_codec_rates",
    "measure_codecs",
    "probe_target",
    "read_codec_rates",
    "read_target_rate",
    "write_codec_rates",
    "write_target_rate",
]

_log = logging.getLogger("lifeboat_cache")

_FORMAT = 1

#: Of KV that the ladder is for.
MEASURED_DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")

#: Blocks of 4 MiB that are decoded in turn, so that they come from memory and not from a cache.
_BLOCKS = 24

#: Layers, tokens, heads and head size of these blocks.
_SHAPE = (16, 256, 2, 128)

#: The best of so many rounds counts; one that takes longer, in seconds, is enough.
_ROUNDS = 3
_LONG_S = 0.05

#: A probe reads so much at a time, with so many threads, ends after so many bytes or
#: seconds, and looks at so many segments.
_PIECE = 2 << 20
_READERS = 4
_PROBE_BYTES = 128 << 20
_PROBE_S = 0.25
_SEGMENTS = 16

#: Less than this in all segments together is no measure of a disk.
_LEAST_BYTES = 32 << 20

#: The speed of a target is the median of so many probes.
_PROBES = 5

#: Files that nobody has written for so many seconds are of machines that are gone.
_LEFT_BEHIND_S = 30 * 86400.0


# Codecs -----------------------------------------------------------------------


def measure_codecs(codecs: tuple[int, ...] | None = None) -> dict[tuple[DType, int], CodecRate]:
    """What this machine's kernels decode, by dtype and codec; takes a few seconds.

    CPU time is measured, so that a busy machine does not look like a slow one.

    Parameters
    ----------
    codecs
        By default all.
    """
    rates: dict[tuple[DType, int], CodecRate] = {}
    for dtype in MEASURED_DTYPES:
        layout, payload = _layout(dtype), _sample(dtype)
        goals = [np.ones_like(payload) for _ in range(_BLOCKS)]
        for codec in range(len(CODEC_NAMES)) if codecs is None else codecs:
            rates[dtype, codec] = _measure(layout, payload, codec, goals)
    return rates


def _measure(
    layout: KVLayout,
    payload: npt.NDArray[np.uint8],
    codec: int,
    goals: Sequence[npt.NDArray[np.uint8]],
) -> CodecRate:
    coded = coded_layout(layout, codec)
    stored = payload if codec == RAW else encode_block(coded, payload)
    sources = [stored.copy() for _ in goals]
    best = math.inf
    for _ in range(_ROUNDS):
        began = time.thread_time()
        for source, goal in zip(sources, goals, strict=True):
            payload_checksum(bytes(BINDING_BYTES), [source.data], ALGORITHM_XXH3)
            if codec != RAW:  # read straight into the engine's memory
                decode_block(coded, source, goal)
        took = time.thread_time() - began
        best = min(best, took)
        if took > _LONG_S:
            break
    decoded = len(goals) * payload.nbytes
    return CodecRate(decoded / max(best, 1e-9), payload.nbytes / stored.nbytes)


@functools.cache
def _layout(dtype: DType) -> KVLayout:
    """A block like those of a small model."""
    layers, tokens, heads, dim = _SHAPE
    width = dim * ITEM_BYTES[dtype]
    size = tokens * heads * width
    tensors = [
        TensorLayout(
            "value" if number % 2 else "key",
            dtype,
            number // 2,
            tokens // 16,
            16,
            heads,
            dim,
            16 * heads * width,
            heads * width,
            width,
            number * size,
        )
        for number in range(2 * layers)
    ]
    return KVLayout.of(2 * layers * size, tensors)


def _sample(dtype: DType) -> npt.NDArray[np.uint8]:
    """A block of :func:`_layout` with values as KV has: channels of their own scale."""
    layers, tokens, heads, dim = _SHAPE
    rng = np.random.default_rng(0)
    scales = np.exp(rng.normal(0.0, 0.8, (2 * layers, 1, heads, dim)))
    values = (rng.standard_normal((2 * layers, tokens, heads, dim)) * scales).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        elements: npt.NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    else:
        elements = values.astype("<f4" if dtype == "float32" else "<f2")
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def _recipe(dtype: DType, codec: int) -> list[list[int]]:
    """Which coders a codec takes, with which bits: what its speed is the speed of.

    Kernels do not know it, so a release with the same kernels may have another one.
    """
    return [list(pair) for pair in sorted(set(coded_layout(_layout(dtype), codec).coders))]


def codecs_measured(home: Path) -> bool:
    """Whether all codecs were measured, with the kernels that fit this process."""
    with contextlib.suppress(cache.UnusableError):
        found = _codec_rates(home)
        return all(
            (dtype, codec) in found
            for dtype in MEASURED_DTYPES
            for codec in range(len(CODEC_NAMES))
        )
    return False


def ensure_codec_rates(home: Path) -> None:
    """Measure the codecs unless that is done; without it kernels are used all the same."""
    try:
        if not codecs_measured(home) and kernels.load(home):
            write_codec_rates(home)
    except Exception:
        _log.warning("LifeboatCache: the codecs could not be measured", exc_info=True)


def write_codec_rates(home: Path) -> None:
    """Measure the codecs. The kernels must be ready.

    Raises
    ------
    OSError
        If that cannot be written down.
    """
    rates = measure_codecs()
    document = {
        "format": _FORMAT,
        "measured": time.time(),
        "rates": {
            f"{dtype}:{codec_name(codec)}": {
                "decode": rate.decode,
                "ratio": rate.ratio,
                "recipe": _recipe(dtype, codec),
            }
            for (dtype, codec), rate in rates.items()
        },
    }
    replace_json(_made(home) / _codecs_file(), document)


def read_codec_rates(home: Path) -> Mapping[tuple[str, int], CodecRate]:
    """What was measured with the kernels of this process; empty if nothing was.

    Without kernels there is nothing: what serves then is slower than any measurement.
    """
    if not kernels.ready():
        return {}
    try:
        return _codec_rates(home)
    except cache.UnusableError:
        return {}


def _codec_rates(home: Path) -> dict[tuple[str, int], CodecRate]:
    document = _read(home / "speeds" / _codecs_file())
    found: dict[tuple[str, int], CodecRate] = {}
    rates = document.get("rates")
    if not isinstance(rates, dict):
        return found
    for dtype in MEASURED_DTYPES:
        for codec, name in enumerate(CODEC_NAMES):
            item = rates.get(f"{dtype}:{name}")
            if not isinstance(item, dict) or item.get("recipe") != _recipe(dtype, codec):
                continue
            decode, ratio = _positive(item.get("decode")), _positive(item.get("ratio"))
            if decode is not None and ratio is not None:
                found[dtype, codec] = CodecRate(decode, ratio)
    return found


def _codecs_file() -> str:
    return f"codecs-{cache.key()}.json"


# Targets ----------------------------------------------------------------------


def write_target_rate(home: Path, location: str, rate: float) -> float:
    """Note what a target delivered; returns what counts from now on.

    Raises
    ------
    OSError
        If it cannot be written down.
    """
    path = _made(home) / _target_file(location)
    samples = [*_samples(path), rate][-_PROBES:]
    replace_json(
        path,
        {"format": _FORMAT, "location": location, "measured": time.time(), "samples": samples},
    )
    return statistics.median(samples)


def read_target_rate(home: Path, location: str) -> float | None:
    """Bytes per second that a target delivers; ``None`` if that was not measured."""
    samples = _samples(home / "speeds" / _target_file(location))
    return statistics.median(samples) if samples else None


def _samples(path: Path) -> list[float]:
    found = _read(path).get("samples")
    samples = [_positive(item) for item in found] if isinstance(found, list) else []
    return [item for item in samples if item is not None]


def _target_file(location: str) -> str:
    """A path may be another disk on another machine, or after a restart."""
    real, _ = resolved(Path(location))  # engines ask for targets that can hang, too
    place = f"{boot_id()}\0{real}"
    return f"target-{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}.json"


def probe_target(root: Path, *, direct: bool) -> float | None:
    """Bytes per second that a target delivers: pieces of its segments, several at a time.

    Parameters
    ----------
    root
        The target's directory. It is only read.
    direct
        Whether its files are read with O_DIRECT.

    Returns
    -------
    float or None
        ``None`` if there is too little to be read.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    probe = Probe(root, direct=direct)
    try:
        return probe.run()
    finally:
        probe.close()


class Probe:
    """Reads pieces of a target's segments in a random order.

    Parameters
    ----------
    root, direct
        See :func:`probe_target`.
    """

    def __init__(self, root: Path, *, direct: bool) -> None:
        self._direct = direct
        self._fds: list[int] = []
        self._pieces: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._read = 0
        self._error: OSError | None = None
        places = [place for path in _segments(root)[:_SEGMENTS] for place in self._places(path)]
        # The same places each time would be in some cache by then.
        random.shuffle(places)
        for fd, place in places:
            if len(self._pieces) * _PIECE >= _PROBE_BYTES:
                break
            if _is_data(fd, place):
                self._pieces.append((fd, place))

    def _places(self, path: Path) -> list[tuple[int, int]]:
        try:
            fd = open_direct(path, os.O_RDONLY) if self._direct else open_file(path)
        except OSError:
            return []  # removed by the janitor, or O_DIRECT is refused
        self._fds.append(fd)
        return [(fd, place) for place in range(0, os.fstat(fd).st_size - _PIECE + 1, _PIECE)]

    def run(self) -> float | None:
        """Bytes per second; ``None`` if there is too little."""
        if len(self._pieces) * _PIECE < _LEAST_BYTES:
            return None
        if not self._direct:
            for fd, place in self._pieces:
                advise(fd, "dontneed", place, _PIECE)
        began = time.perf_counter()
        readers = [
            threading.Thread(target=self._work, args=(began + _PROBE_S,), name="probe", daemon=True)
            for _ in range(_READERS)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        took = time.perf_counter() - began
        if self._error is not None:
            raise self._error
        return self._read / took if self._read >= _PIECE and took > 0 else None

    def _work(self, until: float) -> None:
        with mmap.mmap(-1, _PIECE) as memory:
            while time.perf_counter() < until:
                with self._lock:
                    if not self._pieces or self._error is not None:
                        return
                    fd, place = self._pieces.pop()
                try:
                    done = os.preadv(fd, [memory], place)
                except OSError as error:
                    self._error = error
                    return
                with self._lock:
                    self._read += done

    def close(self) -> None:
        """Let go of the files."""
        while self._fds:
            close_file(self._fds.pop())


def _segments(root: Path) -> list[Path]:
    """Segments of all namespaces, the largest first."""
    found: list[tuple[int, Path]] = []
    with os.scandir(root) as namespaces:
        directories = [entry.path for entry in namespaces if entry.is_dir(follow_symlinks=False)]
    for directory in directories:
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as files:
            for entry in files:
                name = parse_name(entry.name)
                if name is not None and name.kind == "segment":
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.stat(follow_symlinks=False).st_size, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def _is_data(fd: int, place: int) -> bool:
    """Whether a piece is on the disk as a whole: what was punched out costs nothing to read."""
    try:
        return os.lseek(fd, place, os.SEEK_DATA) == place and (
            os.lseek(fd, place, os.SEEK_HOLE) >= place + _PIECE
        )
    except OSError:
        return False


# Files ------------------------------------------------------------------------


def _made(home: Path) -> Path:
    path = home / "speeds"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    now = time.time()
    with os.scandir(path) as files:
        for entry in files:
            with contextlib.suppress(OSError):
                if abs(now - entry.stat(follow_symlinks=False).st_mtime) > _LEFT_BEHIND_S:
                    os.unlink(entry.path)
    return path


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if found is None or found[0].get("format") != _FORMAT:
        return {}
    return found[0]


def _positive(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None

"""The fingerprint of a checkpoint's weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity.checkpoint_files import checkpoint_files
from lifeboat_cache.identity.opaque_files import archive_regions, stride_regions
from lifeboat_cache.identity.safetensors_header import TensorEntry, read_header
from lifeboat_cache.identity.sampling import Region, digest_regions, windows_for
from lifeboat_cache.identity.stamps import FileStamp, stamp, stamps_of
from lifeboat_cache.system import advise

__all__ = ["WeightsIdentity", "files_identity", "weights_identity"]

#: Changes whenever the same checkpoint would get another digest.
_FORMAT = b"lifeboat weights 1"


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """What was found out about a checkpoint's weights.

    Attributes
    ----------
    digest
        64 hexadecimal digits (BLAKE3). The same weights give the same digest
        wherever they lie; safetensors also however they are cut into files.
    kind
        ``"safetensors"``, ``"torch"``, ``"gguf"`` or ``"dummy"``.
    files
        Names of the weight files.
    tensors
        How many tensors (members, for archives) were digested.
    bytes_total, bytes_sampled
        Size of the files; bytes that went into the digest.
    seconds
        How long it took.
    stamps
        The files as they were before and after.
    """

    digest: str
    kind: str
    files: tuple[str, ...]
    tensors: int
    bytes_total: int
    bytes_sampled: int
    seconds: float
    stamps: tuple[FileStamp, ...] = ()

    def to_identity(self) -> dict[str, Any]:
        """The part that names the weights, for an identity document."""
        return {"kind": self.kind, "digest": self.digest}

    def to_display(self) -> dict[str, Any]:
        """Facts for people, outside of any digest."""
        return {
            "kind": self.kind,
            "files": list(self.files),
            "tensors": self.tensors,
            "bytes_total": self.bytes_total,
            "bytes_sampled": self.bytes_sampled,
            "seconds": round(self.seconds, 3),
        }


class _Digest:
    """BLAKE3 over items that cannot run into each other."""

    def __init__(self, kind: str) -> None:
        self._hasher = blake3(_FORMAT)
        self.add(kind.encode())

    def add(self, *items: bytes | str) -> None:
        for item in items:
            data = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
            self._hasher.update(len(data).to_bytes(8, "little") + data)

    def hex(self) -> str:
        return self._hasher.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise IdentityError(
            f"{path}: cannot be opened ({exc.strerror}): make it readable for the engine's user"
        ) from exc
    try:
        # Windows are far apart: read-ahead would fetch 32 times as much.
        advise(fd, "random")
        yield fd
    finally:
        os.close(fd)


def _safetensors(
    files: Sequence[Path], whole: bool, should_stop: Callable[[], bool] | None
) -> tuple[str, int, int]:
    headers: list[list[TensorEntry]] = []
    for path in files:
        with _opened(path) as fd:
            headers.append(read_header(fd, path))
    windows = windows_for(sum(map(len, headers)))
    found: list[tuple[str, int, TensorEntry, bytes]] = []
    occurrences: dict[str, int] = {}
    sampled = 0
    for path, entries in zip(files, headers, strict=True):
        regions = [Region(entry.name, entry.offset, entry.length, whole) for entry in entries]
        with _opened(path) as fd:
            digests, count = digest_regions(fd, path, regions, windows, should_stop)
        sampled += count
        for entry, digest in zip(entries, digests, strict=True):
            # Of two tensors with one name the later file's wins, so their order counts.
            number = occurrences.get(entry.name, 0)
            occurrences[entry.name] = number + 1
            found.append((entry.name, number, entry, digest))
    found.sort(key=lambda item: item[:2])
    result = _Digest("safetensors")
    for name, number, entry, digest in found:
        result.add(name, str(number), entry.dtype, ",".join(map(str, entry.shape)), digest)
    return result.hex(), len(found), sampled


def _opaque(
    kind: str, files: Sequence[Path], whole: bool, should_stop: Callable[[], bool] | None
) -> tuple[str, int, int]:
    result = _Digest(kind)
    members = sampled = 0
    for path in files:
        with _opened(path) as fd:
            archive = archive_regions(fd, path) if kind == "torch" else None
            if archive is not None:
                regions = [region for region, _ in archive]
                labels = [label for _, label in archive]
                result.add("archive")
            else:
                size = os.fstat(fd).st_size
                regions = stride_regions(size)
                labels = [region.name for region in regions]
                result.add("file", str(size))
            if whole:
                regions = [Region(part.name, part.offset, part.length, True) for part in regions]
            digests, count = digest_regions(
                fd, path, regions, windows_for(len(regions)), should_stop
            )
        sampled += count
        members += len(regions)
        for label, digest in zip(labels, digests, strict=True):
            result.add(label, digest)
        result.add("end")
    return result.hex(), members, sampled


def files_identity(
    kind: str,
    files: tuple[Path, ...],
    *,
    whole: bool = False,
    should_stop: Callable[[], bool] | None = None,
    not_after: float | None = None,
) -> WeightsIdentity:
    """Fingerprint given weight files.

    Parameters
    ----------
    kind
        ``"safetensors"``, ``"torch"`` or ``"gguf"``.
    files
        In the order in which a loader reads them.
    whole
        Read everything instead of sampling.
    should_stop
        Asked before every read.
    not_after
        Seconds since the epoch. A file that changed later may not be what the
        engine holds, and is refused.

    Raises
    ------
    IdentityError
        If a file is damaged, cannot be read, changed after ``not_after`` or
        changes meanwhile.
    """
    started = time.perf_counter()
    before = stamps_of(files)
    for path, found in zip(files, before, strict=True):
        if not_after is not None and found.changed_at > not_after:
            raise IdentityError(
                f"{path}: changed after the engine began to load it, so it may not be what the "
                "engine holds: restart the engine"
            )
    if kind == "safetensors":
        digest, tensors, sampled = _safetensors(files, whole, should_stop)
    else:
        digest, tensors, sampled = _opaque(kind, files, whole, should_stop)
    for path, found in zip(files, before, strict=True):
        try:
            same = stamp(path) == found
        except OSError:
            same = False
        if not same:
            raise IdentityError(
                f"{path}: changed while it was fingerprinted: restart the engine when the "
                "checkpoint is complete"
            )
    return WeightsIdentity(
        digest=digest,
        kind=kind,
        files=tuple(path.name for path in files),
        tensors=tensors,
        bytes_total=sum(found.size for found in before),
        bytes_sampled=sampled,
        seconds=time.perf_counter() - started,
        stamps=before,
    )


def weights_identity(
    path: Path | str,
    *,
    load_format: str = "auto",
    should_stop: Callable[[], bool] | None = None,
    not_after: float | None = None,
) -> WeightsIdentity:
    """Fingerprint the weights that an engine loads from a model directory.

    For safetensors the digest covers each tensor's name, dtype, shape and a
    sample of its content (:mod:`lifeboat_cache.identity.sampling`), by name:
    path, times, shards and header metadata do not count. Runs for a second or
    so on a local disk, mostly inside system calls: call it from a thread.

    Parameters
    ----------
    path
        A local model directory (see
        :func:`lifeboat_cache.identity.hub_cache.resolve_model_dir` for a Hub
        id), or a single weight file.
    load_format
        vLLM's ``--load-format``. ``"dummy"`` weights are random but the same in
        every process, so they are a kind of their own that no checkpoint shares.
    should_stop, not_after
        See :func:`files_identity`.

    Raises
    ------
    IdentityError
        If the weights cannot be identified; the message says which file and
        what to do.
    FingerprintStoppedError
        If ``should_stop`` said so.
    """
    if load_format == "dummy":
        return WeightsIdentity(_Digest("dummy").hex(), "dummy", (), 0, 0, 0, 0.0)
    chosen = checkpoint_files(Path(path), load_format)
    return files_identity(chosen.kind, chosen.files, should_stop=should_stop, not_after=not_after)

"""A directory as a storage target."""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from lifeboat_cache.errors import FormatError, LifeboatError, NewerFormatError, TargetError
from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import ENTRY_BYTES
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import (
    NamespaceInfo,
    PurgeReport,
    Target,
    TargetReader,
    TargetWriter,
    Usage,
    WriterInfo,
)
from lifeboat_cache.targets.direct import supports_direct
from lifeboat_cache.targets.files import (
    NotAFileError,
    close_file,
    cut_file,
    is_gone,
    open_file,
    read_document,
    read_range,
)
from lifeboat_cache.targets.layout import (
    DEAD_GENERATION,
    NAMESPACE_NAME,
    SILLY_RENAMES,
    SUMMARY_WRITER,
    FileName,
    check_root,
    parse_name,
    segment_name,
    write_atomically,
)
from lifeboat_cache.targets.mounts import kind_of, mount_of
from lifeboat_cache.targets.nfs_mount import (
    MountFinding,
    NfsProtocol,
    examine,
    find_mount,
    nfs_stats,
    require_mounted,
)
from lifeboat_cache.targets.published_usage import read_usage, used_now
from lifeboat_cache.targets.segment_reader import SegmentReader
from lifeboat_cache.targets.segment_writer import SegmentWriter
from lifeboat_cache.targets.server_clock import file_time
from lifeboat_cache.targets.traits import Traits, declare, make_directory, traits_of
from lifeboat_cache.targets.writer_lock import lock_owner, writer_alive

__all__ = ["FilesystemTarget", "TierSettings"]

_Writer = TypeVar("_Writer", bound=SegmentWriter)

_log = logging.getLogger("lifeboat_cache")

#: What all writers use together is measured again after so many seconds …
_USAGE_AGE_S = 10.0
#: … or before a store is refused, if it is older than this: space may have come back …
_REFUSAL_AGE_S = 1.0
#: … or after this writer's share of the space left, within these bounds: the smaller
#: one is by how much each writer can overshoot the capacity.
_LEAST_SHARE = 4 << 20
_MOST_SHARE = 256 << 20
#: At least so many writers are reckoned with, whether they are known or just starting.
_LEAST_WRITERS = 8

#: A namespace's full digest, or the half that names the directory.
_DIGEST = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{32})?")

#: Temporary files older than so many seconds were left by a killed process.
_STALE_S = 3600.0


class TierSettings(Protocol):
    """The part of a tier's configuration that a filesystem target needs."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def capacity_bytes(self) -> int | None: ...
    @property
    def min_free_bytes(self) -> int: ...
    @property
    def direct_io(self) -> Literal["auto", "on", "off"]: ...
    @property
    def type(self) -> Literal["filesystem", "nfs", "ontap", "s3"]: ...
    @property
    def mount(self) -> Path | None: ...
    @property
    def protocol(self) -> NfsProtocol | None: ...
    @property
    def file_mode_bits(self) -> int: ...
    @property
    def group(self) -> str | None: ...
    @property
    def rung(self) -> Literal["local", "shared", "archive"] | None: ...


class FilesystemTarget(Target):
    """Segments and journals in a local directory.

    Parameters
    ----------
    root
        The directory; created by :meth:`probe`.
    name
        Name for people.
    capacity
        Bytes that all writers together may allocate; ``None`` = no limit but the reserve.
    reserve
        Bytes that the filesystem must keep free.
    direct_io
        ``"auto"``: O_DIRECT where the filesystem takes it.
    kind
        As in ``storage.tiers[].type``. Of ``nfs`` and ``ontap`` it is known that other hosts
        may use the directory too; of ``filesystem`` the kind of the mount says it.
    mount
        The mount point that it is on, without which it is not usable.
    protocol
        How that is meant to be mounted.
    file_mode, group
        Of files that are made there.
    """

    def __init__(
        self,
        root: Path,
        *,
        name: str = "local",
        capacity: int | None = None,
        reserve: int = 0,
        direct_io: Literal["auto", "on", "off"] = "auto",
        kind: Literal["filesystem", "nfs", "ontap"] = "filesystem",
        mount: Path | None = None,
        protocol: NfsProtocol | None = None,
        file_mode: int = 0o600,
        group: str | None = None,
    ) -> None:
        self.name = name
        self.type = kind
        self.mount = mount
        self.protocol = protocol
        self.file_mode = file_mode
        self.group = group
        self._traits: Traits | None = None
        self._root = Path(root)
        self._capacity = capacity
        self._reserve = reserve
        self._direct_io: Literal["auto", "on", "off"] = direct_io
        self._direct: bool | None = None
        self._lock = threading.Lock()
        self._measured = -1.0
        self._used = 0
        self._written = 0  # admitted since _used was measured
        self._under_way = 0  # admitted and not settled yet
        self._share = 0  # what may be admitted before it is measured again

    @classmethod
    def from_tier(cls, tier: TierSettings) -> FilesystemTarget:
        """From a tier of the configuration.

        Raises
        ------
        TargetError
            If the tier is no directory.
        """
        if tier.type == "s3":
            raise TargetError(
                errno.ENOTDIR, f"tier {tier.name} is a bucket: choose a tier that is a directory"
            )
        target = cls(
            tier.path,
            name=tier.name,
            capacity=tier.capacity_bytes,
            reserve=tier.min_free_bytes,
            direct_io=tier.direct_io,
            kind=tier.type,
            mount=tier.mount,
            protocol=tier.protocol,
            file_mode=tier.file_mode_bits,
            group=tier.group,
        )
        target.rung = tier.rung
        return target

    @property
    def shared(self) -> bool:
        """Whether other hosts may use the directory too."""
        return self.traits.shared

    @property
    def traits(self) -> Traits:
        """What is special about the directory. Found out at the first call.

        Raises
        ------
        TargetError
            If the group does not exist.
        """
        if self._traits is None:
            # Of one directory, what is known of it elsewhere in this process holds as well.
            shared = self.type != "filesystem" or traits_of(self._root).shared
            if not shared:
                mount = mount_of(self._root)
                shared = mount is not None and kind_of(mount.type) in ("network", "fuse")
            self._traits = Traits(shared, self.file_mode, self._find_group())
            declare(self._root, self._traits)
        return self._traits

    def _find_group(self) -> int | None:
        if self.group is None or self.group.isdigit():
            return None if self.group is None else int(self.group)
        try:
            return grp.getgrnam(self.group).gr_gid
        except KeyError as exc:
            raise TargetError(
                errno.ENOENT,
                f"{self._root}: there is no group {self.group!r} on this host: create it, or set "
                "the tier's group to its number",
            ) from exc

    def prepare(self) -> None:
        """Before anything is done with the directory: see that it is what it should be.

        Raises
        ------
        TargetError
            If its mount is missing or another one, or its group unknown.
        """
        if self.mount is not None:
            if not self._root.is_relative_to(self.mount):
                raise TargetError(
                    errno.EINVAL,
                    f"{self._root} is not below {self.mount}: set the tier's mount to the mount "
                    "point that its path is on",
                )
            require_mounted(self.mount)
        _ = self.traits

    @property
    def special(self) -> dict[str, object]:
        out: dict[str, object] = {}
        if self.mount is not None:
            out["mount"] = str(self.mount)
        if self.protocol is not None:
            out["protocol"] = self.protocol
        if self.file_mode != 0o600:
            out["file_mode"] = self.file_mode
        if self.group is not None:
            out["group"] = self.group
        return out

    def mount_findings(self) -> list[MountFinding]:
        """How the mount is, against how it should be; nothing where no NFS is asked for."""
        if self.type == "filesystem" and self.protocol is None:
            return []
        found = None if self.mount is None else find_mount(self.mount)
        found = found or mount_of(self._root)
        if found is None:
            return []
        return examine(self.type, self.protocol, found, nfs_stats(found.point))

    @property
    def location(self) -> str:
        return str(self._root)

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is used. Found out at the first call.

        Raises
        ------
        TargetError
            If ``direct_io`` is ``"on"`` and does not work here.
        """
        if self._direct is None:
            self._direct = supports_direct(self._root, self._direct_io)
        return self._direct

    def probe(self) -> None:
        self.prepare()
        try:
            check_root(self._root, create=True)
        except TargetError as exc:
            raise self._explained(exc) from exc
        path = self._root / f".probe.{os.getpid()}.{os.urandom(4).hex()}.tmp"
        try:
            payload = os.urandom(HEADER_BYTES)
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, payload, 0)
                if read_range(fd, len(payload), 0) != payload:
                    raise TargetError(
                        errno.EIO, f"{self._root} does not return what was written: check the disk"
                    )
            finally:
                close_file(fd)
                os.unlink(path)
            _ = self.direct
        except TargetError:
            raise
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                # What is there can still be loaded, and space may come back.
                _log.warning("LifeboatCache: %s is full: nothing is stored there", self._root)
                return
            raise self._explained(exc) from exc

    def _explained(self, exc: OSError) -> TargetError:
        """An error that says what to do."""
        if isinstance(exc, TargetError) and exc.errno not in (errno.EACCES, errno.EPERM):
            return exc
        if exc.errno == errno.ESTALE:
            return TargetError(
                exc.errno,
                f"{self._root} has gone at the server (stale file handle): see that the export is "
                "there, then unmount and mount it again",
            )
        if exc.errno in (errno.EACCES, errno.EPERM) and self.shared:
            why = os.strerror(exc.errno)
            if os.geteuid() == 0:
                return TargetError(
                    exc.errno,
                    f"{self._root} is not writable for root ({why}), as with root_squash: "
                    "run the engine as the directory's owner, or export it with "
                    "no_root_squash; for several users set file_mode 0660 and group",
                )
            return TargetError(
                exc.errno,
                f"{self._root} is not writable for user {os.geteuid()} ({why}): give the directory "
                "to that user at the server; for several users set file_mode 0660 and group",
            )
        if isinstance(exc, TargetError):
            return exc
        return TargetError(
            exc.errno,
            f"{self._root} is not writable ({exc.strerror}): choose another path, free space, "
            "or correct its owner and mode",
        )

    def identity(self) -> tuple[int, int]:
        """Which directory it is: another value after another one was mounted there.

        Raises
        ------
        TargetError
            If it is not there.
        """
        try:
            status = os.stat(self._root)
        except OSError as exc:
            raise TargetError(
                exc.errno,
                f"{self._root} has gone ({exc.strerror}): check its mount, or make it again",
            ) from exc
        return status.st_dev, status.st_ino

    # Space ------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    @property
    def capacity(self) -> int | None:
        """Bytes that all writers together may allocate; ``None`` = no limit."""
        return self._capacity

    @property
    def reserve(self) -> int:
        """Bytes that the filesystem must keep free."""
        return self._reserve

    @property
    def direct_io(self) -> Literal["auto", "on", "off"]:
        """Whether O_DIRECT is used; ``"auto"``: where the filesystem takes it."""
        return self._direct_io

    def usage(self) -> Usage:
        used = sum(self.allocated(directory) for directory in self._directories())
        self._note(used, 0)
        try:
            free = self._free()
        except OSError:
            free = 0
        return Usage(used, self._capacity, free, self._reserve)

    def _note(self, used: int, writers: int) -> None:
        """Take in a measurement."""
        left = max(0, (self._capacity or 0) - used)
        with self._lock:
            # What is under way may be in there or not yet: it counts until it is settled.
            self._used = used + self._under_way
            self._written = 0
            self._measured = time.monotonic()
            # Others may be writing into the same space without knowing of this writer.
            share = left // (2 * max(_LEAST_WRITERS, writers))
            self._share = min(_MOST_SHARE, max(_LEAST_SHARE, share))

    def _measure(self) -> None:
        """Find out what all writers use together, the cheapest way there is."""
        published = read_usage(self._root, self._now(), by_file=self.shared)
        if published is None:
            self.usage()
        else:
            self._note(*used_now(self._root, published, [d.name for d in self._directories()]))

    def _free(self) -> int:
        stat = os.statvfs(self._root)
        return stat.f_bavail * stat.f_frsize

    def _allow(self, wanted: int) -> Outcome | None:
        """Admit or refuse a write; admitted bytes count at once."""
        if self._capacity is not None and (
            self._measured < 0 or self._age() > _USAGE_AGE_S or self._written > self._share
        ):
            self._measure()
        refusal = self._admit(wanted)
        if refusal is Outcome.FULL and self._age() > _REFUSAL_AGE_S:
            self._measure()
            refusal = self._admit(wanted)
        return refusal

    def _age(self) -> float:
        return time.monotonic() - self._measured

    def _admit(self, wanted: int) -> Outcome | None:
        try:
            free = self._free()
        except OSError:
            return Outcome.FAILED
        with self._lock:
            left = free - self._under_way
            refusal = Usage(self._used, self._capacity, left, self._reserve).refusal(wanted)
            if refusal is None:
                self._used += wanted
                self._written += wanted
                self._under_way += wanted
        return refusal

    def _settle(self, admitted: int) -> None:
        """Admitted bytes are written, or will never be: measuring sees what there is."""
        with self._lock:
            self._under_way -= admitted

    # Namespaces -------------------------------------------------------------

    def writer(self, namespace: Namespace) -> TargetWriter:
        directory = self._root / namespace.directory
        self.prepare()
        if self._root.is_dir():  # somebody may have emptied it, the marker included
            check_root(self._root, create=True)
        try:
            writer = self._start_writer(directory, namespace)
        except FileNotFoundError:  # a purge removed the empty directory just now
            writer = self._start_writer(directory, namespace)
        try:
            # After the writer's lock is there: a purge that empties the directory at
            # this very moment then leaves it alone or has its document replaced.
            _document(directory, namespace)
        except BaseException:
            writer.close()
            raise
        return writer

    def _start_writer(self, directory: Path, namespace: Namespace) -> SegmentWriter:
        return self._make_writer(SegmentWriter, directory, namespace)

    def _make_writer(
        self, kind: type[_Writer], directory: Path, namespace: Namespace, **options: Any
    ) -> _Writer:
        make_directory(directory)
        return kind(
            directory,
            namespace,
            direct=self.direct,
            allowance=self._allow,
            settled=self._settle,
            **options,
        )

    def reader(self, namespace: Namespace) -> TargetReader:
        self.prepare()
        return SegmentReader(self._root / namespace.directory, namespace, direct=self.direct)

    def directories(self) -> list[Path]:
        """The directories of the namespaces there are."""
        return self._directories()

    @staticmethod
    def allocated(directory: Path) -> int:
        """Bytes allocated by the files in a namespace's directory."""
        return sum(map(_allocated, _entries(directory)))

    @staticmethod
    def digest_of(directory: Path) -> bytes | None:
        """The digest of a namespace whose document is missing, as its files' headers say."""
        for entry, parsed in _files(directory):
            if parsed.kind != "journal":
                continue
            with contextlib.suppress(OSError, FormatError):
                header = _read_header(entry.path)
                if header.namespace.hex()[:32] == directory.name:
                    return header.namespace
        return None

    def _directories(self) -> list[Path]:
        try:
            with os.scandir(self._root) as listing:
                names = [
                    entry.name
                    for entry in listing
                    if NAMESPACE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return []
        return [self._root / name for name in sorted(names)]

    def namespaces(self) -> list[NamespaceInfo]:
        self.prepare()
        if not check_root(self._root, create=False):
            return []
        infos = [self._describe(directory) for directory in self._directories()]
        return sorted(infos, key=lambda info: (info.created, info.digest))

    def _describe(self, directory: Path) -> NamespaceInfo:
        problems: list[str] = []
        try:
            namespace = Namespace.from_json(read_document(directory / "namespace.json"))
            if namespace.directory != directory.name:
                raise FormatError(f"it names {namespace.hex}, whose directory is another one")
            digest, identity = namespace.hex, dict(namespace.identity)
            display = dict(namespace.display)
        except (OSError, LifeboatError) as exc:
            problems.append(f"namespace.json: {exc}")
            digest, identity, display = directory.name, {}, {}
        writers: dict[str, list[os.DirEntry[str]]] = {}
        for entry, parsed in _files(directory):
            if parsed.writer != SUMMARY_WRITER.hex():
                writers.setdefault(parsed.writer, []).append(entry)
        described = []
        for writer, files in sorted(writers.items()):
            info, problem = _describe_writer(directory, writer, files)
            described.append(info)
            if problem:
                problems.append(problem)
        return NamespaceInfo(digest, identity, display, tuple(described), tuple(problems))

    def purge(
        self, digest: str, *, older_than_s: float | None = None, dry_run: bool = False
    ) -> PurgeReport:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(
                f"{digest!r} is not a namespace digest: `lifeboat-cache ls` shows them"
            )
        self.prepare()
        report = PurgeReport()
        if not check_root(self._root, create=False):
            return report
        directory = self._root / digest[:32]
        writers: dict[str, list[os.DirEntry[str]]] = {}
        for entry, parsed in _files(directory):
            writers.setdefault(parsed.writer, []).append(entry)
        newest = self._now() - older_than_s if older_than_s is not None else None
        summary = writers.pop(SUMMARY_WRITER.hex(), [])
        for writer, files in sorted(writers.items()):
            if writer_alive(directory, writer):
                owner = lock_owner(directory, writer) or "a process that cannot be probed"
                report.kept.append((writer, f"in use by {owner}"))
                continue
            if any(_newer(Path(entry.path)) for entry in files):
                report.kept.append((writer, "written by a newer release: use that one to purge"))
                continue
            segments = any(entry.name.endswith(".segment") for entry in files)
            if newest is not None and not segments and max(map(_mtime, files)) > newest:
                report.kept.append((writer, "was active since then"))
                continue
            self._purge_writer(directory, writer, files, newest, report, dry_run)
        if not dry_run:
            left = {e.name for e in _entries(directory) if parse_name(e.name)}
            if left <= {entry.name for entry in summary}:  # of no use to anybody by now
                for entry in summary:
                    _unlink(Path(entry.path))
                _remove_namespace(directory, self._now())
        with self._lock:
            self._measured = -1.0
        return report

    def _now(self) -> float:
        """The time as files here have it; the oldest there is, if it cannot be known."""
        now = file_time(self._root)
        return 0.0 if now is None else now

    def _purge_writer(
        self,
        directory: Path,
        writer: str,
        files: list[os.DirEntry[str]],
        newest: float | None,
        report: PurgeReport,
        dry_run: bool,
    ) -> None:
        kinds = {entry.name: parse_name(entry.name) for entry in files}
        segments = [e for e in files if (p := kinds[e.name]) is not None and p.kind == "segment"]
        old = [e for e in segments if newest is None or _mtime(e) <= newest]
        blocks = _describe_writer(directory, writer, files)[0].blocks
        if len(old) == len(segments):
            others = [e for e in files if e not in segments]
            # The journal first: what it does not name is not served, so that a
            # purge that is killed half-way leaves nothing half-alive.
            others.sort(key=lambda e: not e.name.endswith(".journal"))
            doomed = [*others[:1], *old, *others[1:]]
            report.blocks += blocks
        else:
            doomed = list(old)
            for entry in old:
                parsed = kinds[entry.name]
                if parsed is None:
                    continue
                dead = segment_name(writer, parsed.segment, "dead")
                doomed += [e for e in files if e.name == dead]
            if segments:
                report.blocks += blocks * len(old) // len(segments)
                report.kept.append((writer, "holds newer segments"))
        for entry in doomed:
            report.files += 1
            report.bytes += _allocated(entry)
            if not dry_run:
                _unlink(Path(entry.path))


def _document(directory: Path, namespace: Namespace) -> None:
    """Make sure that a directory's ``namespace.json`` names ``namespace``."""
    document = directory / "namespace.json"
    try:
        known = Namespace.from_json(read_document(document))
    except NotAFileError as exc:
        raise TargetError(exc.errno, f"{document} is not a file: move it away") from exc
    except (FileNotFoundError, FormatError):
        write_atomically(document, namespace.to_json().encode() + b"\n")
        return
    if known != namespace:
        raise TargetError(
            errno.EEXIST,
            f"{directory} belongs to another namespace ({known.hex}): move it away",
        )


def _files(directory: Path) -> Iterator[tuple[os.DirEntry[str], FileName]]:
    """Our files in a namespace's directory; what else has such a name is left alone."""
    for entry in _entries(directory):
        parsed = parse_name(entry.name)
        with contextlib.suppress(OSError):
            if parsed is not None and entry.is_file(follow_symlinks=False):
                yield entry, parsed


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            yield from (entry for entry in listing if not entry.name.startswith(SILLY_RENAMES))
    except OSError:
        return


def _allocated(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def _mtime(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _read_header(path: str | Path) -> FileHeader:
    """A journal's header. Raises ``OSError`` or :class:`FormatError`."""
    fd = open_file(path)
    try:
        data = read_range(fd, HEADER_BYTES, 0)
    finally:
        close_file(fd)
    return FileHeader.unpack(data, MAGIC_JOURNAL, os.path.basename(path))


def _newer(path: Path) -> bool:
    """Whether a file of ours was written in a newer format."""
    if path.suffix == ".lock":
        return False
    try:
        _read_header(path)
    except NewerFormatError:
        return True
    except (OSError, FormatError):
        return False
    return False


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        # A process that still has the file open would keep its space otherwise.
        if path.suffix == ".segment":
            cut_file(path, 0)
        os.unlink(path)


def _remove_namespace(directory: Path, now: float) -> None:
    document = directory / "namespace.json"
    try:
        text = read_document(document)
        os.unlink(document)
    except OSError:
        text = b""
    with contextlib.suppress(OSError):
        os.unlink(directory / DEAD_GENERATION)
    for entry in _entries(directory):
        # A young one may belong to a writer that is just starting.
        stale = now - _mtime(entry) > _STALE_S
        if entry.name.startswith(".") and entry.name.endswith(".tmp") and stale:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
    try:
        os.rmdir(directory)
    except OSError:
        # A writer has started here in the meantime.
        with contextlib.suppress(OSError):
            if text and not is_gone(directory) and is_gone(document):
                write_atomically(document, text)


def _describe_writer(
    directory: Path, writer: str, files: list[os.DirEntry[str]]
) -> tuple[WriterInfo, str]:
    problem = ""
    blocks = segments = size = 0
    created = last_used = 0.0
    for entry in files:
        size += _allocated(entry)
        last_used = max(last_used, _mtime(entry))
        if entry.name.endswith(".segment"):
            segments += 1
        elif entry.name.endswith(".journal"):
            try:
                header = _read_header(entry.path)
                created = float(header.created)
                blocks = max(0, os.stat(entry.path).st_size - HEADER_BYTES) // ENTRY_BYTES
            except (OSError, FormatError) as exc:
                problem = str(exc)
    info = WriterInfo(
        writer,
        writer_alive(directory, writer),
        lock_owner(directory, writer),
        segments,
        blocks,
        size,
        created,
        last_used,
    )
    return info, problem

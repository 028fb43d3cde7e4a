"""A namespace's files: headers, journals, what belongs to whom, and what should not be there."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from lifeboat_cache.check.journals import Codes, Journal, scan_journal
from lifeboat_cache.check.repair import (
    cut_tail,
    fill_entries,
    put_header,
    remove_files,
    rewrite_accesses,
)
from lifeboat_cache.check.report import RUN_REPAIR, Finding, Level, NamespaceReport
from lifeboat_cache.errors import (
    ForeignDataError,
    FormatError,
    IdentityError,
    NewerFormatError,
)
from lifeboat_cache.format.access import ACCESS_BYTES, parse_accesses
from lifeboat_cache.format.header import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC_ACCESS,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.targets.files import close_file, open_file, read_document, read_range
from lifeboat_cache.targets.layout import (
    DEAD_GENERATION,
    SUMMARY_WRITER,
    FileName,
    parse_name,
    segment_name,
    write_atomically,
)
from lifeboat_cache.targets.server_clock import file_time
from lifeboat_cache.targets.writer_lock import writer_alive

__all__ = ["Survey", "Writer", "intact_document", "survey_namespace"]

#: A temporary file that is older than so many seconds was left by a killed process.
_STALE_S = 3600.0

#: No access log is longer: its process would have used a billion blocks.
_MOST_LOG_BYTES = 32 << 30

_MAGIC = {
    "journal": MAGIC_JOURNAL,
    "segment": MAGIC_SEGMENT,
    "dead": MAGIC_DEAD,
    "access": MAGIC_ACCESS,
}

#: A header, or why there is none.
Header = FileHeader | FormatError | OSError

_LATER = "run it again when the engine that writes it has ended"
_UPGRADE = "upgrade lifeboatcache-core to check it"
_MOVE = "move it elsewhere"


@dataclass
class Writer:
    """One writer's files.

    Attributes
    ----------
    alive
        Whether it was alive before its journal was read.
    sure
        Whether everything that its journal can name is known.
    orphans
        Segments that nothing names.
    """

    name: str
    alive: bool
    files: dict[str, FileName] = field(default_factory=dict)
    headers: dict[str, Header] = field(default_factory=dict)
    journal: Journal | None = None
    sure: bool = True
    newer: bool = False
    orphans: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether its files may be changed: it is dead, and of no newer release."""
        return not self.alive and not self.newer

    def fault(
        self, kind: str, detail: str, fix: Callable[[], None] | None = None, count: int = 1
    ) -> Finding:
        """A fault in one of its files; repaired by ``fix``, if they may be changed."""
        if self.ended and fix is not None:
            return Finding(kind, "fault", "", detail, RUN_REPAIR, count, fix=fix)
        return Finding(kind, "fault", "", detail, _LATER if self.alive else _UPGRADE, count)

    @property
    def id(self) -> bytes:
        """The writer's 16 bytes."""
        return bytes.fromhex(self.name)

    @property
    def segments(self) -> set[int]:
        """Numbers of the segments that are there."""
        return {parsed.segment for parsed in self.files.values() if parsed.kind == "segment"}

    def of_kind(self, kind: str) -> str | None:
        """Name of its journal, lock or access log if that is there."""
        name = f"{self.name}.{kind}"
        return name if name in self.files else None


@dataclass
class Survey:
    """What is known of a namespace before payloads are read."""

    directory: Path
    report: NamespaceReport
    writers: list[Writer] = field(default_factory=list)
    digest: bytes | None = None
    tombstones: dict[bytes, Codes] = field(default_factory=dict)
    payload_bytes: int = 0

    def find(self, name: str, finding: Finding) -> None:
        """Add a finding about a file of the namespace."""
        finding.path = f"{self.directory.name}/{name}"
        self.report.findings.append(finding)


def intact_document(directory: Path) -> Namespace | None:
    """A namespace directory's document, if it is intact and belongs there."""
    try:
        namespace = Namespace.from_json(read_document(directory / "namespace.json"))
    except (OSError, FormatError, IdentityError):
        return None
    return namespace if namespace.directory == directory.name else None


def survey_namespace(
    directory: Path,
    known: Callable[[str], Namespace | None],
    stop: threading.Event,
) -> Survey:
    """Look at all files of a namespace but the payloads.

    Parameters
    ----------
    directory
        The namespace's directory.
    known
        Finds an intact document of the same namespace elsewhere, by directory name.
    stop
        Ends it early.

    Raises
    ------
    OSError
        If the directory cannot be listed.
    """
    survey = Survey(directory, NamespaceReport(directory.name))
    writers: dict[str, Writer] = {}
    with os.scandir(directory) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        parsed = parse_name(entry.name)
        if parsed is not None and entry.is_file(follow_symlinks=False):
            writer = writers.get(parsed.writer)
            if writer is None:
                # Before its journal is read: what a dead writer left is final.
                alive = writer_alive(directory, parsed.writer)
                writer = writers[parsed.writer] = Writer(parsed.writer, alive)
            writer.files[entry.name] = parsed
        elif entry.name not in ("namespace.json", DEAD_GENERATION):
            _stranger(survey, entry)
    survey.writers = list(writers.values())
    survey.report.writers = len(writers.keys() - {SUMMARY_WRITER.hex()})
    survey.report.alive = sum(writer.alive for writer in survey.writers)
    for writer in survey.writers:
        for name, parsed in writer.files.items():
            if parsed.kind != "lock":
                writer.headers[name] = _header(directory / name, _MAGIC[parsed.kind])
    document = intact_document(directory)
    survey.digest = document.digest if document else _digest_of_headers(survey)
    if survey.digest is not None:
        survey.report.digest = survey.digest.hex()
    if document is None:
        _check_document(survey, known)
    for writer in survey.writers:
        _check_newer(survey, writer)
    if survey.digest is None:
        return survey
    for writer in survey.writers:
        if stop.is_set():
            return survey
        _check_journal(survey, writer, survey.digest, stop)
        if stop.is_set():  # what its journal names is not all known
            return survey
        _check_orphans(survey, writer)
        _check_bitmaps(survey, writer, survey.digest)
        _check_accesses(survey, writer, survey.digest)
    survey.tombstones = _all_tombstones(survey)
    return survey


def _header(path: Path, magic: bytes) -> Header:
    try:
        fd = open_file(path)
        try:
            data = read_range(fd, HEADER_BYTES, 0)
        finally:
            close_file(fd)
        return FileHeader.unpack(data, magic, path.name)
    except (FormatError, OSError) as error:
        return error


def _stranger(survey: Survey, entry: os.DirEntry[str]) -> None:
    if entry.name.startswith("."):
        try:
            now = file_time(survey.directory.parent) or 0.0
            age = now - entry.stat(follow_symlinks=False).st_mtime
        except OSError:
            return
        if entry.name.endswith(".tmp") and age > _STALE_S:
            fix = partial(remove_files, [Path(entry.path)])
            detail = "a killed process left it on its way to its name"
            survey.find(entry.name, Finding("temporary-file", "leftover", "", detail, fix=fix))
        return
    detail = "not a file of LifeboatCache"
    survey.find(entry.name, Finding("foreign-file", "fault", "", detail, _MOVE))


def _digest_of_headers(survey: Survey) -> bytes | None:
    votes = Counter(
        header.namespace
        for writer in survey.writers
        for header in writer.headers.values()
        if isinstance(header, FileHeader) and header.namespace.hex()[:32] == survey.directory.name
    )
    return votes.most_common(1)[0][0] if votes else None


def _check_document(survey: Survey, known: Callable[[str], Namespace | None]) -> None:
    path = survey.directory / "namespace.json"
    try:
        text: bytes | None = read_document(path)
    except FileNotFoundError:
        text = None
        stored = any(
            name.kind == "segment" for writer in survey.writers for name in writer.files.values()
        )
        if not stored or any(writer.alive for writer in survey.writers):
            # Nothing that needs it, or a writer that is just starting, or died so.
            return
    except OSError as error:
        detail = f"it cannot be read ({error.strerror})"
        remedy = "check the disk and the permissions"
        survey.find(path.name, Finding("namespace-document", "fault", "", detail, remedy))
        return
    namespace = known(survey.directory.name)
    if text is not None:
        try:
            found = json.loads(text)
            if isinstance(found, dict) and int(found.get("format", 1)) > FORMAT_VERSION:
                detail = "written in a newer format"
                survey.find(path.name, Finding("newer-format", "skipped", "", detail, _UPGRADE))
                return
            display = found.get("display")
            whole = Namespace.from_identity(
                found["identity"], display if isinstance(display, dict) else None
            )
            # Whatever is wrong with the rest, an identity with this digest is the right one.
            if whole.directory == survey.directory.name:
                namespace = whole
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
    detail = "the namespace's document is " + ("missing" if text is None else "damaged")
    if namespace is not None and survey.digest in (None, namespace.digest):
        data = namespace.to_json().encode() + b"\n"
        fix = partial(write_atomically, path, data)
        survey.digest = namespace.digest
        survey.report.digest = namespace.hex
        survey.find(path.name, Finding("namespace-document", "fault", "", detail, fix=fix))
    elif survey.digest is not None:
        remedy = (
            "start an engine with this model and configuration, which writes it anew, "
            "or purge the namespace; blocks are served meanwhile"
        )
        survey.find(path.name, Finding("namespace-document", "fault", "", detail, remedy))
    else:
        detail += ", and no header says whose namespace it is: its records cannot be checked"
        remedy = f"run: lifeboat-cache purge --namespace {survey.directory.name}"
        survey.find(path.name, Finding("namespace-document", "fault", "", detail, remedy))


def _check_newer(survey: Survey, writer: Writer) -> None:
    newer = [n for n, h in writer.headers.items() if isinstance(h, NewerFormatError)]
    if newer:
        writer.newer = True
        survey.find(
            newer[0],
            Finding(
                "newer-format",
                "skipped",
                "",
                "written in a newer format; it and its records are not judged",
                _UPGRADE,
                count=len(newer),
            ),
        )


def _check_journal(survey: Survey, writer: Writer, digest: bytes, stop: threading.Event) -> None:
    name = writer.of_kind("journal")
    if name is None:
        return
    path = survey.directory / name
    header = writer.headers[name]
    if isinstance(header, NewerFormatError):
        writer.sure = False
        return
    if isinstance(header, FileHeader) and (header.namespace, header.writer) != (digest, writer.id):
        writer.sure = False
        detail = "its header names another writer or namespace: nobody reads it"
        survey.find(name, Finding("journal-header", "fault", "", detail, _MOVE))
        return
    journal = None
    if not isinstance(header, OSError):
        try:
            journal = scan_journal(path, writer.id, digest, alive=writer.alive, stop=stop)
        except OSError as error:
            header = error
    if stop.is_set():
        return
    if isinstance(header, OSError):
        writer.sure = False
        _unreadable(survey, name, header)
        return
    if journal is None:
        return
    if isinstance(header, FormatError) and not _damaged_journal(
        survey, writer, name, header, journal, digest
    ):
        return
    writer.journal = journal
    survey.payload_bytes += journal.payload_bytes
    if journal.bad:
        detail = f"{len(journal.bad)} entries whose checksum is wrong: their blocks are lost"
        fix = partial(fill_entries, path, writer.id, digest, journal.bad)
        survey.find(name, writer.fault("journal-entry", detail, fix, len(journal.bad)))
    if journal.torn and writer.ended:
        detail = "the process was killed while it wrote the last entry"
        fix = partial(cut_tail, path, journal.entries)
        survey.find(name, Finding("journal-tail", "leftover", "", detail, fix=fix))


def _damaged_journal(
    survey: Survey,
    writer: Writer,
    name: str,
    error: FormatError,
    journal: Journal,
    digest: bytes,
) -> bool:
    """Judge a journal without an intact header; whether its entries count."""
    path = survey.directory / name
    if journal.good:
        # Entries that fit this writer and namespace: it is what its name says.
        fix = partial(put_header, path, MAGIC_JOURNAL, digest, writer.id)
        detail = "the header is damaged: nobody reads it"
        survey.find(name, writer.fault("journal-header", detail, fix))
        return True
    if isinstance(error, ForeignDataError):
        writer.sure = False
        detail = "not a file of LifeboatCache"
        survey.find(name, Finding("foreign-file", "fault", "", detail, _MOVE))
    elif not writer.alive:
        detail = "the header is damaged, and there is no intact entry"
        fix = partial(remove_files, [path])
        survey.find(name, writer.fault("journal-header", detail, fix))
    elif journal.size >= HEADER_BYTES:  # shorter: it is just being made
        survey.find(name, writer.fault("journal-header", "the header is damaged"))
    return False


def _unreadable(survey: Survey, name: str, error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return  # purged since it was listed
    detail = f"it cannot be read ({error.strerror})"
    remedy = "check the disk and the permissions"
    survey.find(name, Finding("unreadable-file", "fault", "", detail, remedy))


def _check_orphans(survey: Survey, writer: Writer) -> None:
    if not writer.ended or not writer.sure:
        return
    named = writer.journal.named if writer.journal is not None else set()
    journal = survey.directory / f"{writer.name}.journal"
    unless = journal if writer.of_kind("journal") is None else None
    for number in sorted(writer.segments - named):
        name = segment_name(writer.name, number)
        header = writer.headers[name]
        if isinstance(header, NewerFormatError):
            continue
        if isinstance(header, OSError):
            _unreadable(survey, name, header)
        elif isinstance(header, ForeignDataError):
            detail = "not a file of LifeboatCache"
            survey.find(name, Finding("foreign-file", "fault", "", detail, _MOVE))
        else:
            writer.orphans.add(number)
            paths = [
                survey.directory / segment_name(writer.name, number, kind)
                for kind in ("segment", "dead")
            ]
            fix = partial(remove_files, paths, unless)
            detail = "no journal entry names it: it holds space that nobody uses"
            # With an intact journal: the process was killed before its first entry. Cut:
            # a purge was killed, which removes the journal first.
            cut = isinstance(header, FormatError) and _is_cut(paths[0])
            level: Level = "fault" if writer.journal is None and not cut else "leftover"
            survey.find(name, Finding("segment-orphaned", level, "", detail, fix=fix))


def _is_cut(path: Path) -> bool:
    try:
        return os.lstat(path).st_size < HEADER_BYTES
    except OSError:
        return False


def _check_bitmaps(survey: Survey, writer: Writer, digest: bytes) -> None:
    for name, parsed in writer.files.items():
        if parsed.kind != "dead":
            continue
        header = writer.headers[name]
        if isinstance(header, NewerFormatError):
            continue
        if isinstance(header, OSError):
            _unreadable(survey, name, header)
            continue
        if isinstance(header, ForeignDataError):
            detail = "not a file of LifeboatCache"
            survey.find(name, Finding("foreign-file", "fault", "", detail, _MOVE))
            continue
        if isinstance(header, FileHeader):
            stated = (header.namespace, header.writer, header.segment)
            if stated == (digest, writer.id, parsed.segment):
                continue
            detail = "its header names another segment: nobody reads it"
        else:
            detail = "the header is damaged: nobody reads it"
        # Readers ignore it already; what is dead by it and reclaimed is found bad.
        fix = partial(remove_files, [survey.directory / name])
        survey.find(name, writer.fault("dead-bitmap", detail, fix))


def _check_accesses(survey: Survey, writer: Writer, digest: bytes) -> None:
    name = writer.of_kind("access")
    if name is None or writer.alive:
        return
    path = survey.directory / name
    header = writer.headers[name]
    if isinstance(header, NewerFormatError):
        return
    if isinstance(header, ForeignDataError):
        detail = "not a file of LifeboatCache"
        survey.find(name, Finding("foreign-file", "fault", "", detail, _MOVE))
        return
    try:
        body = read_document(path, _MOST_LOG_BYTES)[HEADER_BYTES:]
    except OSError as error:
        _unreadable(survey, name, error)
        return
    whole = len(body) // ACCESS_BYTES
    table = np.frombuffer(body, dtype=np.uint8, count=whole * ACCESS_BYTES)
    # What a janitor has folded reads as zeros.
    written = int(table.reshape(whole, ACCESS_BYTES).any(axis=1).sum())
    bad = written - parse_accesses(body).shape[0]
    right = isinstance(header, FileHeader) and (header.namespace, header.writer) == (
        digest,
        writer.id,
    )
    if right and not bad:
        return
    detail = "the header is damaged" if not right else f"{bad} entries whose checksum is wrong"
    fix = partial(rewrite_accesses, path, digest, writer.id)
    survey.find(name, writer.fault("access-log", detail, fix, max(1, bad)))


def _all_tombstones(survey: Survey) -> dict[bytes, Codes]:
    gathered: dict[bytes, list[Codes]] = {}
    for writer in survey.writers:
        if writer.journal is not None:
            for owner, parts in writer.journal.tombstones.items():
                gathered.setdefault(owner, []).extend(parts)
    return {owner: np.unique(np.concatenate(parts)) for owner, parts in gathered.items()}

"""What servers have stored below a home directory, read from its files."""

from __future__ import annotations

from pathlib import Path

from lifeboat_cache.format.header import HEADER_BYTES, MAGIC_JOURNAL, FileHeader
from lifeboat_cache.format.journal import KIND_RECORD, Entries, parse_entries

__all__ = ["algorithms", "journal_entries", "stored_files"]


def stored_files(home: Path, kind: str) -> list[Path]:
    """Return the files of a kind (``journal``, ``segment``, …) in the home's own store."""
    return sorted((home / "kv").rglob(f"*.{kind}"))


def journal_entries(journal: Path) -> Entries:
    """Return all entries of a journal, none of which may be bad."""
    data = journal.read_bytes()
    header = FileHeader.unpack(data, MAGIC_JOURNAL)
    entries, bad = parse_entries(data[HEADER_BYTES:], header.writer, 0, header.namespace)
    assert bad == 0
    return entries


def algorithms(home: Path) -> set[int]:
    """Return the checksum algorithms of the records that are stored."""
    found: set[int] = set()
    for journal in stored_files(home, "journal"):
        entries = journal_entries(journal)
        found.update(entries["algorithm"][entries["kind"] == KIND_RECORD].tolist())
    return found

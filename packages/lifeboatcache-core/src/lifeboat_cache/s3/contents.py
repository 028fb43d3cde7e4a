"""What a bucket holds, for people, and how it is removed."""

from __future__ import annotations

from collections import defaultdict

from lifeboat_cache.errors import FormatError, LifeboatError
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.names import FeedName
from lifeboat_cache.s3.slices import blocks_of
from lifeboat_cache.targets.base import NamespaceInfo, PurgeReport, WriterInfo

__all__ = ["describe", "purge"]


def describe(archive: Archive, folder: str) -> NamespaceInfo:
    """What there is of one namespace. Raises ``S3Error``."""
    problems: list[str] = []
    digest, identity, display = folder, {}, {}
    try:
        namespace = Namespace.from_json(archive.client.get(archive.names.document(folder)))
        if namespace.directory != folder:
            raise FormatError(f"it names {namespace.hex}, whose directory is another one")
        digest, identity = namespace.hex, dict(namespace.identity)
        display = dict(namespace.display)
    except LifeboatError as exc:
        problems.append(f"namespace.json: {exc}")
    writers: dict[bytes, list[tuple[FeedName, int]]] = defaultdict(list)
    for name, size in archive.feed(folder).items():
        if name.kind == "journal":
            writers[name.writer].append((name, size))
    described = [
        WriterInfo(
            writer=writer.hex(),
            # Nobody writes to what is in a bucket.
            alive=False,
            owner="",
            segments=len({name.number for name, _ in names}),
            blocks=sum(blocks_of(size) for _, size in names),
            bytes=sum({name.number: name.size for name, _ in names}.values()),
            created=float(min(name.time for name, _ in names)),
            last_used=float(max(name.time for name, _ in names)),
        )
        for writer, names in sorted(writers.items())
    ]
    return NamespaceInfo(digest, identity, display, tuple(described), tuple(problems))


def purge(
    archive: Archive, digest: str, *, older_than_s: float | None, dry_run: bool
) -> PurgeReport:
    """Remove segments of a namespace; see :meth:`Target.purge`. Raises ``S3Error``."""
    folder = digest[:32]
    report = PurgeReport()
    feed = archive.feed(folder)
    newest = None if older_than_s is None else archive.client.now() - older_than_s
    old = {name: size for name, size in feed.items() if newest is None or name.time <= newest}
    places = {(name.writer, name.number): name.size for name in old if name.kind == "journal"}
    report.blocks = sum(blocks_of(size) for name, size in old.items() if name.kind == "journal")
    report.bytes = sum(places.values()) + sum(old.values())
    report.files = len(places) + len(old)
    if dry_run:
        return report
    archive.remove_from(folder, sorted(places), list(old))
    return report

"""An object store as a storage target."""

from __future__ import annotations

from typing import Any, Literal

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.s3.archive import Archive, archive_of
from lifeboat_cache.s3.contents import describe, purge
from lifeboat_cache.s3.reader import S3Reader
from lifeboat_cache.s3.settings import S3Settings, S3Tier
from lifeboat_cache.targets.base import (
    NamespaceInfo,
    PurgeReport,
    Target,
    TargetReader,
    TargetWriter,
    Usage,
)

__all__ = ["S3Target"]


class S3Target(Target):
    """Segments and journals in a bucket.

    Parameters
    ----------
    settings
        Which bucket.
    """

    type = "s3"

    def __init__(self, settings: S3Settings) -> None:
        self.name = settings.name
        self._settings = settings
        self._archive: Archive | None = None

    @classmethod
    def from_tier(cls, tier: S3Tier) -> S3Target:
        """From a tier of the configuration."""
        return cls.of(S3Settings.from_tier(tier), tier.rung)

    @classmethod
    def of(
        cls, settings: S3Settings, rung: Literal["local", "shared", "archive"] | None
    ) -> S3Target:
        """A bucket on a rung."""
        target = cls(settings)
        target.rung = rung
        return target

    @property
    def archive(self) -> Archive:
        """What this process knows of the bucket."""
        if self._archive is None:
            self._archive = archive_of(self._settings)
        return self._archive

    @property
    def location(self) -> str:
        return self._settings.location

    @property
    def capacity(self) -> int | None:
        """Bytes that all hosts together may keep in the bucket; ``None`` = no limit."""
        return self._settings.capacity

    @property
    def reserve(self) -> int:
        """Bytes that the local file system must keep free."""
        return self._settings.reserve

    @property
    def direct_io(self) -> Literal["auto", "on", "off"]:
        """Of staged files."""
        return self._settings.direct_io

    @property
    def special(self) -> dict[str, Any]:
        return {"s3": self.archive.facts()}

    def probe(self) -> None:
        self.archive.probe()

    def usage(self) -> Usage:
        archive = self.archive
        local = archive.staging.usage()
        return Usage(archive.used(), self._settings.capacity, local.free, local.reserve)

    def writer(self, namespace: Namespace) -> TargetWriter:
        return self.archive.staging.writer(namespace)

    def reader(self, namespace: Namespace) -> TargetReader:
        return S3Reader(self.archive, namespace)

    def namespaces(self) -> list[NamespaceInfo]:
        archive = self.archive
        archive.client.check_bucket()
        infos = [describe(archive, folder) for folder in archive.namespaces()]
        # What was purged has left nothing but a note for other hosts.
        infos = [info for info in infos if info.identity or info.writers]
        return sorted(infos, key=lambda info: (info.created, info.digest))

    def purge(
        self, digest: str, *, older_than_s: float | None = None, dry_run: bool = False
    ) -> PurgeReport:
        return purge(self.archive, digest, older_than_s=older_than_s, dry_run=dry_run)

"""What a tier of type ``s3`` is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

__all__ = ["S3Settings", "S3Tier"]


class S3Tier(Protocol):
    """The part of a tier's configuration that concerns an object store."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def bucket(self) -> str | None: ...
    @property
    def endpoint_url(self) -> str | None: ...
    @property
    def region(self) -> str | None: ...
    @property
    def prefix(self) -> str: ...
    @property
    def sse(self) -> str | None: ...
    @property
    def sse_kms_key_id(self) -> str | None: ...
    @property
    def capacity_bytes(self) -> int | None: ...
    @property
    def staging_bytes(self) -> int: ...
    @property
    def min_free_bytes(self) -> int: ...
    @property
    def direct_io(self) -> Literal["auto", "on", "off"]: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def rung(self) -> Literal["local", "shared", "archive"] | None: ...


@dataclass(frozen=True)
class S3Settings:
    """A bucket, and the local directory in front of it.

    Attributes
    ----------
    name
        Of the tier.
    path
        The local directory.
    bucket, endpoint_url, region, sse, sse_kms_key_id
        See :class:`~lifeboat_cache.s3.client.S3Client`.
    prefix
        What the names of all objects begin with; without slashes at its ends.
    capacity
        Bytes that all hosts together may keep in the bucket; ``None`` = no limit.
    staging
        Bytes that may wait to be uploaded.
    reserve
        Bytes that the local file system must keep free.
    direct_io
        Of local files.
    timeout_s
        A load that takes longer is given up.
    """

    name: str
    path: Path
    bucket: str
    endpoint_url: str | None = None
    region: str | None = None
    prefix: str = ""
    sse: str | None = None
    sse_kms_key_id: str | None = None
    capacity: int | None = None
    staging: int = 20_000_000_000
    reserve: int = 0
    direct_io: Literal["auto", "on", "off"] = "auto"
    timeout_s: float = 10.0

    @classmethod
    def from_tier(cls, tier: S3Tier) -> S3Settings:
        """From a tier of the configuration."""
        if tier.bucket is None:
            raise ValueError(f"tier {tier.name} has no bucket: set the tier's bucket")
        return cls(
            name=tier.name,
            path=tier.path,
            bucket=tier.bucket,
            endpoint_url=tier.endpoint_url,
            region=tier.region,
            prefix=tier.prefix,
            sse=tier.sse,
            sse_kms_key_id=tier.sse_kms_key_id,
            capacity=tier.capacity_bytes,
            staging=tier.staging_bytes,
            reserve=tier.min_free_bytes,
            direct_io=tier.direct_io,
            timeout_s=tier.timeout_s,
        )

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for settings of one place; what else they say may change while it is used."""
        return (
            self.path,
            self.bucket,
            (self.endpoint_url or "").rstrip("/"),
            self.region,
            self.prefix.strip("/"),
        )

    @property
    def location(self) -> str:
        """Where it is, for people."""
        trimmed = self.prefix.strip("/")
        where = f"s3://{self.bucket}" + (f"/{trimmed}" if trimmed else "")
        return where + (f" at {self.endpoint_url}" if self.endpoint_url else "")

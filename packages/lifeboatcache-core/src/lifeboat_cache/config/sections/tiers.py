"""The tiers of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from lifeboat_cache.config.sections.base import Key, Section, SettingError
from lifeboat_cache.config.sections.values import (
    MAX_WAIT_S,
    AbsolutePath,
    Capacity,
    Reserve,
    Switch,
    to_seconds,
    to_switch,
)
from lifeboat_cache.config.units import DURATION_EXAMPLES

__all__ = ["FALLBACK_NAME", "Tier"]

#: The name under which ``storage.fallback_local`` shows among the tiers.
FALLBACK_NAME = "fallback_local"


def _file_mode(value: object) -> object:
    # YAML reads 0660 as an octal number, and 660 as a decimal one.
    if isinstance(value, int) and not isinstance(value, bool):
        return f"0{value}" if value in (600, 640, 660) else f"{value:04o}"
    return value


def _group(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Tier(Section):
    """One place to keep KV in."""

    name: Annotated[
        str,
        Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$"),
        Key(
            allowed="up to 64 lower-case letters, digits, '_', '-' and '.', "
            f"starting with a letter or digit; unique; not '{FALLBACK_NAME}'",
            example="nvme",
        ),
    ] = Field(description="How the tier is called in logs, metrics and commands.")
    type: Annotated[
        Literal["filesystem", "nfs", "ontap", "s3"],
        Key(allowed="filesystem, nfs, ontap or s3", example="filesystem"),
    ] = Field(
        description="What kind of storage the tier is. `filesystem`: a directory. `nfs`: a "
        "directory on an NFS mount, which other hosts may use too. `ontap`: the same on a volume "
        "of NetApp ONTAP. `s3`: a bucket of an S3-compatible object store, which needs "
        "`lifeboatcache-core[s3]`."
    )
    enabled: Switch = Field(
        default=True, description="Whether the tier is used. Its data stays where it is."
    )
    path: AbsolutePath = Field(
        description="The directory. Made on first use, readable by its owner only. Of `s3` it is a "
        "directory on a local disk in which blocks wait to be uploaded; without it "
        "`$LIFEBOAT_CACHE_HOME/s3/` and the tier's name.",
    )
    bucket: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{1,254}$"),
            Key(allowed="the name of a bucket", example="kv-cache"),
        ]
        | None
    ) = Field(default=None, description="Of `s3`: the bucket. It must be there.")
    region: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9-]{1,64}$"),
            Key(allowed="the name of a region", example="eu-central-1"),
        ]
        | None
    ) = Field(
        default=None,
        description="Of `s3`: the bucket's region. Without it, what boto3 is configured to use.",
    )
    endpoint_url: (
        Annotated[
            str,
            Field(pattern=r"^https?://[^\s/@?#]+/?$"),
            Key(
                allowed="an address that begins with http:// or https://",
                example="https://s3.example.com",
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Of `s3`: where the server is, if it is not AWS. Credentials come from boto3's "
        "standard chain only (environment, `~/.aws`, the machine's role).",
    )
    prefix: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9!_.*'()/-]{0,256}$"),
        Key(allowed="up to 256 characters that object names may have", example="llm/kv"),
    ] = Field(
        default="",
        description="Of `s3`: what the names of all objects begin with. Hosts with the same bucket "
        "and prefix share what they store.",
    )
    sse: (
        Annotated[
            Literal["AES256", "aws:kms", "aws:kms:dsse"],
            Key(allowed="AES256, aws:kms or aws:kms:dsse", example="aws:kms"),
        ]
        | None
    ) = Field(
        default=None,
        description="Of `s3`: how the server is asked to encrypt what it keeps. Without it, as the "
        "bucket is configured.",
    )
    sse_kms_key_id: (
        Annotated[
            str,
            Field(pattern=r"^\S{1,2048}$"),
            Key(allowed="the identifier of a key", example="alias/kv-cache"),
        ]
        | None
    ) = Field(default=None, description="Of `s3`: the key for `sse: aws:kms`.")
    staging_gb: Capacity = Field(
        default=20.0,
        description="Of `s3`: the most that may wait in `path` to be uploaded. Beyond it blocks "
        "are dropped (`busy`).",
    )
    mount: AbsolutePath | None = Field(
        default=None,
        description="The mount point that `path` is on. While nothing is mounted there the tier is "
        "not usable, and nothing is written into the empty directory beneath.",
    )
    protocol: (
        Annotated[
            Literal["nfs", "pnfs", "pnfs_rdma"],
            Key(allowed="nfs, pnfs or pnfs_rdma", example="nfs"),
        ]
        | None
    ) = Field(
        default=None,
        description="How the mount is meant to be: `nfs`: NFS of any version from 3 on. `pnfs`: "
        "version 4.1 or later with a layout driver. `pnfs_rdma`: the same over RDMA. What is "
        "mounted otherwise is used, and `lifeboat-cache doctor` and `status` say what to change.",
    )
    file_mode: Annotated[
        Literal["0600", "0640", "0660"],
        BeforeValidator(_file_mode),
        Key(allowed="0600, 0640 or 0660", example='"0600"'),
    ] = Field(
        default="0600",
        description="Of the files that are made here. `0660`: all users of `group` may share "
        "them; each of them needs that to store, evict and delete. Directories follow.",
    )
    group: (
        Annotated[
            str,
            BeforeValidator(_group),
            Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$"),
            Key(allowed="the name or number of a group", example="kvcache"),
        ]
        | None
    ) = Field(
        default=None,
        description="The group of the files that are made here. The process must be a member.",
    )
    rung: (
        Annotated[
            Literal["local", "shared", "archive"],
            Key(allowed="local, shared or archive", example="shared"),
        ]
        | None
    ) = Field(
        default=None,
        description="How fast the tier is, compared with others: which codec it uses "
        "(`compression.ladder`), and which of several copies is read. Without it its type decides: "
        "`local` for `filesystem`, `shared` for `nfs` and `ontap`, `archive` for `s3`.",
    )
    capacity_gb: Capacity | None = Field(
        default=None,
        description="The most that all engines together keep here. Without it only "
        "`min_free_gb` limits the store.",
    )
    min_free_gb: Reserve = Field(
        default=10.0,
        description="Free space that is left on the file system for others. "
        "Below it nothing more is stored.",
    )
    direct_io: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(to_switch),
        Key(allowed="auto, on or off", example="auto"),
    ] = Field(
        default="auto",
        description="Whether the page cache is bypassed (O_DIRECT). `auto`: where the file "
        "system takes it and is not itself memory; mlx-lm, which keeps nothing in memory itself, "
        "leaves what it stores in the page cache all the same. `on`: a file system that does not "
        "take it makes the tier unusable.",
    )

    timeout_s: Annotated[
        float,
        BeforeValidator(to_seconds),
        Field(ge=0.1, le=MAX_WAIT_S, allow_inf_nan=False),
        Key(
            allowed=f"0.1 to {MAX_WAIT_S} seconds, a number of seconds or with a unit: "
            f"{DURATION_EXAMPLES}",
            example="10s",
            unit="s",
        ),
    ] = Field(
        default=10.0,
        description="How long a transfer may take on a tier that can hang (a network or unknown "
        "file system) or has a bandwidth limit. What takes longer is given up: a block to be "
        "loaded is computed, one to be stored is dropped. Transfers to other tiers always end.",
    )
    bandwidth_limit_gbps: (
        Annotated[
            float,
            Field(gt=0, allow_inf_nan=False),
            Key(allowed="above 0, a number of gigabits per second", example="10.0", unit="Gbit/s"),
        ]
        | None
    ) = Field(
        default=None,
        description="The most that all engines of this node together move to and from the tier, "
        "counted as KV before it is encoded. Loads go before stores. Without it there is no limit.",
    )

    @property
    def bandwidth_limit_bytes(self) -> float | None:
        """The bandwidth limit in bytes per second, or None for none."""
        limit = self.bandwidth_limit_gbps
        return None if limit is None else limit * 1e9 / 8

    @property
    def staging_bytes(self) -> int:
        """What may wait to be uploaded, in bytes."""
        return round(self.staging_gb * 1e9)

    @property
    def location(self) -> str:
        """Where its blocks are, for people."""
        if self.type != "s3":
            return str(self.path)
        trimmed = self.prefix.strip("/")
        where = f"s3://{self.bucket}" + (f"/{trimmed}" if trimmed else "")
        return where + (f" at {self.endpoint_url}" if self.endpoint_url else "")

    @model_validator(mode="before")
    @classmethod
    def _stage(cls, data: object) -> object:
        """Give a bucket its local directory."""
        if isinstance(data, dict) and data.get("type") == "s3" and data.get("path") is None:
            return {**data, "path": f"$LIFEBOAT_CACHE_HOME/s3/{data.get('name')}"}
        return data

    @model_validator(mode="after")
    def _whole(self) -> Tier:
        if self.type != "s3":
            return self
        if self.bucket is None:
            raise SettingError(("bucket",), "a tier of type s3 needs one: write the bucket's name")
        if self.sse_kms_key_id is not None and not str(self.sse).startswith("aws:kms"):
            raise SettingError(
                ("sse_kms_key_id",), "a key is used with `sse: aws:kms` only: set that too"
            )
        return self

    @property
    def file_mode_bits(self) -> int:
        """The mode of files as a number."""
        return int(self.file_mode, 8)

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity in bytes, or None for no limit of its own."""
        return None if self.capacity_gb is None else round(self.capacity_gb * 1e9)

    @property
    def min_free_bytes(self) -> int:
        """The free-space reserve in bytes."""
        return round(self.min_free_gb * 1e9)

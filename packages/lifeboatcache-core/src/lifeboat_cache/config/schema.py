"""The configuration schema.

Each key carries its unit, what it allows, an example and its description. Error
messages, ``lifeboat-cache init`` and ``docs/configuration.md`` are made from them.
Values keep the unit their name ends in; properties give bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from lifeboat_cache.codecs.names import ALIASES, AUTO, CODEC_NAMES, CodecName
from lifeboat_cache.config.nearest import nearest
from lifeboat_cache.config.paths import Places
from lifeboat_cache.config.units import (
    AGE_EXAMPLES,
    DURATION_EXAMPLES,
    SIZE_EXAMPLES,
    parse_duration,
    parse_size,
)

__all__ = [
    "FALLBACK_NAME",
    "Agent",
    "Compression",
    "Config",
    "Dashboard",
    "Engine",
    "Eviction",
    "FallbackLocal",
    "Key",
    "Prometheus",
    "Rungs",
    "Section",
    "Security",
    "SettingError",
    "Storage",
    "Telemetry",
    "Tier",
]

#: The name under which ``storage.fallback_local`` shows among the tiers.
FALLBACK_NAME = "fallback_local"

_MAX_GB = 1_000_000
_MAX_WAIT_S = 600
_MAX_AGE_S = 10 * 366 * 86400


@dataclass(frozen=True)
class Key:
    """What a key takes, for people.

    Attributes
    ----------
    allowed
        The values it accepts.
    example
        One of them, as written in YAML.
    unit
        The unit of a plain number, or empty.
    restart
        Whether a change is only seen by engines started afterwards.
    secret
        Whether the value must never be shown.
    """

    allowed: str
    example: str
    unit: str = ""
    restart: bool = True
    secret: bool = False


class SettingError(ValueError):
    """A problem that a section finds in one of its keys.

    Attributes
    ----------
    path
        The key, from the section that raises.
    """

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _gigabytes(value: object) -> object:
    if isinstance(value, str):
        gigabytes = parse_size(value, plain=10**9) / 1e9
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        gigabytes = _float(value)
    else:
        raise ValueError(f"{value!r} is not a size")
    if gigabytes > _MAX_GB:
        raise ValueError(f"{value!r} is more than {_MAX_GB:,} GB; a plain number is in GB")
    return gigabytes


def _seconds(value: object) -> object:
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _float(value)
    raise ValueError(f"{value!r} is not a duration")


def _age(value: object) -> object:
    # Whoever writes 30 may mean days, and would lose what is older than half a minute.
    plain = str(value).strip() if isinstance(value, (int, float, str)) else ""
    if plain[-1:].isdigit() and float(plain) != 0 and not isinstance(value, bool):
        raise ValueError(f"{value!r} has no unit")
    return _seconds(value)


def _switch(value: object) -> object:
    # YAML reads a bare on or off as a truth value.
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def _codec(value: object) -> object:
    names = (*CODEC_NAMES, AUTO)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a codec")
    name = ALIASES.get(value, value)
    if name not in names:
        near = nearest(value, (*names, *ALIASES))
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"there is no codec {value!r}{hint}")
    return name


def _path(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, (str, Path)):
        raise ValueError(f"{value!r} is not a path")
    places = info.context if isinstance(info.context, Places) else Places.current()
    path = places.expand(str(value))
    if not path.is_absolute():
        raise ValueError(f"{str(value)!r} is relative, and engines start in different directories")
    return path


def _file_mode(value: object) -> object:
    # YAML reads 0660 as an octal number, and 660 as a decimal one.
    if isinstance(value, int) and not isinstance(value, bool):
        return f"0{value}" if value in (600, 640, 660) else f"{value:04o}"
    return value


def _group(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _items(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_SIZE_ALLOWED = f"up to {_MAX_GB:,} GB, a number of GB (10^9 bytes) or with a unit: {SIZE_EXAMPLES}"

_Capacity = Annotated[
    float,
    BeforeValidator(_gigabytes),
    Field(gt=0, allow_inf_nan=False),
    Key(allowed=f"above 0, {_SIZE_ALLOWED}", example="200G", unit="GB"),
]
_Reserve = Annotated[
    float,
    BeforeValidator(_gigabytes),
    Field(ge=0, allow_inf_nan=False),
    Key(allowed=f"0 or more, {_SIZE_ALLOWED}", example="10G", unit="GB"),
]
_Switch = Annotated[bool, Key(allowed="true or false", example="true")]
_LiveSwitch = Annotated[bool, Key(allowed="true or false", example="true", restart=False)]
_Path = Annotated[
    Path,
    BeforeValidator(_path),
    Key(
        allowed="an absolute path; ~, $NAME and ${NAME} are expanded",
        example="/mnt/nvme/lifeboat",
    ),
]


_Codec = Annotated[
    CodecName | Literal["auto"],
    BeforeValidator(_codec),
    Key(
        allowed=f"{', '.join(CODEC_NAMES)} or {AUTO}; turboquant4, turboquant3 and oscar2 stand "
        "for lbq4, lbq3 and lbq2",
        example="fp8",
        restart=False,
    ),
]


class Section(BaseModel):
    """A mapping in the configuration file: unknown keys are refused, values are fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        """Take a known key without a value as absent, and an absent section as empty.

        The sections are made here instead of by a default factory, so that their
        own defaults are validated with the context of this validation.
        """
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        kept: dict[Any, Any] = {k: v for k, v in data.items() if v is not None or k not in known}
        for name, field in known.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                kept.setdefault(name, {})
        return kept


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
    enabled: _Switch = Field(
        default=True, description="Whether the tier is used. Its data stays where it is."
    )
    path: _Path = Field(
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
    staging_gb: _Capacity = Field(
        default=20.0,
        description="Of `s3`: the most that may wait in `path` to be uploaded. Beyond it blocks "
        "are dropped (`busy`).",
    )
    mount: _Path | None = Field(
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
    capacity_gb: _Capacity | None = Field(
        default=None,
        description="The most that all engines together keep here. Without it only "
        "`min_free_gb` limits the store.",
    )
    min_free_gb: _Reserve = Field(
        default=10.0,
        description="Free space that is left on the file system for others. "
        "Below it nothing more is stored.",
    )
    direct_io: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(_switch),
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
        BeforeValidator(_seconds),
        Field(ge=0.1, le=_MAX_WAIT_S, allow_inf_nan=False),
        Key(
            allowed=f"0.1 to {_MAX_WAIT_S} seconds, a number of seconds or with a unit: "
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


class FallbackLocal(Section):
    """The directory used when no tier is usable."""

    enabled: _Switch = Field(
        default=True,
        description="Whether KV is kept here when no tier is usable. With no tier configured "
        "this is the store.",
    )
    path: _Path = Field(
        # The type is what it becomes: defaults pass through the validator too.
        default=Path("$LIFEBOAT_CACHE_HOME/kv"),
        description="The directory, on a local disk.",
    )
    capacity_gb: _Capacity = Field(
        default=50.0, description="The most that all engines together keep here."
    )
    min_free_gb: _Reserve = Field(
        default=10.0,
        description="Free space that is left on the file system for others. "
        "Below it nothing more is stored.",
    )

    @property
    def capacity_bytes(self) -> int:
        """The capacity in bytes."""
        return round(self.capacity_gb * 1e9)

    @property
    def min_free_bytes(self) -> int:
        """The free-space reserve in bytes."""
        return round(self.min_free_gb * 1e9)

    def as_tier(self) -> Tier:
        """Return the fallback in the shape of a tier, named ``fallback_local``."""
        return Tier.model_construct(
            name=FALLBACK_NAME,
            type="filesystem",
            rung=None,
            enabled=self.enabled,
            path=self.path,
            mount=None,
            protocol=None,
            file_mode="0600",
            group=None,
            capacity_gb=self.capacity_gb,
            min_free_gb=self.min_free_gb,
            direct_io="auto",
            timeout_s=10.0,
            bandwidth_limit_gbps=None,
            bucket=None,
            region=None,
            endpoint_url=None,
            prefix="",
            sse=None,
            sse_kms_key_id=None,
            staging_gb=20.0,
        )


class Storage(Section):
    """Where KV is kept: a ladder of tiers. Blocks are found wherever they are.

    Tiers may be added, removed, changed and reordered while engines run.
    """

    tiers: Annotated[
        tuple[Tier, ...],
        BeforeValidator(_items),
        Key(allowed="a list of tiers", example="[]", restart=False),
    ] = Field(default=(), description="The tiers, the preferred one first.")
    write_mode: Annotated[
        Literal["first", "local_first", "all"],
        Key(allowed="first, local_first or all", example="first", restart=False),
    ] = Field(
        default="first",
        description="Where new blocks go. `first`: to the first tier that is usable. "
        "`local_first`: to the tier on the fastest rung, and from there, in the background, to the "
        "next slower rung. `all`: to every usable tier, and they are done when all have answered. "
        "With `local_first` and `all`, what is loaded from a slower rung is copied to the fastest.",
    )
    fallback_local: FallbackLocal
    shared_lookup: _Switch = Field(
        default=True,
        description="Find also what other processes store in the same directory while this one "
        "runs, within seconds; data-parallel ranks share their blocks in this way. Off: only what "
        "was there at the start of a process, and what it stores itself.",
    )

    @property
    def places(self) -> tuple[Tier, ...]:
        """The enabled tiers in order, then the fallback if it is enabled."""
        tiers = tuple(tier for tier in self.tiers if tier.enabled)
        return (*tiers, self.fallback_local.as_tier()) if self.fallback_local.enabled else tiers

    @model_validator(mode="after")
    def _check(self) -> Storage:
        names: dict[str, int] = {}
        paths: dict[Path, int] = {}
        for index, tier in enumerate(self.tiers):
            if tier.name == FALLBACK_NAME:
                raise SettingError(
                    ("tiers", index, "name"),
                    f"{tier.name!r} is the name of storage.{FALLBACK_NAME}: "
                    "give the tier another name",
                )
            if tier.name in names:
                raise SettingError(
                    ("tiers", index, "name"),
                    f"{tier.name!r} is the name of storage.tiers[{names[tier.name]}] too: "
                    "give each tier a name of its own",
                )
            if tier.path in paths:
                raise SettingError(
                    ("tiers", index, "path"),
                    f"'{tier.path}' is the path of storage.tiers[{paths[tier.path]}] too: "
                    "give each tier a directory of its own",
                )
            names[tier.name] = paths[tier.path] = index
        if not self.places:
            raise SettingError(
                ("fallback_local", "enabled"),
                "nothing could be stored: no tier is enabled and the fallback is off; "
                "enable one of them (LIFEBOAT_CACHE=0 switches LifeboatCache off)",
            )
        return self


class Eviction(Section):
    """What happens when a place is full, and how long blocks are kept."""

    policy: Annotated[
        Literal["lru", "none"],
        Key(allowed="lru or none", example="lru", restart=False),
    ] = Field(
        default="lru",
        description="`lru`: blocks that were used least recently make room, whole prefixes from "
        "their end; a block counts as used when one behind it is. `none`: nothing makes room, and "
        "a place that is full takes no new blocks; what was deleted is reclaimed all the same.",
    )
    max_age: Annotated[
        float,
        BeforeValidator(_age),
        Field(ge=0, le=_MAX_AGE_S, allow_inf_nan=False),
        Key(
            allowed=f"0, or up to 10 years with a unit: {AGE_EXAMPLES}",
            example="30d",
            restart=False,
        ),
    ] = Field(
        default=0.0,
        description="Blocks that were stored longer ago are deleted by the agent, used or not. 0: "
        "they stay until room is needed.",
    )


class Rungs(Section):
    """The codec of each rung: of a kind of target, by how fast it is.

    For KV of 16 bits or more; 8-bit KV goes by `compression.lossless_8bit`. Recurrent state, and
    what is not known to be KV, is always kept exactly. A copy from one rung to another is coded
    anew, but never in a larger codec than what it is made of.
    """

    local: _Codec = Field(
        default="fp8",
        description="For all targets of this version. `raw`, `lossless` and `dense` (smaller, "
        "slower) are exact. `fp8` takes half the space, `lbq4`, `lbq3` and `lbq2` about 4, 3 and "
        "2 bits per value. `auto`: of `raw`, `lossless`, `dense`, `fp8` and `lbq4` the one that "
        "restores fastest here, measured; `lifeboat-cache status` says which and why.",
    )
    shared: _Codec = Field(
        default="fp8",
        description="For targets of type `nfs` and `ontap`, and tiers with `rung: shared`.",
    )
    archive: _Codec = Field(
        default="fp8",
        description="For tiers with `rung: archive`: the slowest ones.",
    )


class Compression(Section):
    """How KV is stored: exactly, or smaller. What is stored already stays readable."""

    ladder: Rungs
    lossless_8bit: Annotated[
        Literal["on", "remote", "off"],
        BeforeValidator(_switch),
        Key(allowed="on, remote or off", example="remote", restart=False),
    ] = Field(
        default="remote",
        description="Where 8-bit KV is compressed, without loss: on every rung (`on`), on rungs "
        "slower than `local` (`remote`), or nowhere (`off`). Otherwise it "
        "is stored as it is.",
    )


class Engine(Section):
    """How an engine uses the cache."""

    native_cpu_gb: Annotated[
        float,
        BeforeValidator(_gigabytes),
        Field(gt=0, allow_inf_nan=False),
        Key(allowed=f"above 0, {_SIZE_ALLOWED}", example="20G", unit="GB"),
    ] = Field(
        default=20.0,
        description="Memory for vLLM's CPU tier, through which blocks pass on their way to and "
        "from storage, for all data-parallel ranks on this host together; in the mode `lmcache` "
        "that of the LMCache server. Less is taken when /dev/shm or the memory left is smaller.",
    )
    native_block_tokens: Annotated[
        int,
        Field(ge=1, le=65536),
        Key(allowed="a whole number from 1 to 65536", example="256", unit="tokens"),
    ] = Field(
        default=256,
        description="Tokens per stored block, rounded to a multiple of the engine's own block. "
        "Larger blocks mean fewer lookups; only whole blocks are restored.",
    )
    native_promotion_wait_s: Annotated[
        float,
        BeforeValidator(_seconds),
        Field(ge=0, le=_MAX_WAIT_S, allow_inf_nan=False),
        Key(
            allowed=f"0 to {_MAX_WAIT_S} seconds, a number of seconds or with a unit: "
            f"{DURATION_EXAMPLES}",
            example="5s",
            unit="s",
        ),
    ] = Field(
        default=5.0,
        description="How long a request waits at most for the store to become ready (model "
        "identified, index read) before its blocks count as missing.",
    )
    native_codec: Annotated[
        Literal["exact", "ladder"],
        Key(allowed="exact or ladder", example="exact"),
    ] = Field(
        default="exact",
        description="How KV of vLLM's native mode and of SGLang's MLX backend is stored. `exact`: "
        "without loss, raw or compressed, whichever restores faster on the target; what others "
        "have stored with loss "
        "is not used. `ladder`: as `compression.ladder` says; recurrent state stays exact.",
    )
    io_workers: Annotated[
        int,
        Field(ge=1, le=64),
        Key(allowed="a whole number from 1 to 64", example="8", unit="threads"),
    ] = Field(
        default=8,
        description="The most threads that read and write storage in one engine process.",
    )
    vllm_mode: Annotated[
        Literal["native", "lmcache"],
        Key(allowed="native or lmcache", example="native"),
    ] = Field(
        default="native",
        description="What `LIFEBOAT_CACHE=1` switches on in vLLM. `native`: vLLM's own offloading "
        "with LifeboatCache as a tier. `lmcache`: LMCache with LifeboatCache as its second tier, "
        "in a server that all engines of the node share (needs lifeboatcache-lmcache).",
    )
    lmcache_port: Annotated[
        int,
        Field(ge=1024, le=65533),
        Key(allowed="a whole number from 1024 to 65533", example="6555"),
    ] = Field(
        default=6555,
        description="Where the local LMCache server listens. Its HTTP interface has the next port, "
        "its metrics the one after.",
    )
    lmcache_stays: _Switch = Field(
        default=False,
        description="Whether the LMCache server that engines have started stays when the last of "
        "them has ended. Otherwise it then writes what is queued, and ends.",
    )

    @property
    def native_cpu_bytes(self) -> int:
        """Bytes of vLLM's CPU tier on this host."""
        return round(self.native_cpu_gb * 1e9)


class Agent(Section):
    """The agent: one process per node and home directory that looks after the store."""

    autostart: _Switch = Field(
        default=True,
        description="Whether engines start the agent when there is none. Without an agent nothing "
        "is evicted: a store that is full takes no more.",
    )


class Security(Section):
    """Who may share KV, and how it is protected."""

    namespace_salt: Annotated[
        SecretStr,
        Key(allowed="text (put it in quotes)", example='"..."', secret=True),
    ] = Field(
        default=SecretStr(""),
        description="Engines share stored KV only if their salts are equal. Shown masked and "
        "never logged. The environment variable `LIFEBOAT_CACHE_NAMESPACE_SALT` overrides it.",
    )

    integrity_key: (
        Annotated[
            Path,
            BeforeValidator(_path),
            Key(
                allowed="an absolute path; ~, $NAME and ${NAME} are expanded",
                example="/etc/lifeboat/integrity.key",
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="A file of mode 0600 with 32 random bytes or more, or 64 hexadecimal digits or "
        "more. With it stored KV is protected against tampering: checksums are keyed (BLAKE3, "
        "slower than the default, which guards against accidents only), and only engines with the "
        "same key share KV. Make one with: `(umask 077; openssl rand -hex 32 > FILE)`. The "
        "environment variable `LIFEBOAT_CACHE_INTEGRITY_KEY` overrides it.",
    )

    @property
    def salt_bytes(self) -> bytes:
        """The salt in UTF-8, empty if there is none."""
        return self.namespace_salt.get_secret_value().encode()


class Prometheus(Section):
    """Metrics of all engines of this home directory together, served by the agent."""

    port: Annotated[
        int,
        Field(ge=0, le=65535),
        Key(
            allowed="a whole number from 0 to 65535; 0 serves nothing",
            example="9402",
            restart=False,
        ),
    ] = Field(default=9402, description="Where Prometheus finds `/metrics`.")
    host: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9.:_-]+$"),
        Key(allowed="an address or a name of this machine", example="0.0.0.0", restart=False),
    ] = Field(
        default="127.0.0.1",
        description="The address that is listened on. `0.0.0.0`: all of them. Whoever can reach "
        "it can read the names of models and how much they are used.",
    )


class Dashboard(Section):
    """Pages that show what all engines of this home directory do.

    The agent serves them, if the distribution `lifeboatcache-dashboard` is installed.
    """

    enabled: _LiveSwitch = Field(default=True, description="Whether the agent serves them.")
    host: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9.:_-]+$"),
        Key(allowed="an address or a name of this machine", example="0.0.0.0", restart=False),
    ] = Field(
        default="127.0.0.1",
        description="The address that is listened on. Any but a loopback address needs "
        "`auth_token`; without it nothing is served.",
    )
    port: Annotated[
        int,
        Field(ge=1, le=65535),
        Key(allowed="a whole number from 1 to 65535", example="9400", restart=False),
    ] = Field(default=9400, description="Where a browser finds them.")
    auth_token: Annotated[
        SecretStr,
        Key(
            allowed="text (put it in quotes), 16 characters or more",
            example='"..."',
            restart=False,
            secret=True,
        ),
    ] = Field(
        default=SecretStr(""),
        description="What a browser must show once, as `?token=...`, and a program with every "
        "request, as `Authorization: Bearer ...`. Shown masked and never logged. Make one with: "
        "`openssl rand -hex 24`.",
    )
    allow_config_edit: _LiveSwitch = Field(
        default=True,
        description="Whether the dashboard may change the configuration file and purge what is "
        "stored. Off: it only shows them.",
    )


class Telemetry(Section):
    """What is told to others."""

    prometheus: Prometheus


class Config(Section):
    """The whole configuration."""

    storage: Storage
    compression: Compression
    eviction: Eviction
    engine: Engine
    agent: Agent
    security: Security
    telemetry: Telemetry
    dashboard: Dashboard

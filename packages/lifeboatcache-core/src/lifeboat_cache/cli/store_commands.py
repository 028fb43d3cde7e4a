"""``lifeboat-cache ls``, and what it shares with ``lifeboat-cache purge``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lifeboat_cache.cli.output import RefusedError, clean, show_time, table
from lifeboat_cache.config import Config, Tier, load_config
from lifeboat_cache.config.units import format_size
from lifeboat_cache.errors import LifeboatError
from lifeboat_cache.mover.apart import Apart, Say
from lifeboat_cache.s3.names import STAGING
from lifeboat_cache.targets.base import NamespaceInfo, Usage, WriterInfo
from lifeboat_cache.targets.filesystem import FilesystemTarget

if TYPE_CHECKING:
    from lifeboat_cache.s3.target import S3Target

__all__ = ["SHORT", "Held", "TargetWork", "held", "ls", "matching", "opened", "say_problems"]

#: Digits of a digest that are shown.
SHORT = 12


@dataclass(frozen=True)
class Held:
    """What one target holds.

    Attributes
    ----------
    name, location, enabled
        From the configuration.
    apart
        Where it is worked on.
    there
        Whether its directory exists.
    usage
        What it uses, if it is there.
    namespaces
        What is stored.
    problem
        Why it cannot be read; then nothing else is known.
    """

    name: str
    location: str
    enabled: bool
    apart: Apart
    there: bool = False
    usage: Usage | None = None
    namespaces: tuple[NamespaceInfo, ...] = ()
    problem: str = ""


def opened(tier: Tier) -> FilesystemTarget | S3Target:
    """The target of a tier; nothing is touched."""
    if tier.type != "s3":
        return FilesystemTarget.from_tier(tier)
    from lifeboat_cache.s3.target import S3Target

    return S3Target.from_tier(tier)


class TargetWork:
    """What commands have done at one target. Requests name a method and its arguments."""

    def __init__(self, tier: Tier) -> None:
        self.target = opened(tier)

    def __call__(self, request: dict[str, Any], _: Say) -> Any:
        """Do one thing; see :class:`Apart`."""
        return getattr(self, request.pop("do"))(**request)

    def look(self) -> dict[str, Any]:
        """What is there."""
        infos = self.target.namespaces()
        there, usage = True, None
        if isinstance(self.target, FilesystemTarget):
            there = os.path.isdir(self.target.location)
            usage = self.target.usage() if there else None
        else:
            # A listing has said what all of it takes. There is no end to what a bucket holds.
            used = sum(info.bytes for info in infos)
            usage = Usage(used, self.target.capacity, 0, 0)
        return {
            "there": there,
            "usage": None if usage is None else asdict(usage),
            "namespaces": [asdict(info) for info in infos],
        }


def held(config: Config, work: Callable[[Tier], TargetWork] = TargetWork) -> Iterator[Held]:
    """Yield every configured target: one that was disabled still holds its data."""
    seen = set()
    for tier in (*config.storage.tiers, config.storage.fallback_local.as_tier()):
        if tier.location not in seen:
            seen.add(tier.location)
            yield _held(tier, work)
        # Two tiers may be one bucket behind two directories.
        staging = str(tier.path / STAGING)
        if tier.type == "s3" and staging not in seen and os.path.isdir(staging):
            seen.add(staging)
            yield _held(_staging(tier), work)


def _staging(tier: Tier) -> Tier:
    """The directory in which blocks wait to be uploaded, as a tier."""
    return Tier.model_validate(
        {
            "name": f"{tier.name}.staging"[-64:],
            "type": "filesystem",
            "path": str(tier.path / STAGING),
            "enabled": tier.enabled,
            "capacity_gb": tier.staging_gb,
            "min_free_gb": tier.min_free_gb,
        }
    )


def _held(tier: Tier, work: Callable[[Tier], TargetWork]) -> Held:
    item = Held(tier.name, tier.location, tier.enabled, Apart(tier, work(tier)))
    try:
        found = item.apart.ask({"do": "look"})
    except LifeboatError as error:
        return replace(item, problem=str(error))
    usage = found["usage"]
    return replace(
        item,
        there=found["there"],
        usage=None if usage is None else Usage(**usage),
        namespaces=tuple(map(_info, found["namespaces"])),
    )


def _info(found: dict[str, Any]) -> NamespaceInfo:
    writers = tuple(WriterInfo(**writer) for writer in found["writers"])
    return NamespaceInfo(
        found["digest"], found["identity"], found["display"], writers, tuple(found["problems"])
    )


def ls(args: argparse.Namespace) -> int:
    """Show what is stored."""
    found = []
    for item in held(load_config(args.config).config):
        item.apart.close()
        found.append(item)
    if args.namespace is not None:
        print(json.dumps(_one(found, args.namespace), indent=2))
        return 0
    if args.json:
        document = {"targets": [_target_json(item) for item in found]}
        print(json.dumps(document, indent=2))
    else:
        print("\n\n".join(map(_target_text, found)))
    return say_problems(found)


def say_problems(targets: list[Held]) -> int:
    """Say which targets cannot be read; the exit code."""
    for item in targets:
        if item.problem:
            print(f"lifeboat-cache: error: {item.name}: {item.problem}", file=sys.stderr)
    return 2 if any(item.problem for item in targets) else 0


def _target_json(item: Held) -> dict[str, Any]:
    return {
        "name": item.name,
        "location": item.location,
        "enabled": item.enabled,
        "problem": item.problem or None,
        "usage": None if item.usage is None else asdict(item.usage),
        "namespaces": [_namespace_json(info) for info in item.namespaces],
    }


def _namespace_json(info: NamespaceInfo) -> dict[str, Any]:
    return {
        **_facts(info),
        "digest": info.digest,
        "blocks": info.blocks,
        "bytes": info.bytes,
        "created": info.created,
        "last_used": info.last_used,
        "writers": [asdict(writer) for writer in info.writers],
        "problems": list(info.problems),
    }


def _target_text(item: Held) -> str:
    head = f"{item.name}{'' if item.enabled else ' (disabled)'}: {item.location}"
    if item.problem:
        return f"{head}\n  cannot be read, see below"
    usage = item.usage
    if usage is None:
        return f"{head}\n  is not there yet"
    limit = "" if usage.capacity is None else f" of {format_size(usage.capacity)}"
    head += f", {format_size(usage.used)}{limit} used"
    if not item.location.startswith("s3:"):
        head += f", {format_size(usage.free)} free"
    if not item.namespaces:
        return f"{head}\n  nothing is stored here"
    names = ("NAMESPACE", "MODEL", "DTYPE", "ENGINE", "ADAPTER", "BLOCKS", "SIZE", "WRITERS")
    rows = []
    for info in item.namespaces:
        alive = sum(writer.alive for writer in info.writers)
        rows.append(
            (
                info.digest[:SHORT],
                *(value or "-" for value in _facts(info).values()),
                info.blocks,
                format_size(info.bytes),
                f"{alive} alive, {len(info.writers) - alive} dead",
                show_time(info.created),
                show_time(info.last_used),
            )
        )
    lines = [head, table((*names, "CREATED", "LAST USED"), rows, "  ")]
    lines += [
        f"  {info.digest[:SHORT]}: {clean(problem)}"
        for info in item.namespaces
        for problem in info.problems
    ]
    return "\n".join(lines)


def _facts(info: NamespaceInfo) -> dict[str, str]:
    """Return what a namespace says about itself in a few words."""
    return {name: _fact(info, name) for name in ("model", "dtype", "engine", "adapter")}


def _fact(info: NamespaceInfo, name: str) -> str:
    places: tuple[Mapping[str, Any], ...] = (info.display, info.identity)
    for place in places:
        value = place.get(name)
        if isinstance(value, Mapping):
            # {"name": "vllm", "version": "0.32"}
            parts = (value.get(part) for part in ("name", "version", "format"))
            value = " ".join(str(part) for part in parts if isinstance(part, (str, int)))
        if isinstance(value, (str, int)) and value != "":
            return str(value)
    return ""


def matching(targets: list[Held], prefix: str) -> str:
    """Return the digest that a prefix means."""
    wanted = prefix.lower()
    # One whose document is damaged is only known by its directory, the head of its digest.
    found = sorted(
        {
            info.digest
            for item in targets
            for info in item.namespaces
            if info.digest.startswith(wanted) or wanted.startswith(info.digest)
        }
    )
    if not wanted or not found:
        raise RefusedError(
            f"no namespace starts with {prefix!r}. The namespaces are listed by: lifeboat-cache ls"
        )
    if any(not other.startswith(found[0][:32]) for other in found):
        names = ", ".join(digest[: max(SHORT, len(wanted) + 4)] for digest in found)
        raise RefusedError(f"{prefix!r} is the start of {names}. Write more of the one you mean.")
    return found[-1]


def _one(targets: list[Held], prefix: str) -> dict[str, Any]:
    digest = matching(targets, prefix)
    holders = [
        (item, info)
        for item in targets
        for info in item.namespaces
        if info.digest[:32] == digest[:32]
    ]
    _, first = next((pair for pair in holders if pair[1].digest == digest), holders[0])
    return {
        "digest": digest,
        "identity": first.identity,
        "display": first.display,
        "targets": [
            {
                "name": item.name,
                "location": item.location,
                **{k: v for k, v in _namespace_json(info).items() if k != "digest"},
            }
            for item, info in holders
        ],
    }

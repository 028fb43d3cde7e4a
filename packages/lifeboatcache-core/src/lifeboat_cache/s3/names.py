"""Names of objects in a bucket.

::

    <prefix>lifeboat-cache.json                              marks the prefix as ours
    <prefix>janitor.lease                                    which node looks after the bucket
    <prefix>probe/<random>                                   put, read and deleted again
    <prefix><namespace>/namespace.json                       whose blocks these are, readable
    <prefix><namespace>/segments/<writer>.<n>.segment        payloads
    <prefix><namespace>/feed/<time>-<writer>-<n>-<size>.journal     what a segment holds
    <prefix><namespace>/feed/<time>-<writer>-<n>-<size>.dead        tombstones alone
    <prefix><namespace>/feed/<time>-<writer>-<n>-<size>.gone        segments that were deleted
    <prefix><namespace>/uses/<node>.access                   when a node used which records

``<time>`` is the server's, in seconds since 1970, ten hexadecimal digits, taken just before the
object is put: what is new in a feed comes last, so that a listing costs what is new, however
many writers there are. ``<writer>`` and ``<n>`` are as in files; ``<size>`` is that of the segment
in bytes, ten hexadecimal digits, so that a listing alone says what a namespace takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lifeboat_cache.targets.layout import segment_name

__all__ = ["STAGING", "FeedKind", "FeedName", "Names", "parse_feed"]

#: The directory below a tier's `path` in which blocks wait to be uploaded.
STAGING = "staging"

FeedKind = Literal["journal", "dead", "gone"]

_FEED = re.compile(
    r"(?P<time>[0-9a-f]{10})-(?P<writer>[0-9a-f]{32})-(?P<number>[0-9]{8})-(?P<size>[0-9a-f]{10})"
    r"\.(?P<kind>journal|dead|gone)"
)
_SEGMENT = re.compile(r"[0-9a-f]{32}\.[0-9]{8,}\.segment")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FeedName:
    """What the name of an object in a feed says.

    Attributes
    ----------
    time
        When it was put, by the server's clock, in seconds.
    writer
        16 bytes.
    number
        Of the segment; of other kinds, a number that the writer has not used before.
    size
        Of the segment in bytes; of other kinds 0.
    kind
        See above.
    """

    time: int
    writer: bytes
    number: int
    size: int
    kind: FeedKind = "journal"

    def __str__(self) -> str:
        writer = self.writer.hex()
        return f"{self.time:010x}-{writer}-{self.number:08d}-{self.size:010x}.{self.kind}"


def parse_feed(name: str) -> FeedName | None:
    """Read the last part of a name in a feed; ``None`` if it is not one of ours."""
    found = _FEED.fullmatch(name)
    if found is None:
        return None
    kind: FeedKind = "journal"
    if found["kind"] != "journal":
        kind = "dead" if found["kind"] == "dead" else "gone"
    writer = bytes.fromhex(found["writer"])
    return FeedName(
        int(found["time"], 16), writer, int(found["number"]), int(found["size"], 16), kind
    )


@dataclass(frozen=True)
class Names:
    """The names below one prefix, which is empty or ends in a slash."""

    prefix: str

    @classmethod
    def of(cls, prefix: str) -> Names:
        """Those below a configured prefix."""
        trimmed = prefix.strip("/")
        return cls(f"{trimmed}/" if trimmed else "")

    @property
    def marker(self) -> str:
        """What marks the prefix as ours."""
        return f"{self.prefix}lifeboat-cache.json"

    @property
    def lease(self) -> str:
        """What says which node looks after the bucket."""
        return f"{self.prefix}janitor.lease"

    def probe(self, word: str) -> str:
        """An object to try out the bucket with."""
        return f"{self.prefix}probe/{word}"

    def document(self, namespace: str) -> str:
        """The description of a namespace, which is given as the name of its directory."""
        return f"{self.prefix}{namespace}/namespace.json"

    def segment(self, namespace: str, writer: bytes, number: int) -> str:
        """A segment."""
        return f"{self.prefix}{namespace}/segments/{segment_name(writer.hex(), number)}"

    def segments(self, namespace: str) -> str:
        """What the names of a namespace's segments begin with."""
        return f"{self.prefix}{namespace}/segments/"

    def is_segment(self, key: str) -> bool:
        """Whether a key is that of a segment below this prefix."""
        folder, _, name = key.removeprefix(self.prefix).partition("/segments/")
        return (
            key.startswith(self.prefix)
            and self.is_namespace(folder)
            and _SEGMENT.fullmatch(name) is not None
        )

    def feed(self, namespace: str) -> str:
        """What the names of a namespace's feed begin with."""
        return f"{self.prefix}{namespace}/feed/"

    def all_uses(self, namespace: str) -> str:
        """What the names of objects begin with that say when records were used."""
        return f"{self.prefix}{namespace}/uses/"

    def uses(self, namespace: str, node: bytes) -> str:
        """What one node says of that."""
        return f"{self.all_uses(namespace)}{node.hex()}.access"

    def in_feed(self, namespace: str, name: FeedName) -> str:
        """An object of a feed."""
        return f"{self.prefix}{namespace}/feed/{name}"

    @staticmethod
    def is_namespace(folder: str) -> bool:
        """Whether the name of a folder is that of a namespace."""
        return _NAMESPACE.fullmatch(folder) is not None

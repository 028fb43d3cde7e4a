"""Where new blocks go on a ladder of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lifeboat_cache.codecs.ladder import SPEED
from lifeboat_cache.store.member import Member

__all__ = ["WriteMode", "below", "by_speed", "expects_below", "faster", "read_order", "store_order"]

#: ``first``: straight to the first usable target. ``local_first``: to the fastest one, and
#: copied on from there. ``all``: to every usable target.
WriteMode = Literal["first", "local_first", "all"]


def speed(member: Member) -> int:
    """The place of a target's rung, the fastest first."""
    return SPEED[member.spec.rung]


def by_speed(members: Sequence[Member]) -> tuple[Member, ...]:
    """The fastest first; of one rung in the order of the configuration."""
    return tuple(sorted(members, key=speed))


def read_order(members: Sequence[Member]) -> tuple[Member, ...]:
    """The order in which copies are read: by rung, but what turns out much faster goes first."""
    order = list(by_speed(members))
    for end in range(len(order), 1, -1):
        for at in range(1, end):
            if order[at].speed.beats(order[at - 1].speed):
                order[at - 1 : at + 1] = order[at], order[at - 1]
    return tuple(order)


def store_order(members: Sequence[Member], mode: WriteMode) -> list[Member]:
    """Usable targets in the order in which new blocks are offered to them.

    A fallback is there only if nothing else is.
    """
    usable = [member for member in members if member.usable]
    usable = [one for one in usable if not one.spec.fallback] or usable
    return list(by_speed(usable)) if mode == "local_first" else usable


def below(members: Sequence[Member], source: Member) -> Member | None:
    """The target that blocks are copied on to: usable, of the next slower rung."""
    slower = [
        one
        for one in by_speed(members)
        if speed(one) > speed(source) and one.usable and not one.spec.fallback
    ]
    return slower[0] if slower else None


def expects_below(members: Sequence[Member], source: Member) -> bool:
    """Whether there is a target of a slower rung at all, usable or not."""
    return any(speed(one) > speed(source) and not one.spec.fallback for one in members)


def faster(members: Sequence[Member], source: Member) -> Member | None:
    """The target that blocks are promoted to: the fastest one, if faster than ``source``."""
    usable = [one for one in by_speed(members) if one.usable and not one.spec.fallback]
    return usable[0] if usable and speed(usable[0]) < speed(source) else None

"""What the janitor's tests share: a clock that is moved by hand, and ended writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lifeboat_cache.batch import BlockBuffers
from lifeboat_cache.check import check_targets
from lifeboat_cache.check.report import CheckReport
from lifeboat_cache.config.schema import Tier
from lifeboat_cache.janitor import Janitor, JanitorClock, JanitorPolicy, JanitorReport
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.outcome import Outcome
from lifeboat_cache.targets.base import TargetWriter
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import cut_at, payload_of, sample_keys, sample_records

#: When the tests' records were stored.
THEN = 1_700_000_000


class Clock:
    """Time that only passes when it is told to."""

    def __init__(self, time: float = THEN + 10_000.0) -> None:
        self.passed = 1000.0
        self.offset = time - self.passed

    def tick(self, seconds: float) -> None:
        self.passed += seconds

    def set(self, time: float) -> None:
        """Let the wall clock jump."""
        self.offset = time - self.passed

    @property
    def both(self) -> JanitorClock:
        return JanitorClock(lambda: self.passed, lambda: self.passed + self.offset)


@dataclass
class Block:
    """A block to store; ``number`` decides key and content."""

    number: int
    family: int = 0
    parent: int = 0
    position: int = 0
    group: int = 0
    time: int = THEN


def chain(first: int, count: int, time: int = THEN, *, root: int = 0) -> list[Block]:
    """A prefix of blocks; ``root`` is the family that it starts behind."""
    return [
        Block(
            first + at,
            family=first + at + 1,
            parent=(first + at) if at else root,
            position=256 * (at + 1),
            time=time,
        )
        for at in range(count)
    ]


def write(
    root: Path,
    blocks: Sequence[Block],
    namespace: Namespace,
    *,
    size: int = 8192,
    writer: TargetWriter | None = None,
) -> TargetWriter:
    """Store blocks with a writer, which lives on."""
    if writer is None:
        target = FilesystemTarget(root)
        target.probe()
        writer = target.writer(namespace)
    keys = sample_keys(block.number for block in blocks)
    memory = [cut_at(payload_of(key, size)) for key in keys]
    buffers = BlockBuffers.from_buffers(memory)
    entries = sample_records(namespace, keys, buffers)
    for name in ("family", "parent", "position", "group", "time"):
        entries[name] = [getattr(block, name) for block in blocks]
    outcomes = writer.append(entries, buffers, range(len(blocks)))
    assert [Outcome(outcome) for outcome in outcomes] == [Outcome.OK] * len(blocks)
    return writer


def leave(root: Path, blocks: Sequence[Block], namespace: Namespace, size: int = 8192) -> None:
    """Store blocks with a writer that ends."""
    write(root, blocks, namespace, size=size).close()


def janitor(
    root: Path,
    clock: Clock,
    *,
    capacity: int | None = None,
    reserve: int = 0,
    **settings: object,
) -> Janitor:
    """A janitor that does not wait for the disk to be nearly full."""
    policy = JanitorPolicy(**{"margin_bytes": 0, **settings})  # type: ignore[arg-type]
    target = FilesystemTarget(root, capacity=capacity, reserve=reserve)
    return Janitor(target, policy=policy, clock=clock.both)


def run_until_quiet(one: Janitor, clock: Clock, most: int = 8) -> list[JanitorReport]:
    """Run again and again, past all graces."""
    reports = []
    for _ in range(most):
        reports.append(one.run_once())
        assert not reports[-1].problems
        clock.tick(100)
    return reports


def check(root: Path) -> CheckReport:
    """Verify everything that is there."""
    tier = Tier.model_construct(name="t", type="filesystem", path=root, direct_io="auto")
    return check_targets([tier])


def verified(root: Path) -> int:
    """How many records are live and intact; nothing may be wrong."""
    report = check(root)
    assert not report.faults, report.faults
    assert not [t.problem for t in report.targets if t.problem]
    return sum(n.records.verified for t in report.targets for n in t.namespaces)


def names(root: Path, kind: str) -> list[str]:
    """Names of the files of one kind."""
    return sorted(path.name for path in root.glob(f"*/*.{kind}"))

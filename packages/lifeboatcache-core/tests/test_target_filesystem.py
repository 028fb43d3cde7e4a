"""The directory target against the conformance suite, with and without O_DIRECT."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

from lifeboat_cache.format.bitmap import set_dead
from lifeboat_cache.format.header import (
    HEADER_BYTES,
    MAGIC_DEAD,
    MAGIC_JOURNAL,
    MAGIC_SEGMENT,
    FileHeader,
)
from lifeboat_cache.targets.base import Place
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.layout import ROOT_MARKER, segment_name
from lifeboat_cache.testing import TargetTests


def newer(header: bytes) -> bytes:
    """The header as the next format might write it: only magic and version are sure."""
    return header[:8] + (2).to_bytes(4, "little") + b"\x5a" * (HEADER_BYTES - 12)


class DirectoryTests(TargetTests):
    direct_io: Literal["auto", "on", "off"]

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "kv"
        self.home = self.root / self.namespace.directory

    @pytest.fixture
    def target(self) -> Callable[..., FilesystemTarget]:
        def make(*, capacity: int | None = None, reserve: int = 0) -> FilesystemTarget:
            return FilesystemTarget(
                self.root, capacity=capacity, reserve=reserve, direct_io=self.direct_io
            )

        return make

    def segment(self, place: Place, kind: str = "segment") -> Path:
        return self.home / segment_name(place.writer.hex(), place.segment, kind)

    def remove_segment(self, place: Place) -> None:
        self.segment(place).unlink()

    def cut_segment(self, place: Place, length: int) -> None:
        os.truncate(self.segment(place), length)

    def declare_dead(self, place: Place, slots: Sequence[int]) -> None:
        header = FileHeader(MAGIC_DEAD, self.namespace.digest, place.writer, place.segment, 1)
        self.segment(place, "dead").write_bytes(header.pack() + set_dead(b"", slots))

    def plant_foreign_data(self) -> Callable[[], bytes]:
        self.root.mkdir()
        (self.root / "thesis.tex").write_bytes(b"years of work")
        return lambda: repr(
            [(p.name, p.read_bytes()) for p in sorted(self.root.rglob("*"))]
        ).encode()

    def plant_newer_target(self) -> None:
        (self.root / ROOT_MARKER).write_text('{"format": 2, "more": []}\n')

    def plant_newer_writer(self) -> bytes:
        writer = bytes(range(100, 116))
        digest = self.namespace.digest
        for name, magic in (
            (f"{writer.hex()}.journal", MAGIC_JOURNAL),
            (segment_name(writer.hex(), 0), MAGIC_SEGMENT),
        ):
            header = newer(FileHeader(magic, digest, writer, 0, 1).pack())
            (self.home / name).write_bytes(header + b"\xa5" * 8192)
        return writer

    def snapshot(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }


class TestBuffered(DirectoryTests):
    direct_io = "off"


class TestDirect(DirectoryTests):
    direct_io = "auto"

"""Which prefixes are used most, from real journals and access logs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lifeboat_cache.batch import BlockBatch, BlockBuffers
from lifeboat_cache.dashboard.prefixes import shared_prefixes
from lifeboat_cache.keys import block_keys, tag
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store import block_store, keeper
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget

BLOCK = 16


class Prompts:
    """An engine that stores prompts, of which one letter is one block."""

    def __init__(self, root: Path, namespace: Namespace) -> None:
        self._store = BlockStore(namespace, [FilesystemTarget(root, reserve=0)])
        assert self._store.wait_recovered(60)

    def keys(self, prompt: str) -> Sequence[bytes]:
        return block_keys([prompt[:end].encode() for end in range(1, len(prompt) + 1)])

    def store(self, prompt: str) -> None:
        families = [tag(prompt[:end].encode()) for end in range(1, len(prompt) + 1)]
        batch = BlockBatch(
            self.keys(prompt),
            BlockBuffers.from_buffers([bytearray(4096) for _ in prompt]),
            positions=[BLOCK * end for end in range(1, len(prompt) + 1)],
            families=families,
            parents=[0, *families[:-1]],
        )
        assert self._store.store(batch, on_done=lambda _: None).wait(60)

    def use(self, prompt: str, times: int) -> None:
        for _ in range(times):
            self._store.touch(self.keys(prompt))
            self._store._flush_accesses()

    def close(self) -> None:
        self._store.close()


@pytest.fixture
def namespace() -> Namespace:
    return Namespace.from_identity({"engine": "test", "model": "prefixes"})


def test_what_is_used_again_and_again_comes_first(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(int(time.time()) + 60, 30)
    monkeypatch.setattr(block_store, "coarse_time", lambda: next(clock))
    monkeypatch.setattr(keeper, "_ACCESS_S", 3600.0)
    first, second = Prompts(tmp_path, namespace), Prompts(tmp_path, namespace)
    directory = tmp_path / namespace.directory
    for prompt in ("aaaabb", "aaaacc", "xxxxxxxx"):
        first.store(prompt)
    (shared,) = shared_prefixes(directory)
    assert (shared.tokens, shared.uses, shared.continuations) == (4 * BLOCK, 0, 2)
    assert shared.blocks == 5, "the last of it, and all that follow"
    began = int(time.time())
    # The same prompt again and again, and what only begins as others do; by two engines.
    first.use("xxxxxxxx", 3)
    first.use("aaaabb", 1)
    give_up = time.monotonic() + 60
    while len(second._store) < 16:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    second.use("xxxxxxxx", 2)
    second.use("aaaacc", 1)
    found = shared_prefixes(directory)
    assert [(one.tokens, one.uses, one.continuations) for one in found] == [
        (8 * BLOCK, 5, 1),
        (4 * BLOCK, 2, 2),
    ]
    assert all(one.last_used >= began for one in found)
    first.close()
    second.close()


def test_a_directory_without_anything(tmp_path: Path) -> None:
    assert shared_prefixes(tmp_path) == []

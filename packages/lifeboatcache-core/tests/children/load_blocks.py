"""Look up and load numbered blocks: ``load_blocks.py ROOT SIZE NUMBER…``."""

from __future__ import annotations

import sys
from pathlib import Path

from lifeboat_cache.namespace import Namespace
from lifeboat_cache.store.block_store import BlockStore
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.testing import StoreDriver

root, size = Path(sys.argv[1]), int(sys.argv[2])
numbers = [int(text) for text in sys.argv[3:]]
namespace = Namespace.from_identity({"engine": "test", "model": "small"})
store = BlockStore(namespace, [FilesystemTarget(root)], io_workers=1)
store.wait_recovered(60)
driver = StoreDriver(store, size=size)
found = driver.lookup(numbers)
loaded = driver.load(numbers)
print(*(f"{hit.name}/{outcome.name}" for hit, outcome in zip(found, loaded, strict=True)))
store.close()

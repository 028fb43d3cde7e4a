"""Write the golden files of format 1 anew: ``python golden/make_golden.py``.

Only for a new format. The files of a format that has been released never change:
if the tests say that they would, the code is wrong.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lifeboat_cache.testing import GoldenTree

if __name__ == "__main__":
    trees = {"format-1": GoldenTree.format_1(), "format-1-checksums": GoldenTree.checksums()}
    for name, tree in trees.items():
        place = Path(__file__).parent / name
        shutil.rmtree(place, ignore_errors=True)
        tree.write(place)

"""How far a prefix can be restored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.integrations.sglang_prefixes import Hits, longest_run, trailing_hits


@pytest.mark.parametrize(
    ("there", "run"), [("", 0), ("x", 1), (".", 0), ("xx.x", 2), ("xxx", 3), (".xx", 0)]
)
def test_the_run_ends_at_the_first_page_that_is_missing(there: str, run: int) -> None:
    assert longest_run(np.array([one == "x" for one in there], dtype=bool)) == run


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 8))
def test_a_window_is_there_only_with_all_of_its_pages(there: list[bool], window: int) -> None:
    found = trailing_hits(np.array(there, dtype=bool), window).tolist()
    assert found == [all(there[max(0, end - window) : end]) for end in range(1, len(there) + 1)]


def test_pools_remove_prefixes_and_never_add_any() -> None:
    hits = Hits(5)
    assert hits.prefixes == [1, 2, 3, 4, 5]
    hits.add("swa", (5, np.array([0, 0, 1, 0, 1, 1], dtype=bool)))
    hits.add("mamba", (4, np.array([0, 1, 1, 1, 1, 0], dtype=bool)))
    assert (hits.prefixes, hits.longest) == ([2, 4], 4)
    assert hits.by_pool("kv") == {"kv": 5, "swa": 5, "mamba": 4}


def test_a_pool_that_has_nothing_leaves_no_prefix() -> None:
    hits = Hits(3)
    hits.add("mamba", (0, np.zeros(4, dtype=bool)))
    assert (hits.prefixes, hits.longest, hits.by_pool("kv")) == ([], 0, {"kv": 3})


def test_a_pool_may_report_without_deciding() -> None:
    hits = Hits(4)
    hits.add("blocks", (2, None))
    assert (hits.longest, hits.by_pool("kv")) == (4, {"kv": 4, "blocks": 2})

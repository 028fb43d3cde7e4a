from __future__ import annotations

import pytest

from lifeboat_cache.integrations.vllm_versions import (
    TESTED,
    describe_tested,
    is_tested,
    parse_minor,
)


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("0.32.0", (0, 32)),
        ("0.33.0rc1", (0, 33)),
        ("0.33rc2", (0, 33)),
        ("0.32.1.post1", (0, 32)),
        ("0.32.0+cpu", (0, 32)),
        ("v0.32.0", (0, 32)),
        ("0.33.0.dev7+gabcdef.d20260101", (0, 33)),
        ("0.33", (0, 33)),
        ("1.0.0", (1, 0)),
        ("0.3.2", (0, 3)),
        ("0.320.0", (0, 320)),
        ("", None),
        ("dev", None),
        ("0", None),
        ("0.x", None),
        ("0.32nonsense", None),
    ],
)
def test_the_minor_release_of_a_version(version: str, minor: tuple[int, int] | None) -> None:
    assert parse_minor(version) == minor
    assert is_tested(version) == (minor in TESTED)


def test_the_range_for_people() -> None:
    assert list(TESTED) == sorted(TESTED)
    assert describe_tested() == "0.32 to 0.33"

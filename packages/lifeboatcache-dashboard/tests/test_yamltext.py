"""Changing values in the text of a YAML file touches nothing else."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.config.template import render_template
from lifeboat_cache.dashboard.yamltext import append_item, mask, remove, set_value

FILE = """\
# The head.
storage:
    tiers:
        # the fast one
        - name: nvme      # in the front
          path: "/mnt/a"
          capacity_gb: 200G

        - {name: hdd, path: /mnt/b}
    # about the fallback
    fallback_local:
        capacity_gb: 50   # gigabytes

compression: {ladder: {local: fp8}}
eviction:
    policy: 'lru'

# The end.
"""


def changed(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


@pytest.mark.parametrize(
    ("path", "value", "lines"),
    [
        (("eviction", "policy"), "none", ["-    policy: 'lru'", "+    policy: none"]),
        (
            ("storage", "fallback_local", "capacity_gb"),
            "70G",
            ["-        capacity_gb: 50   # gigabytes", "+        capacity_gb: 70G   # gigabytes"],
        ),
        (
            ("storage", "tiers", 0, "path"),
            "/mnt/new: one",
            ['-          path: "/mnt/a"', "+          path: '/mnt/new: one'"],
        ),
        (
            ("storage", "tiers", 1, "path"),
            "/mnt/c",
            ["-        - {name: hdd, path: /mnt/b}", "+        - {name: hdd, path: /mnt/c}"],
        ),
        (
            ("storage", "tiers", 1, "capacity_gb"),
            7,
            ["-        - {name: hdd, path: /mnt/b}",
             "+        - {name: hdd, path: /mnt/b, capacity_gb: 7}"],
        ),
        (
            ("compression", "lossless_8bit"),
            "on",
            ["-compression: {ladder: {local: fp8}}",
             "+compression: {ladder: {local: fp8}, lossless_8bit: 'on'}"],
        ),
        (("storage", "tiers", 0, "min_free_gb"), 9, ["+          min_free_gb: 9"]),
        (("storage", "fallback_local", "enabled"), False, ["+        enabled: false"]),
        (
            ("telemetry", "prometheus", "port"),
            0,
            ["+telemetry:", "+  prometheus:", "+    port: 0"],
        ),
    ],
)  # fmt: skip
def test_only_the_line_of_a_value_changes(path: Any, value: Any, lines: list[str]) -> None:
    after = set_value(FILE, path, value)
    assert changed(FILE, after) == lines
    found = yaml.safe_load(after)
    for part in path:
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        (("eviction", "policy"), ["-    policy: 'lru'"]),
        (("eviction",), ["-eviction:", "-    policy: 'lru'"]),
        (("storage", "tiers", 0, "capacity_gb"), ["-          capacity_gb: 200G"]),
        (
            ("storage", "tiers", 0, "name"),
            ["-        - name: nvme      # in the front", '-          path: "/mnt/a"',
             '+        - path: "/mnt/a"'],
        ),
        (("storage", "tiers", 1), ["-        - {name: hdd, path: /mnt/b}"]),
        (
            ("storage", "tiers", 1, "name"),
            ["-        - {name: hdd, path: /mnt/b}", "+        - {path: /mnt/b}"],
        ),
        (("nothing", "there"), []),
    ],
)  # fmt: skip
def test_only_the_lines_of_what_is_removed_go(path: Any, lines: list[str]) -> None:
    assert changed(FILE, remove(FILE, path)) == lines


def test_items_are_added_and_the_last_one_removed() -> None:
    item = {"name": "new", "path": "/x"}
    after = append_item(FILE, ("storage", "tiers"), item)
    assert changed(FILE, after) == ["+        - name: new", "+          path: /x"]
    for text in ("", "storage:\n", "storage:\n  tiers:\n", "storage: {tiers: []}\n",
                 "storage:\n  tiers: []\n", "storage:\n  shared_lookup: true"):  # fmt: skip
        found = append_item(text, ("storage", "tiers"), item)
        assert yaml.safe_load(found)["storage"]["tiers"] == [item], text
    one = "storage:\n  tiers:  # mine: all\n    - name: a\n      path: /a\n  shared_lookup: true\n"
    left = remove(one, ("storage", "tiers", 0))
    assert yaml.safe_load(left) == {"storage": {"tiers": [], "shared_lookup": True}}


def test_a_key_that_stands_in_a_comment_is_set_where_it_stands() -> None:
    text = render_template()
    after = set_value(text, ("storage", "fallback_local", "capacity_gb"), "70G")
    assert changed(text, after) == ["-#    capacity_gb: 50", "+    capacity_gb: 70G"]
    after = set_value(after, ("compression", "ladder", "local"), "lbq4")
    assert "+    local: lbq4" in changed(text, after)
    assert yaml.safe_load(after)["compression"] == {"ladder": {"local": "lbq4"}}


def test_what_cannot_be_done_is_refused() -> None:
    for text in ("a: [", "- 1", "storage: text"):
        with pytest.raises(ValueError, match=r"\w"):
            set_value(text, ("storage", "fallback_local", "path"), "x")


def test_secrets_are_masked() -> None:
    text = (
        'security:\n  namespace_salt: "two words"  # why\ndashboard: {auth_token: abc, port: 1}\n'
    )
    shown = mask(text, [("security", "namespace_salt"), ("dashboard", "auth_token"), ("x", "y")])
    assert shown == (
        "security:\n  namespace_salt: ********  # why\ndashboard: {auth_token: ********, port: 1}\n"
    )


scalars = st.one_of(
    st.booleans(), st.integers(-5, 1 << 40), st.text(st.characters(codec="ascii"), max_size=12)
)
paths = st.sampled_from(
    [
        ("storage", "fallback_local", "capacity_gb"),
        ("storage", "tiers", 0, "name"),
        ("storage", "tiers", 0, "capacity_gb"),
        ("storage", "tiers", 1, "path"),
        ("storage", "shared_lookup"),
        ("compression", "ladder", "local"),
        ("eviction", "policy"),
        ("engine", "io_workers"),
    ]
)


@given(st.lists(st.tuples(paths, st.none() | scalars), max_size=8))
def test_any_sequence_of_changes_gives_what_was_said(steps: list[tuple[Any, Any]]) -> None:
    text, wanted = FILE, yaml.safe_load(FILE)
    for path, value in steps:
        target = wanted
        for part in path[:-1]:
            if isinstance(target, dict) and target.get(part) is None:
                target[part] = {}
            target = target[part]
        if value is None:
            try:
                text = remove(text, path)
            except ValueError:
                continue
            if isinstance(target, dict):
                target.pop(path[-1], None)
        else:
            text = set_value(text, path, value)
            target[path[-1]] = value
    assert filled(yaml.safe_load(text)) == filled(wanted)
    assert "# the fast one" in text
    assert text.startswith("# The head.")
    assert "# The end." in text


def filled(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: filled(below) for key, below in value.items()}
        return {key: below for key, below in kept.items() if below not in (None, {}, [])}
    return [filled(below) for below in value] if isinstance(value, list) else value

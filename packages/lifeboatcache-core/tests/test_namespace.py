from __future__ import annotations

import enum
import json
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.errors import FormatError, IdentityError
from lifeboat_cache.namespace import Namespace, canonical_json

IDENTITY: dict[str, Any] = {"engine": "x", "n": [1, 1.0, True, None, "é"]}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
documents = st.dictionaries(
    st.text(),
    st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    ),
    min_size=1,
    max_size=5,
)


def test_digest_never_changes() -> None:
    namespace = Namespace.from_identity(IDENTITY)
    assert namespace.hex == "b473b742a0f3f2a8ff37751fa1250d6ae987ad41db8601088020400391772bb1"
    assert namespace.directory == namespace.hex[:32]
    assert namespace.digest.hex() == namespace.hex


@given(documents)
def test_written_document_reads_back(identity: dict[str, Any]) -> None:
    namespace = Namespace.from_identity(identity, display={"name": "shown"})
    read = Namespace.from_json(namespace.to_json())
    assert read == namespace
    assert read.digest == namespace.digest
    assert read.identity == namespace.identity
    assert read.display == {"name": "shown"}
    assert Namespace.from_json(namespace.to_json().encode()) == namespace


@given(documents)
def test_order_of_keys_and_kind_of_container_do_not_matter(identity: dict[str, Any]) -> None:
    turned = dict(reversed(identity.items()))
    proxied = types.MappingProxyType(identity)
    assert canonical_json(turned) == canonical_json(identity) == canonical_json(proxied)
    assert Namespace.from_identity(proxied) == Namespace.from_identity(identity)
    assert canonical_json({"a": (1, 2)}) == canonical_json({"a": [1, 2]})


@given(documents, documents)
def test_different_documents_have_different_digests(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    same = canonical_json(one) == canonical_json(other)
    assert (Namespace.from_identity(one) == Namespace.from_identity(other)) is same


def test_values_that_python_calls_equal_are_told_apart() -> None:
    values = [1, 1.0, True, "1", None, "None", [1], [[1]], {"1": 1}, 0, -0.0, 0.0, False, ""]
    digests = {Namespace.from_identity({"v": value}).digest for value in values}
    assert len(digests) == len(values)


def test_display_does_not_enter_the_digest() -> None:
    plain = Namespace.from_identity(IDENTITY)
    shown = Namespace.from_identity(IDENTITY, display={"path": "/models/a"})
    assert shown == plain
    assert hash(shown) == hash(plain)
    assert shown.to_json() != plain.to_json()
    assert plain != "something else"


def test_display_takes_what_people_can_read() -> None:
    shown = Namespace.from_identity(IDENTITY, display={"path": Path("models/a"), "when": {1}})
    assert json.loads(shown.to_json())["display"] == {"path": "models/a", "when": "{1}"}


def test_later_changes_of_the_callers_document_do_not_reach_it() -> None:
    identity = {"engine": "x", "layers": [1, 2]}
    namespace = Namespace.from_identity(identity)
    identity["layers"].append(3)  # type: ignore[attr-defined]
    assert namespace.identity == {"engine": "x", "layers": [1, 2]}
    assert Namespace.from_json(namespace.to_json()) == namespace


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("identity", "where"),
    [
        ({}, "empty"),
        ({"a": float("nan")}, "identity.a is nan"),
        ({"a": [1, float("inf")]}, r"identity.a\[1\] is inf"),
        ({"a": {"b": b"bytes"}}, "identity.a.b is of type bytes"),
        ({"a": {1: 2}}, "identity.a has the key 1"),
        ({"a": {1, 2}}, "identity.a is of type set"),
        ({"a": Path("x")}, "identity.a is of type"),
        ({"a": object()}, "identity.a is of type object"),
    ],
)
def test_ambiguous_documents_are_refused_and_the_place_is_named(
    identity: dict[str, Any], where: str
) -> None:
    with pytest.raises(IdentityError, match=where):
        Namespace.from_identity(identity)


def test_an_enumeration_of_numbers_is_its_number() -> None:
    assert canonical_json({"a": Colour.RED}) == b'{"a":1}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "{}",
        '{"identity": {}, "digest": ""}',
        '{"identity": [1], "digest": ""}',
        '{"identity": {"a": NaN}, "digest": ""}',
        '{"identity": {"a": 1}, "digest": 7}',
        '{"identity": {"a": 1}, "display": [1, 2], "digest": ""}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_damaged_documents_are_errors_with_a_remedy(text: str | bytes) -> None:
    with pytest.raises(FormatError, match="purge its directory"):
        Namespace.from_json(text)


def test_document_with_a_changed_identity_is_refused() -> None:
    text = Namespace.from_identity({"rope_theta": 10000.0}).to_json()
    with pytest.raises(FormatError, match="does not match its digest"):
        Namespace.from_json(text.replace("10000.0", "20000.0"))


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_no_bytes_crash_the_reader(text: str | bytes) -> None:
    with pytest.raises(FormatError):
        Namespace.from_json(text)
